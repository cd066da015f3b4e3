"""Progress: how the host follows a generation without making the device wait.

On a GPU, what the host needs is copied to pinned memory after each step, in one piece, and read one step late: while
the host reads step n, step n + 1 is already running. A row that has ended commits nothing, so an extra step changes
nothing. On a CPU nothing is late, and nothing is copied. Single generations and the server read by the same `Watch`,
and follow each row by the same `RowReader`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from medusa_decoding.decode.lookup import Copied, Repeats
from medusa_decoding.decode.state import DecodeState

STEPS_LATE = {"cuda": 1}
"""How many steps late results are read, by the type of the device; 0 where it is not named."""

_EXPONENT = 0x7F800000
"""The bits of a float that are all set if it is infinite or NaN."""


@dataclass(frozen=True)
class Progress:
    """What a generation has reached after some step.

    Attributes:
        counts: tokens emitted so far, per row.
        finished: whether each row has ended.
        broken: per row, whether the model's output is not finite.
        report: int32 [B, ..] on the host, what the step has reported (see `DecodeState`). Valid until the next read.
        seconds: since the previous record, or since `Watch.start`; None unless requested.
        work: the part of them in which the device worked on it: on a CPU the processor time of this thread, without the
            time that other programs and threads had its core.
    """

    counts: list[int]
    finished: list[bool]
    broken: list[bool]
    report: torch.Tensor
    seconds: float | None
    work: float | None


@dataclass(eq=False, kw_only=True)
class RowReader:
    """One row as the host knows it.

    `tree_accept` ends rows at the EOS tokens that all rows of a step share, and at their budgets. A server's row may
    have further end tokens, which are looked for here. Everything else that ends a row is the caller's: stopping
    criteria (`streaming`), and in a server time limits and stop strings.

    Attributes:
        ends: tokens that end the row wherever they are among a step's tokens; may leave out those of the step's limits.
        count: new tokens so far.
        new: those that the step read last has added, its end token included.
        accepted: how many draft tokens each step has accepted (the prefill is not a step).
        ended: whether the row has ended.
        repeats: its text, where the host looks up what may be copied; it has the prompt before the first read.
        copied: what a copy would have drafted in the step read last.
    """

    ends: frozenset[int] = frozenset()
    count: int = 0
    new: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    ended: bool = False
    repeats: Repeats | None = None
    copied: Copied | None = None

    def read(self, progress: Progress, place: int) -> list[int]:
        """Read what a step, or the prefill, has added to the row, which was number `place` of it; return the tokens."""
        self.new = []
        if not self.ended:
            found = progress.report[place, 3 : 3 + progress.counts[place] - self.count].tolist()
            self.new = found[: next((n for n, token in enumerate(found, 1) if token in self.ends), None)]
            if self.count:
                self.accepted.append(len(self.new) - 1)
            self.count += len(self.new)
            if self.repeats is not None:
                self.copied = self.repeats.extend(self.new)
            self.ended = progress.finished[place] or self.stopped
        return self.new

    @property
    def stopped(self) -> bool:
        """Whether the last token is one of `ends`."""
        return bool(self.new) and self.new[-1] in self.ends

    def cut(self, count: int) -> None:
        """End the row after its first `count` new tokens, within the step read last."""
        dropped = self.count - count
        self.new = self.new[: len(self.new) - dropped]
        if self.accepted:
            self.accepted[-1] -= dropped
        self.count, self.ended = count, True


def matched(rows: Sequence[RowReader]) -> list[int]:
    """Return how many tokens of each running row's end stand earlier in its text, of rows whose text is followed."""
    return [row.repeats.matched for row in rows if row.repeats is not None and not row.ended]


def hold_copies(state: DecodeState, rows: Sequence[RowReader], length: int) -> None:
    """Store the tokens that a step's rows copy from their texts, if the host follows these."""
    found = [row.repeats.copy(length) for row in rows if length and row.repeats is not None]
    if found:
        state.copies = torch.tensor(found)


Stamp = torch.cuda.Event | tuple[float, float]


class Watch:
    """Reads a generation's progress, one step late on a GPU.

    Args:
        state: any state of the generation (for device and most rows).
        timed: whether durations are needed.

    Attributes:
        late: how many steps late results are read if nothing else asks for them.
        pending: records that have not been read.
    """

    def __init__(self, state: DecodeState, timed: bool = False) -> None:
        self.timed = timed
        self.late = STEPS_LATE.get(state.root.device.type, 0)
        self.pending = 0
        self._slots = [
            torch.empty_like(state.report, device="cpu", pin_memory=state.root.is_cuda) for _ in range(2 * self.late)
        ]
        self._records: deque[tuple[torch.Tensor, Stamp, Stamp]] = deque()
        self._recorded = 0
        self.start(state)

    def start(self, state: DecodeState) -> None:
        """Let the next record's seconds begin now, instead of at the record before."""
        self._before = self._stamp(state)

    def _stamp(self, state: DecodeState) -> Stamp:
        if not state.root.is_cuda:
            return time.perf_counter(), time.thread_time()
        event = torch.cuda.Event(enable_timing=self.timed)
        event.record(torch.cuda.current_stream(state.root.device))
        return event

    def record(self, state: DecodeState) -> None:
        """Have the last step's report copied after the work already launched."""
        report = state.report
        if self.late:
            slot = self._slots[self._recorded % len(self._slots)][: len(report)]
            report = slot.copy_(report, non_blocking=True)
        stamp = self._stamp(state)
        self._records.append((report, self._before, stamp))
        self._before = stamp
        self._recorded += 1
        self.pending += 1

    def read(self) -> Progress:
        """Wait for the oldest record and return it."""
        report, before, stamp = self._records.popleft()
        if isinstance(stamp, torch.cuda.Event):
            stamp.synchronize()
        self.pending -= 1
        numbers = report[:, :3].tolist()
        counts, finished = [count for count, _, _ in numbers], [bool(ended) for _, ended, _ in numbers]
        broken = [bits & _EXPONENT == _EXPONENT for _, _, bits in numbers]
        seconds, work = _between(before, stamp) if self.timed else (None, None)
        return Progress(counts, finished, broken, report, seconds, work)


def _between(before: Stamp, stamp: Stamp) -> tuple[float, float]:
    if isinstance(stamp, torch.cuda.Event):
        assert isinstance(before, torch.cuda.Event)
        seconds = before.elapsed_time(stamp) / 1000
        return seconds, seconds
    assert not isinstance(before, torch.cuda.Event)
    seconds, work = (now - earlier for now, earlier in zip(stamp, before, strict=True))
    return seconds, work or seconds  # a coarse clock may not have moved
