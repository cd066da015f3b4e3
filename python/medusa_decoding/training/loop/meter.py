"""The speed and the memory of a run, for its log."""

from __future__ import annotations

import dataclasses
import functools
import resource
import sys
from typing import Any

import torch

from medusa_decoding.training.config import Config
from medusa_decoding.training.loop.backbone import DTYPES
from medusa_decoding.training.loop.estimate import operations, peak, shapes_of
from medusa_decoding.training.loop.processes import Processes
from medusa_decoding.training.loop.schedules import Progress
from medusa_decoding.training.loop.states import StateCache

_peak = functools.cache(peak)


class Meter:
    """Measures the steps since the last logged one, so that a resumed run logs its own speed; begins `at` a point.

    `learnt` is the share of positions that heads learn from, `states` the cache of a frozen backbone's states.
    """

    def __init__(
        self, config: Config, states: StateCache | None, learnt: float, processes: Processes, at: Progress
    ) -> None:
        # What gradient checkpointing computes again does not count as use.
        model = dataclasses.replace(config.model, gradient_checkpointing=False)
        self._config = dataclasses.replace(config, model=model)
        self._states, self._learnt, self._processes = states, learnt, processes
        self._shapes = shapes_of(self._config)
        self._peak = _peak(processes.device, DTYPES[config.model.dtype]) * processes.size
        self._start(at)

    def _start(self, at: Progress) -> None:
        self._seconds, self._tokens = at.seconds, at.tokens
        self._made = 0 if self._states is None else self._states.made

    def __call__(self, at: Progress, trains_backbone: bool) -> dict[str, Any]:
        """Return the figures of the steps since the last call.

        Returns:
            `tokens_per_second` with padding, over all processes. `peak_memory`: the most bytes so far of tensors on the
            GPU, or of the whole process on a CPU. `mfu`: model FLOPs utilisation, the operations of the model and the
            heads over those that the devices could do in that time.
        """
        seconds, tokens = at.seconds - self._seconds, at.tokens - self._tokens
        passed = tokens
        if self._states is not None:  # cached states need no pass of the backbone
            passed = (self._states.made - self._made) * self._config.data.length * self._processes.size
        backbone, heads = operations(self._config, self._shapes, trains_backbone)
        done = passed * backbone + tokens * self._learnt * heads
        self._start(at)
        return {
            "tokens_per_second": round(tokens / seconds, 1),
            "peak_memory": peak_memory(self._processes.device),
            "mfu": round(done / seconds / self._peak, 4),
        }


def peak_memory(device: torch.device) -> int:
    """Return the most bytes that this process has had: of tensors on a GPU, of all memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # In bytes on macOS, else in KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
