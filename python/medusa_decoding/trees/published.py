"""Accuracies of the heads that the authors of the Medusa paper published, and the best trees for them.

Trees from your own calibration are better (`medusa calibrate`).
"""

from __future__ import annotations

from medusa_decoding.trees.tree import Tree

# Of each rank alone, from the cumulative figures of the original project's training logs (Medusa-1, Vicuna v1.3).
ACCURACIES = {
    "vicuna-7b-v1.3": [
        [0.560, 0.112, 0.055, 0.033, 0.020],
        [0.316, 0.108, 0.061, 0.043, 0.035],
        [0.201, 0.087, 0.060, 0.035, 0.034],
        [0.147, 0.078, 0.049, 0.037, 0.029],
        [0.118, 0.069, 0.048, 0.037, 0.028],
    ],
    "vicuna-13b-v1.3": [
        [0.594, 0.111, 0.053, 0.034, 0.024],
        [0.340, 0.100, 0.067, 0.039, 0.034],
        [0.216, 0.093, 0.052, 0.042, 0.033],
        [0.150, 0.082, 0.056, 0.035, 0.031],
        [0.122, 0.074, 0.047, 0.036, 0.028],
    ],
    "vicuna-33b-v1.3": [
        [0.605, 0.111, 0.049, 0.033, 0.024],
        [0.356, 0.113, 0.060, 0.040, 0.027],
        [0.225, 0.095, 0.059, 0.042, 0.025],
        [0.160, 0.089, 0.058, 0.041, 0.028],
        [0.137, 0.070, 0.055, 0.036, 0.028],
    ],
}


def published_tree(base_model: str | None, num_nodes: int = 64) -> Tree | None:
    """Return the best tree for a published checkpoint (Medusa paper, section 2.3.3); None for other models.

    The last part of the base model's name, a hub id or a folder, is looked up, ignoring case. `num_nodes` counts the
    root.

    Raises:
        ValueError: `num_nodes` is not 1 to 256.
    """
    name = (base_model or "").rstrip("/").replace("\\", "/").rsplit("/", 1)[-1].lower()
    accuracies = ACCURACIES.get(name)
    return None if accuracies is None else Tree.optimal(accuracies, num_nodes)
