"""Groups of running rows, each of which takes part in the same steps, and their places in the slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from medusa_decoding.decode.limits import Limits
from medusa_decoding.decode.policy import Policy
from medusa_decoding.decode.runtime.progress import Watch
from medusa_decoding.decode.selection.processors import HostRow, LogitsProcessors
from medusa_decoding.decode.selection.rows import common_selector, host_row
from medusa_decoding.decode.verify import TokenSelector
from medusa_decoding.serving.rows import Kind, Row
from medusa_decoding.serving.slots import Slots
from medusa_decoding.trees.tree import Tree


@dataclass(frozen=True)
class Launched:
    """A step of a group whose results have not been read.

    Attributes:
        rows: that took part, in order.
        errors: what each row's own processors have raised.
        tree: of the step.
        policy: that chose the tree.
        made: whether the step was compiled or captured first.
        hidden: [B, H], the states that the step has left of the rows, if they are delivered.
    """

    rows: list[Row]
    errors: list[Exception | None]
    tree: Tree
    policy: Policy
    made: bool
    hidden: torch.Tensor | None = None


class Group:
    """Running rows of one kind, neighbours in the slots.

    Attributes:
        rows: in the order of their slots.
        policy: chooses the tree of each step; None when the rows have changed.
        watch: reads what steps have committed; made at the first step.
        unread: steps that it has not read yet.
    """

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.rows: list[Row] = []
        self.watch: Watch | None = None
        self.unread: deque[Launched] = deque()
        self.changed()

    def changed(self) -> None:
        """Have everything that depends on the rows made again before the next step."""
        self.policy: Policy | None = None
        self._width = 0
        self._selector: TokenSelector | None = None
        self._limits: Limits | None = None

    def prepare(self, width: int, device: torch.device, temperatures: torch.Tensor) -> tuple[TokenSelector, Limits]:
        """Return selector and limits for a step over `width` rows, of which the first are the group's.

        `temperatures` are fp32 [width], of the slots.
        """
        if self._selector is None or self._limits is None or self._width != width:
            self._width = width
            # What ends some rows only is left to the host, which reads every token anyway.
            ends = frozenset.intersection(*(row.ends for row in self.rows))
            budgets = [row.budget for row in self.rows] + [1] * (width - len(self.rows))
            self._limits = Limits(budgets, [0] * width, sorted(ends), device=device)
            self._selector = common_selector([row.selector for row in self.rows], temperatures)
            if self._selector is None:
                self._selector = LogitsProcessors.of_rows([_hosted(row, device) for row in self.rows], temperatures)
        return self._selector, self._limits

    def errors(self) -> list[Exception | None]:
        """Return what each row's own processors have raised in the last step."""
        selector = self._selector
        hosted = isinstance(selector, LogitsProcessors)
        return [row.error for row in selector.rows] if hosted else [None] * len(self.rows)  # type: ignore[union-attr]


def _hosted(row: Row, device: torch.device) -> HostRow:
    """Return what a selector on the host needs of a row."""
    if isinstance(row.selector, LogitsProcessors):
        return row.selector.rows[0]
    text = torch.tensor(row.text, device=device)
    return host_row(row.selector, text, len(row.ticket.prompt), row.budget, row.ends)


class Groups:
    """The running rows in the first slots, group after group."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self._groups: list[Group] = []

    def __iter__(self) -> Iterator[Group]:
        return iter(list(self._groups))

    def __len__(self) -> int:
        return sum(len(group.rows) for group in self._groups)

    def __contains__(self, row: Row) -> bool:
        return any(row in group.rows for group in self._groups)

    def first_slot(self, group: Group) -> int:
        """Return the slot of a group's first row."""
        return sum(len(other.rows) for other in self._groups[: self._groups.index(group)])

    def width(self, group: Group, captured: bool) -> int:
        """Return over how many slots a step runs.

        Captured steps of the last group run over a few sizes only, so that few are captured; the further rows have
        ended.
        """
        first, rows = self.first_slot(group), len(group.rows)
        if not captured or group is not self._groups[-1]:
            return rows
        return min(1 << (rows - 1).bit_length(), len(self.slots) - first)

    def slot(self, row: Row) -> int:
        """Return the slot of a row."""
        group = next(group for group in self._groups if row in group.rows)
        return self.first_slot(group) + group.rows.index(row)

    def join(self, row: Row, slot: int) -> None:
        """Let a row join the rows of its kind: the first row of each later group makes room at the group's end."""
        group = next((group for group in self._groups if group.kind == row.kind), None)
        if group is None:
            group = Group(row.kind)
            self._groups.append(group)
        hole = len(self)
        self.slots.swap(slot, hole)
        for later in reversed(self._groups[self._groups.index(group) + 1 :]):
            first = self.first_slot(later)
            self.slots.swap(first, hole)
            later.rows.append(later.rows.pop(0))
            later.changed()
            hole = first
        group.rows.append(row)
        group.changed()

    def leave(self, row: Row) -> None:
        """Take a row out: the last row of its group, and of each later one, takes the place that became free."""
        group = next(group for group in self._groups if row in group.rows)
        first, place = self.first_slot(group), group.rows.index(row)
        self.slots.state.finished[first + place] = True
        hole = first + len(group.rows) - 1
        self.slots.swap(first + place, hole)
        group.rows[place] = group.rows[-1]
        group.rows.pop()
        group.changed()
        for later in self._groups[self._groups.index(group) + 1 :]:
            last = hole + len(later.rows)
            self.slots.swap(hole, last)
            later.rows.insert(0, later.rows.pop())
            later.changed()
            hole = last
        if not group.rows:
            self._groups.remove(group)
