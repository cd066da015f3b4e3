"""Programmatic dependent launch: a kernel starts while the kernel before it in the stream is still running.

Such a kernel runs `gdc_wait` before it reads results of earlier kernels and before it stores anything. That returns
when the kernel before it, which waited likewise, is complete and its writes are visible, so the order of writes and
reads in a stream does not change. `gdc_launch_dependents` lets the next kernel start when every program has run it,
after its last load: programs of the next kernel would take the room of those that have not started. On an H200 kernels
that let it start at once, and prefetched weights while they waited, made whole steps slower (docs/results.md).
"""

from __future__ import annotations

import torch

from medusa_kernels._registry import interpreted
from medusa_kernels._triton.launch import Device, describe

PROGRAMMATIC_LAUNCH = True
"""Whether to use it if the device can."""

LOWEST_CAPABILITY = (9, 0)


def programmatic(device: torch.device) -> bool:
    """Return whether to launch kernels programmatically on a device."""
    if not PROGRAMMATIC_LAUNCH or device.type != "cuda" or interpreted():
        return False
    return has_programmatic(describe(device))


def has_programmatic(device: Device) -> bool:
    """Return whether a device has programmatic launches at all."""
    return device.capability >= LOWEST_CAPABILITY


def launch_options(pdl: bool) -> dict[str, bool]:
    """Return the keyword arguments of a launch; none if it is off: GPUs before 9.0 lack it."""
    return {"launch_pdl": True} if pdl else {}
