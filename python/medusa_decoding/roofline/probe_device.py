"""A quick measurement of this machine's CPU or GPU as a `Device`: one large product, one large stream of memory.

A few seconds and a few hundred MiB. The bandwidth is a copy's (bytes read and written) on a GPU, and that of a
matrix-vector product (bytes of the matrix) on a CPU, where a copy also fetches what it overwrites. It measures peaks
that PyTorch reaches here; it does not know what a step's own kernels reach of them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from medusa_decoding.roofline.devices import ELEMENT_BYTES, Device

ROUNDS = 7


def probe_device(kind: str = "cpu", dtype: str | None = None) -> Device:
    """Measure the machine.

    Args:
        kind: cpu or cuda.
        dtype: of the operands; default: float32 on a CPU, bfloat16 on a GPU.

    Raises:
        ValueError: another kind or dtype, or CUDA where torch sees none.
    """
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"device: expected cpu or cuda, got {kind}")
    dtype = dtype or ("float32" if kind == "cpu" else "bfloat16")
    if dtype not in ELEMENT_BYTES:
        raise ValueError(f"dtype: expected one of {', '.join(ELEMENT_BYTES)}, got {dtype}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("device: expected cpu, because torch sees no CUDA device, got cuda")
    gpu = kind == "cuda"
    element = getattr(torch, dtype)
    side = 8192 if gpu else 1024
    left = torch.ones(side, side, dtype=element, device=kind)
    seconds = _median_seconds(lambda: torch.mm(left, left), gpu)
    flops = 2 * side**3 / seconds
    if gpu:
        source = torch.ones(2**29, dtype=torch.uint8, device=kind)
        target = torch.empty_like(source)
        bandwidth = 2 * source.nbytes / _median_seconds(lambda: target.copy_(source), gpu)
        name = torch.cuda.get_device_name()
    else:
        # Larger than the caches of most processors.
        matrix = torch.ones(2**28 // element.itemsize // 8192, 8192, dtype=element)
        vector = torch.ones(8192, dtype=element)
        bandwidth = matrix.nbytes / _median_seconds(lambda: torch.mv(matrix, vector), gpu)
        threads = torch.get_num_threads()
        name = f"cpu, {threads} thread{'s' if threads > 1 else ''}, {torch.backends.cpu.get_cpu_capability()}"
    return Device(
        name, flops, bandwidth, dtype, source=f"measured: {dtype} product of {side} x {side}, torch {torch.__version__}"
    )


def _median_seconds(work: Callable[[], object], gpu: bool) -> float:
    def once() -> float:
        if gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    once()
    return statistics.median(once() for _ in range(ROUNDS))
