"""Progress: how the host follows a generation without making the device wait.

On a GPU, what the host needs is copied to pinned memory after each step and read one step late: while the host reads
step n, step n + 1 is already running. A row that has ended commits nothing, so an extra step changes nothing. On a CPU
nothing is late.
"""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass

import torch

from medusa_decoding.decode.state import DecodeState


@dataclass(frozen=True)
class Progress:
    """What a generation has reached after some step.

    Attributes:
        counts: tokens emitted so far, per row.
        finished: whether each row has ended.
        broken: per row, whether the model's output is not finite.
        output: int64 [B, ..] tokens on the host, `counts[b]` of row b; None unless requested.
        seconds: since the previous record, or since the watch was made; None unless requested.
        work: the part of them in which the device worked on it: on a CPU the processor time of this thread, without the
            time that other programs and threads had its core.
    """

    counts: list[int]
    finished: list[bool]
    broken: list[bool]
    output: torch.Tensor | None
    seconds: float | None
    work: float | None


Stamp = torch.cuda.Event | tuple[float, float]


class Watch:
    """Reads a generation's progress, one step late on a GPU.

    Args:
        state: any state of the generation (for shapes and device).
        tokens: whether the tokens themselves are needed (by a streamer or stopping criteria).
        timed: whether durations are needed.
    """

    def __init__(self, state: DecodeState, tokens: bool = False, timed: bool = False) -> None:
        self.tokens, self.timed = tokens, timed
        self.late = 1 if state.root.is_cuda else 0
        self.pending = 0
        self._slots = [
            tuple(torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in self._tensors(state))
            for _ in range(2 * self.late)
        ]
        self._records: deque[tuple[tuple[torch.Tensor, ...], Stamp]] = deque()
        self._recorded = 0
        self._before = self._stamp(state)

    def _tensors(self, state: DecodeState) -> tuple[torch.Tensor, ...]:
        seen = (state.count, state.finished, state.check)
        return (*seen, state.output) if self.tokens else seen

    def _stamp(self, state: DecodeState) -> Stamp:
        if not self.late:
            return time.perf_counter(), time.thread_time()
        event = torch.cuda.Event(enable_timing=self.timed)
        event.record(torch.cuda.current_stream(state.root.device))
        return event

    def record(self, state: DecodeState) -> None:
        """Have the current state copied after the work already launched."""
        tensors = self._tensors(state)
        if self.late:
            slot = self._slots[self._recorded % len(self._slots)]
            for host, device in zip(slot, tensors, strict=True):
                host.copy_(device, non_blocking=True)
            tensors = slot
        self._records.append((tensors, self._stamp(state)))
        self._recorded += 1
        self.pending += 1

    def read(self) -> Progress:
        """Wait for the oldest record and return it."""
        tensors, stamp = self._records.popleft()
        if isinstance(stamp, torch.cuda.Event):
            stamp.synchronize()
        self.pending -= 1
        count, finished, check, *output = tensors
        broken = [not math.isfinite(value) for value in check.tolist()]
        seconds, work = self._since(stamp) if self.timed else (None, None)
        return Progress(count.tolist(), finished.tolist(), broken, output[0] if output else None, seconds, work)

    def _since(self, stamp: Stamp) -> tuple[float, float]:
        before, self._before = self._before, stamp
        if isinstance(stamp, torch.cuda.Event):
            assert isinstance(before, torch.cuda.Event)
            seconds = before.elapsed_time(stamp) / 1000
            return seconds, seconds
        assert not isinstance(before, torch.cuda.Event)
        seconds, work = (now - earlier for now, earlier in zip(stamp, before, strict=True))
        return seconds, work or seconds  # a coarse clock may not have moved
