"""One call of `generate`: checking it, its settings in transformers' terms, its session, output and metrics."""
