"""GPUs by name: the peak of their dense products in bfloat16 and their memory, as published."""

from __future__ import annotations

import re
from typing import NamedTuple

_PARTIAL = {"MIG", "LAPTOP", "TI", "SUPER", "D", "MOBILE"}
"""Words in the names of GPUs that are not the whole one, or another one."""


class Gpu(NamedTuple):
    """A GPU's name, operations per second and bytes of memory.

    A multiply-add is two operations; sums are in float32, and no operand is sparse.
    """

    name: str
    rate: float
    memory: int


GPUS = (
    Gpu("3090", 71e12, 24 * 2**30),  # NVIDIA's GA102 whitepaper, appendix A
    Gpu("4090", 165.2e12, 24 * 2**30),  # NVIDIA's Ada whitepaper, appendix A
    Gpu("5090", 209.5e12, 32 * 2**30),  # NVIDIA's RTX Blackwell whitepaper, appendix A
    Gpu("A10", 125e12, 24 * 2**30),  # data sheet
    Gpu("A30", 165e12, 24 * 2**30),  # data sheet
    Gpu("A40", 149.7e12, 48 * 2**30),  # data sheet
    Gpu("A6000", 154.8e12, 48 * 2**30),  # NVIDIA's GA102 whitepaper, appendix B
    Gpu("A100-40GB", 312e12, 40 * 2**30),  # data sheet
    Gpu("A100-80GB", 312e12, 80 * 2**30),  # data sheet, PCIe
    Gpu("H100", 989.4e12, 80 * 2**30),  # data sheet, SXM
    Gpu("H100-PCIe", 756e12, 80 * 2**30),  # data sheet
    Gpu("H100-NVL", 835e12, 94 * 2**30),  # data sheet
    Gpu("H200", 989.4e12, 141 * 2**30),  # data sheet, SXM
    Gpu("H200-NVL", 835e12, 141 * 2**30),  # data sheet
    Gpu("L4", 121e12, 24 * 2**30),  # data sheet
    Gpu("L40S", 362e12, 48 * 2**30),  # data sheet
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
