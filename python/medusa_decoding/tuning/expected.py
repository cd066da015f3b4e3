"""Compute the expected tokens per step of trees from a calibration, and search the best trees by three measures.

The three estimates come closer and closer to what decoding does: as if heads were right independently (Medusa paper,
section 2.3.3); by how often whole paths are right at a random position; and walked, at the positions where steps really
start. Each has a 95 % interval from drawing whole prompts, because positions of one text are not independent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from medusa_decoding.evaluation import interval
from medusa_decoding.evaluation.interval import Interval
from medusa_decoding.trees.tree import Tree
from medusa_decoding.tuning.calibration import Calibration, RankPath, alone, counted
from medusa_decoding.tuning.replay import accepted, branches_of, check_walkable, walk
from medusa_decoding.tuning.search import joint_tree, walked_tree

PRODUCTS, PATHS, WALK = "products", "paths", "walk"
"""The measures that trees are searched by."""


@dataclass(frozen=True)
class Expected:
    """Expected tokens per step of one tree, root included.

    Attributes:
        independent: as if heads were right independently.
        paths: at a random position.
        walked: of the steps that decoding makes.
    """

    independent: Interval
    paths: Interval
    walked: Interval

    def cells(self) -> list[str]:
        """Return the three as cells of a table."""
        return [interval.as_text(one) for one in (self.independent, self.paths, self.walked)]


def expect(calibration: Calibration, tree: Tree) -> Expected:
    """Return the expected tokens per step of a tree.

    Raises:
        ValueError: a tree that the heads cannot fill, with ranks that were not counted, dynamic, or with a copied
            branch.
    """
    check_walkable(tree)
    tree.check_fits(calibration.num_heads, calibration.ranks)
    branches, hits, tokens = branches_of(tree), [], []
    for texts in calibration.texts:
        paths = counted([texts], calibration.num_heads)
        positions = sum(paths.values())
        by_head = alone(paths, calibration.num_heads, calibration.ranks)
        hits.append([positions, *(count for row in by_head for count in row)])
        tokens.append((sum(count * (1 + accepted(path, branches)) for path, count in paths.items()), positions))
    independent = interval.bootstrap(hits, lambda sums: _products(tree, calibration.ranks, sums))
    random, walked = interval.ratio(tokens), interval.ratio(walk(calibration, tree).by_prompt)
    # A calibration has a position, and so a step.
    assert independent is not None
    assert random is not None
    assert walked is not None
    return Expected(independent, random, walked)


def _products(tree: Tree, ranks: int, sums: np.ndarray) -> np.ndarray:
    """Return 1 + the sum of the paths' products of accuracies; `sums` [1 + K * R, ...] are positions and hits."""
    shares = sums[1:] / sums[0]
    worth: dict[RankPath, np.ndarray] = {(): np.ones_like(shares[0])}
    for path in map(tuple, tree.choices):  # parents first
        worth[path] = worth[path[:-1]] * shares[(len(path) - 1) * ranks + path[-1]]
    return np.asarray(sum(worth.values()))


@dataclass(frozen=True)
class SearchedTree:
    """The best tree of one size by one measure, and what it is expected to give.

    Attributes:
        by: PRODUCTS, PATHS or WALK.
        tree: the tree.
        different: number of nodes that the tree by products does not have.
        expected: by the calibration that it was searched with. A tree fits that one best, so this is too high, mostly
            for large trees and few positions.
        held_out: by a calibration on other prompts, which is unbiased; or None.
    """

    by: str
    tree: Tree
    different: int
    expected: Expected
    held_out: Expected | None = None

    def to_json(self) -> dict[str, Any]:
        """Return all but the measure as JSON values."""
        figures = {"tree": self.tree.choices, "different_nodes": self.different, "expected": asdict(self.expected)}
        return figures if self.held_out is None else figures | {"held_out": asdict(self.held_out)}


def search_trees(
    calibration: Calibration, sizes: Sequence[int], held_out: Calibration | None = None
) -> list[list[SearchedTree]]:
    """Search the best trees of each size by products, by paths and by walking.

    Sizes are numbers of nodes, root included. The trees are also judged by `held_out`, a calibration on other prompts.
    """
    found = []
    for size in sizes:
        trees = {
            PRODUCTS: Tree.optimal(calibration.accuracies, size),
            PATHS: joint_tree(calibration, size),
            WALK: walked_tree(calibration, size),
        }
        plain = {*map(tuple, trees[PRODUCTS].choices)}
        found.append(
            [
                SearchedTree(
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
