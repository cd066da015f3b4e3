"""Tokens per step by the size of the tree: the paper's formula, or measured accuracies of the heads.

The paper prints `acc_rate = 0.477 log(num_candidate)` (appendix G.3). No base of the logarithm makes that 1 for one
candidate, although that is plain decoding and has rate 1 by the paper's own definition (appendix B) and in its figures
4 and 21. 1 + 0.477 ln n does, and differs from figure 21 by at most 0.08, so it is used here (docs/simulation.md).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

from medusa_decoding.trees.tree import MAX_CHOICES, Tree

SLOPE = 0.477


class PaperAcceleration:
    """The paper's model of figure 4(a), with 1 token per step for plain decoding: 1 + 0.477 ln n.

    It was fitted to trees of up to 256 nodes of Medusa-2 Vicuna-7B on two categories of MT-Bench. It says nothing about
    other heads or other texts.

    Attributes:
        name: for figures.
        most_nodes: the largest tree that it covers, root included.
        heads: the number of heads; None: it does not say.
    """

    name = "1 + 0.477 ln(n), Medusa paper"
    most_nodes = MAX_CHOICES + 1
    heads: int | None = None

    def __call__(self, nodes: int) -> float:
        """Return tokens per step with a tree of `nodes` nodes, root included; 1 for one node.

        Raises:
            ValueError: fewer than 1 node.
        """
        if not 1 <= nodes <= self.most_nodes:
            raise ValueError(f"nodes: expected 1 to {self.most_nodes} (root included), got {nodes}")
        return 1 + SLOPE * math.log(nodes)


class TreeAcceleration:
    """The expected tokens per step of the best tree of each size (Medusa paper, section 2.3.3).

    Its attributes are those of `PaperAcceleration`.

    Args:
        accuracies: accuracies[k][i] is the probability that head k's i-th best token alone is right.

    Raises:
        ValueError: an accuracy outside [0, 1], or no heads.
    """

    name = "best tree of measured accuracies"

    def __init__(self, accuracies: Sequence[Sequence[float]]) -> None:
        if not accuracies:
            raise ValueError("accuracies: give at least one head")
        possible, level = 1, 1
        for row in accuracies:
            level *= len(row)
            possible += level
        largest = Tree.optimal(accuracies, min(possible, MAX_CHOICES + 1))
        # The search adds paths in the order of their products, so a smaller tree is a prefix of a larger one.
        products = [math.prod(accuracies[k][rank] for k, rank in enumerate(path)) for path in largest.choices]
        self.heads: int | None = len(accuracies)
        self._expected = list(accumulate(sorted(products, reverse=True), initial=1.0))
        self.most_nodes = len(self._expected)

    def __call__(self, nodes: int) -> float:
        """Return tokens per step with a tree of `nodes` nodes, root included; 1 for one node.

        Raises:
            ValueError: fewer than 1 node, or more than the heads can fill.
        """
        if not 1 <= nodes <= self.most_nodes:
            raise ValueError(f"nodes: expected 1 to {self.most_nodes} with these heads, got {nodes}")
        return self._expected[nodes - 1]


Acceleration = PaperAcceleration | TreeAcceleration
