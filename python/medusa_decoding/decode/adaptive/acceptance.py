"""Trees for `tree="auto"`, and how many tokens a step of each is expected to commit.

Both know acceptance only. What a step costs is in `step_times`, the choice itself in `policy`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from medusa_decoding.trees.tree import Tree

SIZES = (2, 4, 8, 16, 32, 64)
"""Nodes of the tree_set's trees: small devices profit from 3 to 16, large ones from 64."""

# Accuracy of each rank alone, from the cumulative figures of the original project's training logs for vicuna-7b-v1.3.
VICUNA_7B = [
    [0.560, 0.112, 0.055, 0.033, 0.020],
    [0.316, 0.108, 0.061, 0.043, 0.035],
    [0.201, 0.087, 0.060, 0.035, 0.034],
    [0.147, 0.078, 0.049, 0.037, 0.029],
    [0.118, 0.069, 0.048, 0.037, 0.028],
]


class TreeSet:
    """Plain decoding and the optimal trees of growing size for given heads (Medusa paper, section 2.3.3).

    Args:
        accuracies: accuracies[k][i] is the probability that head k's i-th best token alone is right; a row a head, and
            no more ranks than the heads may be asked for. No rows: plain decoding only.

    Attributes:
        trees: `Tree([])`, then the optimal trees of those `SIZES` that the heads can fill, in ascending order.
        odds_against: for each tree and each of its depths, (1 - c) / c, where c is the probability that a path accepted
            down to the depth above goes on to this one, if heads are right independently with these accuracies.

    Raises:
        ValueError: an accuracy outside [0, 1], or a head without any.
    """

    def __init__(self, accuracies: Sequence[Sequence[float]]) -> None:
        possible, level = 1, 1
        for row in accuracies:
            level *= len(row)
            possible += level
        optimal = (Tree.optimal(accuracies, size) for size in SIZES if size <= possible)
        self.trees: tuple[Tree, ...] = (Tree([]), *optimal)
        self.odds_against = tuple(_odds_against(tree, accuracies) for tree in self.trees)


def _odds_against(tree: Tree, accuracies: Sequence[Sequence[float]]) -> tuple[float, ...]:
    """Return the odds against going on, a number a depth."""
    reached = [1.0] + [0.0] * tree.depth
    for path in tree.choices:
        reached[len(path)] += math.prod(accuracies[head][rank] for head, rank in enumerate(path))
    odds = []
    for above, here in itertools.pairwise(reached):
        # A calibration table is an estimate: nothing in it is taken for impossible or certain.
        goes_on = min(max(here / above if above else 0.0, 0.001), 0.999)
        odds.append((1.0 - goes_on) / goes_on)
    return tuple(odds)


class AcceptanceModel:
    """How many tokens a step of each tree commits, learnt from the steps of this very generation.

    The model: a path accepted down to depth d - 1 goes on to depth d with probability c, and log odds(c) is the
    tree_set's (which knows the tree's shape) plus a shift that is the same for all trees: one shift for depth 1,
    another for all deeper ones. So a step of any tree teaches about every tree, and plain steps teach nothing.

    The estimator: the posterior mode of each shift under a normal prior, by one Newton step an observed step (a
    recursive logistic regression). With p the predicted probability, n the paths that arrived and s those that went on,

        precision <- prior + (1 - 1 / memory) (precision - prior) + sum n p (1 - p)
        shift     <- shift + sum (s - n p) / precision

    so that observations are forgotten exponentially, over `memory` observed steps, and the text may change its
    character. Where heads are right independently with the tree_set's odds times constant factors, it converges to
    those factors up to the scatter of `memory` steps; elsewhere (correlated heads, typical acceptance) to what
    commits as many tokens on the trees in use.

    A tree of depth 1 says nothing about the deeper heads: while such a tree is used, their shift goes back slowly to
    the tree_set's odds, until a deeper tree is worth a trial.

    The next generation starts at the shifts of the last one with the prior's precision only: a belief, but a weak one.
    A row's last step may have been cut short by the end of its text; it counts as it came.

    Args:
        tree_set: the trees, with the odds that no shift stands for.
        memory: observed steps over which observations are forgotten.
        prior: precision of a shift before anything was observed; 1 is worth four paths at even odds.

    Attributes:
        tokens: expected tokens a step and row for each tree of the tree_set, the root's included. Changed in place.
    """

    def __init__(self, tree_set: TreeSet, memory: float = 16.0, prior: float = 2.0) -> None:
        if memory < 1:
            raise ValueError(f"memory: expected at least 1 step, got {memory}")
        if prior <= 0:
            raise ValueError(f"prior: expected a precision above 0, got {prior}")
        self.tree_set = tree_set
        self.prior = prior
        self._kept = 1.0 - 1.0 / memory
        self._odds_against = tree_set.odds_against
        self._shifts = [0.0, 0.0]
        self._factors = [1.0, 1.0]  # exp(-shift), what the odds against are multiplied with
        self._precisions = [prior, prior]
        self.tokens = [1.0] * len(tree_set.trees)
        self._predict()

    def begin(self) -> None:
        """Start another generation."""
        self._precisions = [self.prior, self.prior]

    def observe(self, index: int, committed: Sequence[int]) -> None:
        """Learn from one step.

        Args:
            index: the tree's place in the tree_set.
            committed: tokens that each running row committed, the root's included.
        """
        odds_against = self._odds_against[index]
        if not odds_against:
            return
        arrived = len(committed)
        gradient = information = 0.0
        for depth, odds in enumerate(odds_against, start=1):
            went_on = 0
            for count in committed:
                if count > depth:
                    went_on += 1
            goes_on = 1.0 / (1.0 + odds * self._factors[depth > 1])
            gradient += went_on - arrived * goes_on
            information += arrived * goes_on * (1.0 - goes_on)
            if depth == 1:
                self._update(0, gradient, information)
                gradient = information = 0.0
            arrived = went_on
            if not arrived:
                break
        if information:
            self._update(1, gradient, information)
        elif len(odds_against) == 1:
            self._forget_deeper()
        self._predict()

    def _forget_deeper(self) -> None:
        """Go back a little towards the tree_set's odds, so that a tree too flat to tell is not kept for ever."""
        self._precisions[1] = self.prior + self._kept * (self._precisions[1] - self.prior)
        self._shifts[1] *= 1.0 - (1.0 - self._kept) / UNSEEN_MEMORY
        self._factors[1] = math.exp(-self._shifts[1])

    def _update(self, which: int, gradient: float, information: float) -> None:
        precision = self.prior + self._kept * (self._precisions[which] - self.prior) + information
        self._precisions[which] = precision
        # Many rows far from the prediction would have Newton's step overshoot.
        change = min(max(gradient / precision, -LONGEST_CHANGE), LONGEST_CHANGE)
        shift = min(max(self._shifts[which] + change, -FURTHEST), FURTHEST)
        self._shifts[which] = shift
        self._factors[which] = math.exp(-shift)

    def _predict(self) -> None:
        first, deeper = self._factors
        tokens = self.tokens
        for index, odds_against in enumerate(self._odds_against):
            expected = reached = 1.0
            factor = first
            for odds in odds_against:
                reached /= 1.0 + odds * factor
                expected += reached
                factor = deeper
            tokens[index] = expected


UNSEEN_MEMORY = 4.0
"""How many times longer than what is observed the deeper shift is remembered while trees of depth 1 are used."""
LONGEST_CHANGE = 2.0
"""Log odds that one step may change a shift by."""
FURTHEST = 8.0
"""Log odds that a shift may reach."""
