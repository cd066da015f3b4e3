"""Policy: which tree the next step verifies. No text depends on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from medusa_decoding.decode.lookup import Copied
from medusa_decoding.trees.tree import Tree


class StepResult(NamedTuple):
    """A finished step.

    Attributes:
        tree: what `Policy.choose` returned for it.
        seconds: how long the device worked on the step, on a CPU without the time that other programs had its core;
            None if that was not measured.
        committed: tokens committed by each row that had not ended before the step, the root's included.
        made: whether the step was compiled or captured within these seconds.
        copied: of each of these rows, what a copy would have drafted; empty where the host does not follow texts.
    """

    tree: Tree
    seconds: float | None
    committed: Sequence[int]
    made: bool = False
    copied: Sequence[Copied] = ()


class Policy:
    """Chooses the tree of each step, and receives its time and accepted tokens. By default it learns nothing.

    Attributes:
        trees: every tree it may choose; spare cache rows are sized by the largest.
        timed: whether it needs durations.
    """

    trees: tuple[Tree, ...]
    timed = False

    def begin(self, prefill_seconds: float = 0.0, *, batch: int = 1, rows: int = 0) -> None:
        """Start a generation, after its prefill and before its first step.

        Args:
            prefill_seconds: duration of the prefill, as of a step; 0 if it was not measured.
            batch: rows of the batch.
            rows: rows of the cache (its bucket).
        """

    def grown(self, rows: int) -> None:
        """Continue in a cache of `rows` rows."""

    def resized(self, batch: int) -> None:
        """Continue with another number of sequences, some of which may be new (see `serving.engine`)."""

    def choose(self, made: Callable[[Tree], bool] | None = None, matched: Sequence[int] = ()) -> Tree:
        """Return the tree of the next step.

        Args:
            made: whether a tree's step is compiled or captured already; None where steps need not be.
            matched: of each running row, how many tokens of its text's end stand earlier in it (see `lookup.Repeats`);
                empty where the host does not follow texts.
        """
        raise NotImplementedError

    def observe(self, step: StepResult) -> None:
        """Learn from a finished step. Steps are reported in the order they were chosen, on a GPU one step late."""


class FixedTree(Policy):
    """Always the same tree.

    Args:
        tree: that one.
        cost: plain steps that its step takes, if it is known.
        rate: tokens that it is expected to make in a plain step's time.
    """

    def __init__(self, tree: Tree, cost: float = 1.0, rate: float = 1.0) -> None:
        self.trees, self.cost, self.rate = (tree,), cost, rate

    def choose(self, made: Callable[[Tree], bool] | None = None, matched: Sequence[int] = ()) -> Tree:
        """Return the tree."""
        return self.trees[0]
