"""Benchmarks: `pytest benchmarks/ --benchmark-only`, or one by one as `python -m benchmarks.bench_<name>`."""
