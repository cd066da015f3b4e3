"""A quick measurement of this machine's CPU or GPU as a `Device`: one large product, one large stream of memory.

It takes a few seconds and a few hundred MiB. On a GPU the bandwidth is that of a copy (bytes read and written), on a
CPU that of a matrix-vector product (bytes of the matrix), because a copy there also reads what it overwrites. These are
peaks that PyTorch reaches on this machine; a step's own kernels may reach less.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch

from benchmarks.simulator.devices import Device


def probe_device(kind: Literal["cpu", "cuda"]) -> Device:
    """Measure the machine, in float32 on a CPU and in bfloat16 on a GPU.

    Raises:
        ValueError: CUDA if torch sees no device.
    """
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: expected cpu, because torch sees no CUDA device, got cuda")
    gpu = kind == "cuda"
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if gpu else "float32"
    element = getattr(torch, dtype)
    side = 8192 if gpu else 1024
    left = torch.ones(side, side, dtype=element, device=kind)
    seconds = _median_seconds(lambda: torch.mm(left, left))
    flops = 2 * side**3 / seconds
    if gpu:
        source = torch.ones(2**29, dtype=torch.uint8, device=kind)
        target = torch.empty_like(source)
        bandwidth = 2 * source.nbytes / _median_seconds(lambda: target.copy_(source))
        name = torch.cuda.get_device_name()
    else:
        # Larger than the caches of most processors.
        matrix = torch.ones(2**28 // element.itemsize // 8192, 8192, dtype=element)
        vector = torch.ones(8192, dtype=element)
        bandwidth = matrix.nbytes / _median_seconds(lambda: torch.mv(matrix, vector))
        threads = torch.get_num_threads()
        name = f"cpu, {threads} thread{'s' if threads > 1 else ''}, {torch.backends.cpu.get_cpu_capability()}"
    return Device(
        name, flops, bandwidth, dtype, source=f"measured: {dtype} product of {side} x {side}, torch {torch.__version__}"
    )


def _median_seconds(work: Callable[[], object]) -> float:
    from torch.utils.benchmark import Timer  # not at the top: it imports setuptools

    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=0.2).median)
