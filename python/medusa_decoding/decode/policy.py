"""Policy: which tree each step verifies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from medusa_decoding.tree import Tree


class Policy(Protocol):
    """Chooses the tree of each step.

    Attributes:
        trees: every tree it may choose.
        timed: whether it wants the steps' durations.
    """

    @property
    def trees(self) -> tuple[Tree, ...]: ...  # noqa: D102

    @property
    def timed(self) -> bool: ...  # noqa: D102

    def choose(self) -> Tree:
        """Return the tree of the next step."""

    def observe(self, tree: Tree, seconds: float | None, committed: Sequence[int]) -> None:
        """Learn of a step that has been read back: its duration, tokens committed by each row that had not ended."""


class Fixed:
    """One tree, always."""

    timed = False

    def __init__(self, tree: Tree) -> None:
        self.trees = (tree,)

    def choose(self) -> Tree:
        """Return the tree."""
        return self.trees[0]

    def observe(self, tree: Tree, seconds: float | None, committed: Sequence[int]) -> None:
        """Nothing is learnt."""
