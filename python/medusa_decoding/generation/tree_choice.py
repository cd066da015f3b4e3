"""TreeChoice: which tree a generation verifies, and why."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from medusa_decoding.checkpoints.tuning_file import Case
from medusa_decoding.trees.tree import Tree

GIVEN = "given by the caller"
NO_HEADS = "the model has no heads"
UNTUNED = "no tree was tuned for this device; `medusa tune` does that"
FOR_SAMPLING = "stored with the heads for sampling; `medusa tune` found trees faster than plain decoding here"
CHANGED = "the stored tuning does not hold here; run `medusa tune` again"


@dataclass(frozen=True)
class TreeChoice:
    """The tree of a generation, and the reason for it.

    Attributes:
        tree: the tree; `Tree([])` for plain decoding, or "auto", which picks one for each step.
        reason: one plain sentence without a full stop.
        copies: whether steps verify tokens copied from the text instead, where that promises more.
        cost: plain steps that the tree's step takes, if it was timed.
        rate: tokens that the tree is expected to make in a plain step's time.
    """

    tree: Tree | Literal["auto"]
    reason: str
    copies: bool = field(default=False, compare=False)
    cost: float = field(default=1.0, compare=False)
    rate: float = field(default=1.0, compare=False)

    @property
    def name(self) -> str:
        """The tree in a few words."""
        if not isinstance(self.tree, Tree):
            return "auto"
        kind = "dynamic, " if self.tree.keep is not None else ""
        copied = f", {self.tree.lookup} of them copied" if self.tree.lookup else ""
        return f"{kind}{self.tree.num_nodes} nodes{copied}" if self.tree.num_nodes > 1 else "plain decoding"

    @property
    def verified(self) -> str:
        """What steps verify, in a few words."""
        return self.name + ", or tokens copied from the text" * self.copies

    def __str__(self) -> str:
        """Return tree and reason, as the commands print them."""
        return f"{self.verified} ({self.reason})"


def tuned_choice(case: Case) -> TreeChoice:
    """Return the choice of a tuning case whose conditions hold."""
    gain = "" if case.gain is None else f": {case.gain[0]:.2f} of plain"
    if isinstance(case.tree, str):
        return TreeChoice(case.tree, f"`medusa tune` could not tell its fastest tree from plain decoding{gain}")
    if case.tree.num_nodes == 1:
        return TreeChoice(case.tree, f"`medusa tune` found no tree faster here{gain}")
    reason = f"tuned on this device for batch {case.batch} and prefix {case.prefix}"
    return TreeChoice(case.tree, reason, False, *(() if case.chosen is None else case.compared(case.chosen)))
