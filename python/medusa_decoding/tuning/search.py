"""The tree with the most expected tokens a step, from accuracies of heads or from counts of whole paths.

From accuracies, a node is worth the product of the accuracies along its path (Medusa paper, section 2.3.3): that search
is `Tree.optimal`. Here is the one from counts, where a node is worth the share of positions at which its whole path is
right, and the comparison of the two. This module knows counts and trees; it does not know models.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

from medusa_decoding.tree import MAX_CHOICES, Tree
from medusa_decoding.tuning.accuracy import Calibration


def joint_tree(calibration: Calibration, num_nodes: int = 64) -> Tree:
    """Return the tree of `num_nodes` nodes with the most expected tokens by `calibration`'s counts of whole paths.

    Best-first search: the most frequent path that is not yet in the tree and whose parent is, again and again. It is
    exact. A tree is worth the sum of its nodes' counts and no node counts more than its parent, so the most frequent
    paths, parents first among equals, are a prefix-closed set already, and no set of as many paths has a larger sum.
    The search takes just these: every path not yet in the tree is, or lies behind, one whose parent is in it and that
    counts at least as much.

    Equal counts, those of paths that were never seen above all, are told apart by the product of accuracies.

    Args:
        calibration: counts.
        num_nodes: size of the tree, root included, 1 to 256.

    Raises:
        ValueError: fewer possible paths than asked for.
    """
    if not 1 <= num_nodes <= MAX_CHOICES + 1:
        raise ValueError(f"num_nodes: expected 1 to {MAX_CHOICES + 1} (root included), got {num_nodes}")
    possible = most_nodes(calibration.num_heads, calibration.ranks)
    if num_nodes > possible:
        raise ValueError(f"num_nodes: expected at most {possible} with these heads, got {num_nodes}")
    accuracies = calibration.accuracies
    choices: list[tuple[int, ...]] = []
    frontier: list[tuple[int, float, int, tuple[int, ...]]] = []

    def reach(parent: tuple[int, ...]) -> None:
        if len(parent) == calibration.num_heads:
            return
        for rank in range(calibration.ranks):
            path = (*parent, rank)
            product = math.prod(accuracies[head][place] for head, place in enumerate(path))
            heapq.heappush(frontier, (-calibration.count(path), -product, len(path), path))

    reach(())
    while len(choices) < num_nodes - 1:
        path = heapq.heappop(frontier)[-1]
        choices.append(path)
        reach(path)
    return Tree(choices)


def most_nodes(num_heads: int, ranks: int) -> int:
    """Return how many nodes the largest tree has, at most 256."""
    possible, level = 1, 1
    for _ in range(num_heads):
        level *= ranks
        possible += level
        if possible > MAX_CHOICES:
            return MAX_CHOICES + 1
    return possible


@dataclass(frozen=True)
class Comparison:
    """The best trees of one size, with heads taken as independent and by counts of whole paths.

    Attributes:
        independent, joint: the trees.
        estimate: expected tokens of `independent` if heads were independent.
        independent_tokens, joint_tokens: expected tokens of each tree by counts of whole paths.
        different: nodes of `joint` that `independent` has not.
        held_out: `independent_tokens` and `joint_tokens` by other counts, or None.
    """

    independent: Tree
    joint: Tree
    estimate: float
    independent_tokens: float
    joint_tokens: float
    held_out: tuple[float, float] | None = None

    @property
    def different(self) -> int:
        """See the class."""
        return len({*map(tuple, self.joint.choices)} - {*map(tuple, self.independent.choices)})


def compare(calibration: Calibration, sizes: Sequence[int], held_out: Calibration | None = None) -> list[Comparison]:
    """Search the best trees of each size in both ways.

    Args:
        calibration: counts to search with.
        sizes: nodes, root included.
        held_out: counts of other prompts. A tree searched by counts fits those counts best, so that `joint_tokens` are
            too many, the more nodes and the fewer positions there are; other counts tell what it is worth.

    Raises:
        ValueError: a size outside of 1 to 256, or more nodes than the heads can fill.
    """
    accuracies = calibration.accuracies
    found = []
    for size in sizes:
        joint, independent = joint_tree(calibration, size), Tree.optimal(accuracies, size)
        others = None
        if held_out is not None:
            others = held_out.expected_tokens(independent), held_out.expected_tokens(joint)
        found.append(
            Comparison(
                independent,
                joint,
                independent.expected_tokens(accuracies),
                calibration.expected_tokens(independent),
                calibration.expected_tokens(joint),
                others,
            )
        )
    return found
