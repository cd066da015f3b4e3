"""Tuning: how often heads are right on your prompts, how long steps take here, and the tree that gains most."""
