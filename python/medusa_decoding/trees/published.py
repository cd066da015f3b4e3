"""Trees for the checkpoints that the authors of the Medusa paper published, from their published accuracies.

For each checkpoint, `published.json` holds the top-n accuracies of each head (from the training logs of the original
project: Medusa-1, Vicuna v1.3) and the best trees of 16, 32 and 64 nodes for them (Medusa paper, section 2.3.3). Trees
from your own calibration are better (`medusa calibrate`).
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any

from medusa_decoding.trees.tree import Tree

SIZES = (16, 32, 64)


def published_tree(base_model: str | None, num_nodes: int = 64) -> Tree | None:
    """Return the tree of 16, 32 or 64 nodes (root included) of a published checkpoint; None for other models.

    The last part of the base model's name, a hub id or a folder, is looked up, ignoring case.

    Raises:
        ValueError: another number of nodes.
    """
    if num_nodes not in SIZES:
        raise ValueError(f"num_nodes: expected one of {', '.join(map(str, SIZES))}, got {num_nodes}")
    name = (base_model or "").rstrip("/").replace("\\", "/").rsplit("/", 1)[-1].lower()
    entry = _published().get(name)
    return None if entry is None else Tree(entry["trees"][str(num_nodes)])


@functools.cache
def _published() -> dict[str, Any]:
    text = resources.files("medusa_decoding.trees").joinpath("published.json").read_text(encoding="utf-8")
    return json.loads(text)
