"""A training run: loading, stages of steps, checkpoints, measuring, and the model card."""
