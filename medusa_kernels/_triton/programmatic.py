"""Programmatic dependent launch: a kernel starts while the kernel before it in the stream is still running.

Such a kernel runs `gdc_wait` before it reads results of earlier kernels and before it stores anything. That returns
when the kernel before it, which waited likewise, is complete and its writes are visible, so the order of writes and
reads in a stream does not change. Before it, weights may be prefetched into the L2, where a write of an earlier kernel
would still reach them.

`gdc_launch_dependents` lets the next kernel start when every program has run it. A kernel whose programs all run at
once (`at_once`) does so first. Others do so after their last load: programs of the next kernel would take the room of
their own that have not started.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
import triton.language as tl

from medusa_kernels._registry import interpreted
from medusa_kernels._triton.launch import Device, describe

PROGRAMMATIC_LAUNCH = True
"""Whether to use it if the device and Triton can."""

START_EARLY = True
"""Whether kernels that run at once let the next one start before they wait themselves."""

LOWEST_CAPABILITY = (9, 0)


def programmatic(device: torch.device) -> bool:
    """Return whether to launch kernels programmatically on a device."""
    if not PROGRAMMATIC_LAUNCH or device.type != "cuda" or interpreted() or not _in_triton():
        return False
    return has_programmatic(describe(device))


def has_programmatic(device: Device) -> bool:
    """Return whether a device has programmatic launches at all."""
    return device.capability >= LOWEST_CAPABILITY


@functools.cache
def _in_triton() -> bool:
    """Return whether this Triton has the two instructions and the launch attribute."""
    try:
        from triton.backends.nvidia.compiler import CUDAOptions
    except ImportError:
        return False
    known = {field.name for field in dataclasses.fields(CUDAOptions)}
    return "launch_pdl" in known and hasattr(tl.extra.cuda, "gdc_wait")


def at_once(device: Device, programs: int, per_multiprocessor: int = 1) -> bool:
    """Return whether a device runs all programs of a launch at once, so that the next kernel may start early."""
    return START_EARLY and programs <= device.multiprocessors * per_multiprocessor


def launch_options(pdl: bool) -> dict[str, bool]:
    """Return the keyword arguments of a launch; none if it is off, because older versions of Triton lack them."""
    return {"launch_pdl": True} if pdl else {}
