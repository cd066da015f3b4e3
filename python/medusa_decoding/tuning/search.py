"""Search for the tree with the most tokens per step, by counts of whole paths or by replaying texts.

`Tree.optimal` searches by accuracies: a node's value is the product of the accuracies along its path (Medusa paper,
section 2.3.3). `joint_tree` takes the share of positions at which the whole path is right. `walked_tree` compares the
tokens per step along the calibrated texts (see `walk`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from medusa_decoding.trees.tree import Tree
from medusa_decoding.tuning.calibration import Calibration, RankPath, beginnings
from medusa_decoding.tuning.replay import walk

ROUNDS = 8
"""Most searches of `walked_tree`. Each one counts the positions at which steps with the previous tree start."""


def joint_tree(calibration: Calibration, num_nodes: int = 64) -> Tree:
    """Return the tree of `num_nodes` nodes with the most expected tokens by `calibration`'s counts of whole paths.

    Best-first search: it repeatedly adds the most frequent path whose parent is in the tree. This is exact, because a
    tree's value is the sum of its nodes' counts and no node counts more than its parent: the most frequent paths are
    prefix-closed (parents first among equals), and no other set of as many paths has a larger sum.

    Equal counts, mostly those of paths that were never seen, are ordered by the product of accuracies. The root is one
    of the nodes, of which there are 1 to 256.

    Raises:
        ValueError: fewer possible paths than asked for.
    """
    return _most_frequent(calibration, num_nodes, calibration.count)


def walked_tree(calibration: Calibration, num_nodes: int = 64) -> Tree:
    """Return a tree of `num_nodes` nodes that gives many tokens per step at the positions where steps really start.

    The search begins with the better one of `Tree.optimal` and `joint_tree`, replayed. The paths that are most frequent
    where its steps start form the next tree, and so on until a tree is no better than the previous one. So the result
    is never worse along `calibration`'s own texts than the two initial trees. It is not exact, because what a tree
    accepts decides where the next step starts. The root is one of the nodes, of which there are 1 to 256.

    Raises:
        ValueError: fewer possible paths than asked for.
    """
    found = [joint_tree(calibration, num_nodes), Tree.optimal(calibration.accuracies, num_nodes)]
    steps = [walk(calibration, tree) for tree in found]
    best, walked = max(zip(found, steps, strict=True), key=lambda pair: pair[1].tokens_per_step)
    for _ in range(ROUNDS):
        tree = _most_frequent(calibration, num_nodes, beginnings(walked.starts).__getitem__, calibration.count)
        along = walk(calibration, tree)
        if along.tokens_per_step <= walked.tokens_per_step:
            break
        best, walked = tree, along
    return best


def _most_frequent(calibration: Calibration, num_nodes: int, *counts: Callable[[RankPath], int]) -> Tree:
    """Return the tree of the paths that the first count, then the next one, says are the most frequent.

    No path may be more frequent than its own beginning.
    """
    accuracies = calibration.accuracies

    def key(path: RankPath) -> tuple[float, ...]:
        product = math.prod(accuracies[head][rank] for head, rank in enumerate(path))
        return (*(-count(path) for count in counts), -product, len(path))

    return Tree.best_first([calibration.ranks] * calibration.num_heads, num_nodes, key)
