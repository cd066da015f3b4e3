"""The trees of `tree="auto"`, and how many tokens per step each of them is expected to give."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from medusa_decoding.trees.tree import Tree, most_nodes

MADE_SIZES = (16, 64)
"""Nodes of the trees where each size needs a step that is compiled, which takes seconds, or captured."""
SIZES = (4, 8, 16, 32, 64)
"""Nodes of the trees: small devices profit from 4 to 16, large ones from 64.

2 is left out: such a tree says nothing about the deeper heads, so choosing it by mistake would last.
"""

CLIFFS = (5, 6, 8, 9)
"""Nodes of further trees for models whose layers run as a library's quantised modules.

These take much longer from some number of rows on: bitsandbytes restores whole weights from 6 rows on for some shapes
and devices, and other kernels for decoding end at 8.
"""


def sizes_for(backend: str, cliffs: bool = False) -> tuple[int, ...]:
    """Return the nodes of the trees that are worth choosing from with a resolved backend, if need be with `CLIFFS`."""
    sizes = SIZES if backend == "eager" else MADE_SIZES
    return tuple(sorted({*sizes, *CLIFFS})) if cliffs else sizes


class TreeSet:
    """Plain decoding and the optimal trees of growing size for given heads (Medusa paper, section 2.3.3).

    Args:
        accuracies: accuracies[k][i] is the probability that the i-th draft token of head k alone is right. One row per
            head, with at most as many ranks as the heads have candidates. No rows: plain decoding only.
        stored: one more tree, static and without a copied branch; it replaces the one with as many nodes.
        sizes: nodes of the trees in ascending order, root included.

    Attributes:
        trees: `Tree([])`, then the optimal trees of those sizes that the heads can fill (or the full tree, if the
            heads cannot fill any) and the stored one, in ascending order of nodes.
        odds_against: for each tree and each of its depths, (1 - p) / p, where p is the probability that a path accepted
            down to the depth above continues at this depth, if the heads are independent and have these accuracies.
    """

    def __init__(
        self, accuracies: Sequence[Sequence[float]], stored: Tree | None = None, sizes: Sequence[int] = SIZES
    ) -> None:
        possible = most_nodes(map(len, accuracies))
        filled = [size for size in sizes if size <= possible] or [possible][: len(accuracies)]
        trees = {size: Tree.optimal(accuracies, size) for size in filled}
        if stored is not None and stored.num_nodes > 1:
            trees[stored.num_nodes] = stored
        self.trees: tuple[Tree, ...] = (Tree([]), *(trees[size] for size in sorted(trees)))
        self.odds_against = tuple(_odds_against(tree, accuracies) for tree in self.trees)


def padded(accuracies: Sequence[Sequence[float]], tree: Tree) -> list[list[float]]:
    """Return accuracies with 0 for every head and rank of a tree that they lack."""
    rows = [*accuracies, *[[]] * (tree.depth - len(accuracies))]
    return [[*row, *[0.0] * (tree.top_k - len(row))] for row in rows]


def _odds_against(tree: Tree, accuracies: Sequence[Sequence[float]]) -> tuple[float, ...]:
    reached = [1.0] + [0.0] * tree.depth
    accuracies = padded(accuracies, tree)
    for path in tree.choices:
        reached[len(path)] += math.prod(accuracies[head][rank] for head, rank in enumerate(path))
    odds = []
    for above, here in itertools.pairwise(reached):
        # Calibrated accuracies are estimates, so nothing is impossible or certain.
        continues = min(max(here / above if above else 0.0, 0.001), 0.999)
        odds.append((1.0 - continues) / continues)
    return tuple(odds)


class AcceptanceModel:
    """Expected tokens per step of each tree, learnt from the steps of running generations.

    The model: a path accepted down to depth d - 1 continues at depth d with probability p, and log odds(p) are those of
    the `TreeSet` plus a shift. There are two shifts, one for depth 1 and one for all deeper levels, and all trees share
    them. So a step with any tree teaches about every tree; a plain step teaches nothing.

    The estimator is a recursive logistic regression (see `_Shift`). Each shift follows the text within some `memory`
    steps, and returns to its long-term mean when nothing is observed and when a new generation begins.

    Args:
        tree_set: the trees.
        memory: number of observed steps after which an observation is mostly forgotten.
        prior: precision of a shift before anything was observed; 1 is worth four paths at even odds.

    Attributes:
        tokens: expected tokens per step and row for each tree, the root's included. Changed in place.
    """

    def __init__(self, tree_set: TreeSet, memory: float = 16.0, prior: float = 2.0) -> None:
        self.tree_set = tree_set
        self._shifts = _Shift(memory, prior), _Shift(memory, prior)
        self.tokens = [1.0] * len(tree_set.trees)
        self._plain_steps = 0  # that the shifts do not know yet
        self._predict()

    def begin(self) -> None:
        """Start another generation."""
        for shift in self._shifts:
            shift.begin()
        self._plain_steps = 0
        self._predict()

    def observe(self, index: int, committed: Sequence[int]) -> bool:
        """Learn from one step; return whether `tokens` may have changed.

        Plain steps are taken `PLAIN_STEPS` at a time, because some models take only a few hundred microseconds for one.

        Args:
            index: position of the step's tree in the tree set.
            committed: tokens that each running row got, the root's included.
        """
        odds_against = self.tree_set.odds_against[index]
        self._plain_steps += not odds_against
        if not odds_against and self._plain_steps < PLAIN_STEPS:
            return False
        for shift in self._shifts:
            shift.relax(self._plain_steps)
        self._plain_steps = 0
        if odds_against:
            self._learn(odds_against, committed)
        self._predict()
        return True

    def _learn(self, odds_against: Sequence[float], committed: Sequence[int]) -> None:
        sums = [[0.0, 0.0], [0.0, 0.0]]
        arrived = len(committed)
        for depth, odds in enumerate(odds_against, start=1):
            continued = sum(count > depth for count in committed)
            p = 1.0 / (1.0 + odds * self._shifts[depth > 1].factor)
            sums[depth > 1][0] += continued - arrived * p
            sums[depth > 1][1] += arrived * p * (1.0 - p)
            arrived = continued
            if not arrived:
                break
        for shift, (gradient, information) in zip(self._shifts, sums, strict=True):
            shift.update(gradient, information)

    def _predict(self) -> None:
        first, deeper = (shift.factor for shift in self._shifts)
        for index, odds_against in enumerate(self.tree_set.odds_against):
            expected = reached = 1.0
            factor = first
            for odds in odds_against:
                reached /= 1.0 + odds * factor
                expected += reached
                factor = deeper
            self.tokens[index] = expected


PLAIN_STEPS = 16
"""Plain steps after which expectations are computed again. Nothing is learnt from them; what was learnt fades."""
RELAX = 256.0
"""Steps without an observation after which a shift has mostly returned to its mean."""
MEAN_MEMORY = 128
"""Observed steps over which a shift's long-term mean is taken."""
LONGEST_CHANGE = 2.0
FURTHEST = 8.0
"""Log odds that one step may change a shift by, and that a shift may reach."""


