"""GPUs by name: the peak of their dense products in bfloat16, their memory and its bandwidth, as published."""

from __future__ import annotations

import re
from dataclasses import dataclass

_PARTIAL = {"MIG", "LAPTOP", "TI", "SUPER", "D", "MOBILE"}
"""Words in the names of GPUs that are not the whole one, or another one."""


@dataclass(frozen=True)
class Gpu:
    """A GPU's name, operations per second, bytes of memory, bytes per second, and the source of these figures.

    A multiply-add is two operations; sums are in float32, and no operand is sparse.
    """

    name: str
    rate: float
    memory: int
    bandwidth: float
    source: str


def _gpu(name: str, teraflops: float, gigabytes: int, gigabytes_per_second: float, source: str) -> Gpu:
    return Gpu(name, teraflops * 1e12, gigabytes * 2**30, gigabytes_per_second * 1e9, source)


GPUS = (
    _gpu("3090", 71, 24, 936, "NVIDIA's GA102 whitepaper, appendix A"),
    _gpu("4090", 165.2, 24, 1008, "NVIDIA's Ada whitepaper, appendix A"),
    _gpu("5090", 209.5, 32, 1792, "NVIDIA's RTX Blackwell whitepaper, appendix A"),
    _gpu("A10", 125, 24, 600, "data sheet"),
    _gpu("A30", 165, 24, 933, "data sheet"),
    _gpu("A40", 149.7, 48, 696, "data sheet"),
    _gpu("A6000", 154.8, 48, 768, "NVIDIA's GA102 whitepaper, appendix B"),
    _gpu("A100-40GB", 312, 40, 1555, "data sheet"),
    _gpu("A100-80GB", 312, 80, 1935, "data sheet, PCIe; with SXM 2,039 GB/s"),
    _gpu("H100", 989.4, 80, 3350, "data sheet, SXM"),
    _gpu("H100-PCIe", 756, 80, 2000, "data sheet"),
    _gpu("H100-NVL", 835, 94, 3900, "data sheet"),
    _gpu("H200", 989.4, 141, 4800, "data sheet, SXM"),
    _gpu("H200-NVL", 835, 141, 4800, "data sheet"),
    _gpu("L4", 121, 24, 300, "data sheet"),
    _gpu("L40S", 362, 48, 864, "data sheet"),
)
"""Data sheets of some of them name the rates with sparsity, which are twice these."""


def find(name: str) -> Gpu | None:
    """Return the GPU of a name such as torch's "NVIDIA A100-SXM4-80GB", or None if it is not among `GPUS`."""
    words = set(re.split(r"[\s-]+", name.upper()))
    found = [gpu for gpu in GPUS if words.issuperset(gpu.name.upper().split("-"))]
    return None if words & _PARTIAL else max(found, key=lambda gpu: gpu.name.count("-"), default=None)


def parse(text: str) -> tuple[int, Gpu]:
    """Return the number and the kind of GPUs of a machine such as "8 x A100-80GB"."""
    count, name = re.fullmatch(r"\s*(?:([1-9]\d*)\s*x\s+)?(.*?)\s*", text, re.DOTALL).groups()  # type: ignore[union-attr]
    gpu = find(name)
    if gpu is None:
        known = ", ".join(gpu.name for gpu in GPUS)
        raise ValueError(f"--on: expected one of {known}, or several, as in '8 x A100-80GB', got {text!r}")
    return int(count or 1), gpu
