"""Self-distillation data: the model answers prompts, and its answers become training data (paper, section 2.3.2)."""
