"""Names of devices, made of what step times depend on."""

from __future__ import annotations

import contextlib
import functools
import platform
from pathlib import Path

import torch


@functools.cache
def cpu_name() -> str:
    """Return the processor's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """Name a device by what step times depend on, and nothing that a new driver changes."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        memory = round(found.total_memory / 2**30)
        return f"{found.name}, {found.multi_processor_count} SMs, {memory} GiB, sm_{found.major}{found.minor}"
    if device.type == "cpu":
        threads = torch.get_num_threads()
        capability = torch.backends.cpu.get_cpu_capability()
        return f"{cpu_name()}, {threads} thread{'s' if threads > 1 else ''}, {capability}"
    return device.type
