"""The embedded default: a small code model with heads, made by `recipes/demo`."""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""Folder of the embedded checkpoint: `base` (transformers), `heads` (the paper's version 2), `README.md` (its card)."""
