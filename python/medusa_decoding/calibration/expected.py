"""What a tree is expected to give a step, in three ways that get closer to what decoding does.

If heads were right independently (Medusa paper, section 2.3.3); by how often whole paths are right at a position drawn
at random; and walked, at the positions that steps really start from. Each with a 95 % interval, by drawing whole
prompts anew: positions of one text resemble each other, so that they are no independent trials.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from medusa_decoding.evaluation import interval
from medusa_decoding.evaluation.interval import Interval
from medusa_decoding.trees.calibration import Calibration, RankPath, alone, counted
from medusa_decoding.trees.replay import accepted, branches_of, check_walkable, walk
from medusa_decoding.trees.tree import Tree


@dataclass(frozen=True)
class Expected:
    """Tokens a step of one tree, root included.

    Attributes:
        independent: if heads were right independently.
        paths: at a position drawn at random.
        walked: of the steps that decoding makes; None for a calibration without texts. Without texts there are no
            intervals either.
    """

    independent: Interval
    paths: Interval
    walked: Interval | None

    def to_json(self) -> dict[str, Any]:
        """Return the three by name."""
        figures = {"independent": self.independent, "paths": self.paths, "walked": self.walked}
        return {name: None if one is None else one.to_json() for name, one in figures.items()}


def expect(calibration: Calibration, tree: Tree) -> Expected:
    """Return what a calibration says of a tree.

    Raises:
        ValueError: a tree that the heads cannot fill, with ranks that were not looked at, dynamic, or with a copied
            branch.
    """
    check_walkable(tree)
    independent = Interval(tree.expected_tokens(calibration.accuracies), None, None)
    paths = Interval(calibration.expected_tokens(tree), None, None)
    if calibration.texts is None:
        return Expected(independent, paths, None)
    found = interval.bootstrap(_alone(calibration), lambda sums: _products(tree, calibration, sums))
    along = interval.ratio(_along(calibration, tree))
    walked = interval.ratio(walk(calibration, tree).by_prompt)
    # A calibration has a position, and so a step.
    assert found is not None
    assert along is not None
    assert walked is not None
    return Expected(found, along, walked)


def _alone(calibration: Calibration) -> list[list[int]]:
    """Return a row a prompt: positions, then how often each rank of each head is right."""
    rows = []
    assert calibration.texts is not None
    for texts in calibration.texts:
        paths = counted([texts], calibration.num_heads)
        by_rank = alone(paths, calibration.num_heads, calibration.ranks)
        rows.append([sum(paths.values()), *(count for row in by_rank for count in row)])
    return rows


def _products(tree: Tree, calibration: Calibration, sums: np.ndarray) -> np.ndarray:
    """Return 1 + the sum of the products of accuracies along each path, of sums [1 + K * R, ...]."""
    shares = sums[1:] / sums[0]
    worth: dict[RankPath, np.ndarray] = {(): np.ones_like(shares[0])}
    for path in map(tuple, tree.choices):  # parents first
        worth[path] = worth[path[:-1]] * shares[(len(path) - 1) * calibration.ranks + path[-1]]
    return np.asarray(sum(worth.values()))


def _along(calibration: Calibration, tree: Tree) -> list[tuple[int, int]]:
    """Return of each prompt the tokens that a step at each of its positions would give, and how many these are."""
    branches, rows = branches_of(tree), []
    assert calibration.texts is not None
    for texts in calibration.texts:
        paths = counted([texts], calibration.num_heads)
        tokens = sum(count * (1 + accepted(path, branches)) for path, count in paths.items())
        rows.append((tokens, sum(paths.values())))
    return rows


def as_figure(found: Interval | None) -> str:
    """Return a figure with its interval for a person."""
    if found is None:
        return "unknown"
    ends = "" if found.low is None else f" ({found.low:.3f} to {found.high:.3f})"
    return f"{found.value:.3f}{ends}"