class _Shift:
    """A shift of log odds: the posterior mode under a normal prior, by one Newton step per observed step."""

    def __init__(self, memory: float, prior: float) -> None:
        self.prior, self.keep = prior, 1.0 - 1.0 / memory
        self.value = self.mean = 0.0
        self.observed = 0
        self.begin()

    def begin(self) -> None:
        self.precision = self.prior
        self._set(self.mean)

    def relax(self, steps: int) -> None:
        """Fade during steps without an observation."""
        self.precision = self.prior + self.keep**steps * (self.precision - self.prior)
        self._set(self.mean + (self.value - self.mean) * (1.0 - 1.0 / RELAX) ** steps)

    def update(self, gradient: float, information: float) -> None:
        if not information:
            self.relax(1)
            return
        self.precision = self.prior + self.keep * (self.precision - self.prior) + information
        # With many rows far from the prediction, the full Newton step would overshoot.
        self._set(self.value + min(max(gradient / self.precision, -LONGEST_CHANGE), LONGEST_CHANGE))
        self.observed = min(self.observed + 1, MEAN_MEMORY)
        self.mean += (self.value - self.mean) / self.observed

    def _set(self, value: float) -> None:
        self.value = min(max(value, -FURTHEST), FURTHEST)
        self.factor = math.exp(-self.value)  # multiplies the odds against
