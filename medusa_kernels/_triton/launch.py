"""Host code shared by the launches of the Triton kernels.

A launch configuration is a function of a `Device`, dtypes and sizes, never of values.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from medusa_kernels._registry import interpreted

OPTIONS = {"enable_fp_fusion": True}
"""Compiler options of every launch, to which a kernel's file may add. Fusion of products and sums is set because
Triton's default changes: on up to 3.9, off from 3.10."""

RESERVED = 1024
"""Bytes of shared memory that the system reserves per block, from compute capability 8.0 on."""


@dataclass(frozen=True)
class Device:
    """The properties of a GPU that launch configurations depend on.

    Attributes:
        capability: compute capability. Its first number decides which tensor-core instructions exist: only 9 has
            asynchronous ones over shared memory (wgmma).
        multiprocessors: how many there are to fill.
        shared_memory: most bytes that one block may have.
        multiprocessor_memory: bytes of shared memory of a multiprocessor.
    """

    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int
    multiprocessor_memory: int

    @property
    def hopper(self) -> bool:
        """Whether its tensor cores are those of compute capability 9.0."""
        return self.capability[0] == 9

    @property
    def programmatic(self) -> bool:
        """Whether it has programmatic launches."""
        return self.capability >= (9, 0)

    @property
    def roomy(self) -> bool:
        """Whether blocks have as much shared memory as on data-centre GPUs."""
        return self.shared_memory >= 160 * 1024

    def blocks(self, shared: int) -> int:
        """Return how many blocks with this many bytes of shared memory a multiprocessor holds at once."""
        return self.multiprocessor_memory // (shared + RESERVED)

    def idle(self, programs: int, per_multiprocessor: int) -> float:
        """Return the share of the multiprocessors' time that the last wave of a launch leaves idle.

        The device runs waves of `per_multiprocessor` programs on each multiprocessor; the last has the rest.
        """
        waves = -(-programs // (self.multiprocessors * per_multiprocessor))
        last = programs - (waves - 1) * self.multiprocessors * per_multiprocessor
        return max(0, self.multiprocessors - last) / self.multiprocessors / waves


@dataclass(frozen=True)
class Warps:
    """The launch configuration of a kernel that needs no other."""

    num_warps: int
    num_stages: int


@functools.cache
def describe(device: torch.device) -> Device:
    """Describe a device; the interpreter as an H200 with few multiprocessors, because a program is slow there."""
    if interpreted():
        return Device((9, 0), 4, 227 * 1024, 228 * 1024)
    found: Any = torch.cuda.get_device_properties(device)  # PyTorch's stubs do not know all of it
    return Device(
        (found.major, found.minor),
        found.multi_processor_count,
        found.shared_memory_per_block_optin,
        found.shared_memory_per_multiprocessor,
    )


PROGRAMMATIC_LAUNCH = True
"""Whether to launch programmatically if the device can, see `programmatic`."""


def programmatic(device: torch.device) -> bool:
    """Return whether to launch kernels programmatically: a kernel starts while the one before it still runs.

    Such a kernel runs `gdc_wait` before it reads results of earlier kernels and before it stores anything. That returns
    when the kernel before it, which waited likewise, is complete and its writes are visible, so the order of writes and
    reads in a stream does not change. `gdc_launch_dependents` lets the next kernel start when every program has run it,
    after its last load: programs of the next kernel would take the room of those that have not started. On an H200
    kernels that let it start at once, and prefetched weights while they waited, made whole steps slower
    (docs/results.md).
    """
    return PROGRAMMATIC_LAUNCH and device.type == "cuda" and not interpreted() and describe(device).programmatic


def options(config: Any, pdl: bool, compiler: Mapping[str, Any] = OPTIONS) -> dict[str, Any]:
    """Return a launch's options: warps and stages of a configuration, the compiler's, and whether it is programmatic.

    If not, the option is left out, as GPUs before 9.0 lack it.
    """
    chosen = {"num_warps": config.num_warps, "num_stages": config.num_stages, **compiler}
    return chosen | ({"launch_pdl": True} if pdl else {})


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Make the tensor's device the current one, on which Triton launches."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
