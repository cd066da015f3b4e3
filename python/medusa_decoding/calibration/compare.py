"""The best trees of some sizes by three measures, beside what each of them is expected to give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from medusa_decoding.calibration.expected import Expected, expect
from medusa_decoding.trees.calibration import Calibration
from medusa_decoding.trees.search import joint_tree, walked_tree
from medusa_decoding.trees.tree import Tree

PRODUCTS, PATHS, WALK = "products", "paths", "walk"
"""What trees are searched by."""


@dataclass(frozen=True)
class Judged:
    """A tree, how it was searched, and what it gives.

    Attributes:
        by: PRODUCTS, PATHS or WALK.
        tree: the tree.
        different: nodes that the tree by products has not.
        expected: by the counts that it was searched with. A tree fits those best, so that this is too much, the more
            nodes and the fewer positions there are.
        held_out: by counts of other prompts, which tell what it is worth; or None.
    """

    by: str
    tree: Tree
    different: int
    expected: Expected
    held_out: Expected | None = None


def compare(calibration: Calibration, sizes: Sequence[int], held_out: Calibration | None = None) -> list[list[Judged]]:
    """Search the best trees of each size by products, by paths and, where there are texts, by walking.

    Args:
        calibration: counts to search with.
        sizes: nodes, root included.
        held_out: counts of other prompts.

    Raises:
        ValueError: a size outside of 1 to 256, or more nodes than the heads can fill.
    """
    found = []
    for size in sizes:
        trees = {PRODUCTS: Tree.optimal(calibration.accuracies, size), PATHS: joint_tree(calibration, size)}
        if calibration.texts is not None:
            trees[WALK] = walked_tree(calibration, size)
        plain = {*map(tuple, trees[PRODUCTS].choices)}
        found.append(
            [
                Judged(
                    by,
                    tree,
                    len({*map(tuple, tree.choices)} - plain),
                    expect(calibration, tree),
                    None if held_out is None else expect(held_out, tree),
                )
                for by, tree in trees.items()
            ]
        )
    return found
