"""Watch: how the host follows a generation without making the device wait.

On a GPU, what the host wants to know is copied to pinned memory behind each step, and read one step late: while the
host looks at step n, step n + 1 is already running. A row that has ended commits nothing any more, so a step too many
changes nothing. On a CPU there is nothing to wait for, and nothing is late.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from medusa_decoding.decode.state import DecodeState


@dataclass(frozen=True)
class Progress:
    """What a generation had reached behind some step.

    Attributes:
        counts: tokens emitted so far, a number a row.
        done: whether every row had ended.
        output: int64 [B, ..] tokens on the host, `counts[b]` of row b; None unless asked for.
    """

    counts: list[int]
    done: bool
    output: torch.Tensor | None


class Watch:
    """Reads a generation's progress, one step late on a GPU.

    Args:
        state: any state of the generation (for shapes and device).
        tokens: whether the tokens themselves are wanted (a streamer).
    """

    def __init__(self, state: DecodeState, tokens: bool) -> None:
        self.tokens = tokens
        self.late = 1 if state.root.is_cuda else 0
        self.pending = 0
        self._slots = [self._pinned(state) for _ in range(self.late + 1)] if self.late else []
        self._records: deque[tuple[tuple[torch.Tensor, ...], torch.cuda.Event | None]] = deque()
        self._recorded = 0

    def _tensors(self, state: DecodeState) -> tuple[torch.Tensor, ...]:
        seen = (state.count, state.finished)
        return (*seen, state.output) if self.tokens else seen

    def _pinned(self, state: DecodeState) -> tuple[torch.Tensor, ...]:
        return tuple(torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in self._tensors(state))

    def record(self, state: DecodeState) -> None:
        """Have the state of now copied, behind the work already launched."""
        tensors, event = self._tensors(state), None
        if self.late:
            slot = self._slots[self._recorded % len(self._slots)]
            for host, device in zip(slot, tensors, strict=True):
                host.copy_(device, non_blocking=True)
            tensors, event = slot, torch.cuda.Event()
            event.record(torch.cuda.current_stream(state.root.device))
        self._records.append((tensors, event))
        self._recorded += 1
        self.pending += 1

    def read(self) -> Progress:
        """Wait for the oldest record and return it."""
        tensors, event = self._records.popleft()
        if event is not None:
            event.synchronize()
        self.pending -= 1
        count, finished, *output = tensors
        return Progress(count.tolist(), bool(finished.all()), output[0] if output else None)
