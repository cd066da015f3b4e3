"""What the Triton kernels share on the host: facts of a device, and how a specialisation is described.

A launch configuration is a function of the device's compute capability, dtypes and sizes, never of values. Each kernel
file lists, through `specialisations(capability)`, every configuration that its launches may ask for; the inspection
(`medusa_kernels.inspection`) compiles all of them without a GPU.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from medusa_kernels._registry import interpreted

Capability = tuple[int, int]

SHARED_MEMORY = {(8, 0): 163 * 1024, (8, 6): 99 * 1024, (8, 9): 99 * 1024, (9, 0): 227 * 1024}
"""Bytes of shared memory that one block may have, by compute capability (CUDA C++ programming guide, table of
technical specifications)."""

TRITON_TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv",
}
"""Triton's names of dtypes, as signatures have them."""


@dataclass(frozen=True)
class Specialisation:
    """One compiled form of a kernel.

    Attributes:
        name: op, kernel and what tells this form from its siblings: "tree_attention bf16 D128 M64".
        kernel: the `triton.jit` function.
        signature: Triton type of every argument that is not a constant, in order: "*bf16", "i32", "fp32".
        constants: value of every `tl.constexpr` argument.
        num_warps: warps a program.
        num_stages: depth of software pipelining.
        aligned: arguments that a launch always passes as multiples of 16 (addresses, strides), which is what lets the
            compiler load 16 bytes at once. Pointers are always taken as aligned.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int
    aligned: tuple[str, ...] = field(default=())


@functools.cache
def capability(device: torch.device) -> Capability:
    """Return the compute capability that configurations are chosen for; the interpreter stands in as 9.0."""
    return (9, 0) if interpreted() else torch.cuda.get_device_capability(device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors there are to fill; few in the interpreter, where a program is slow."""
    return 4 if interpreted() else torch.cuda.get_device_properties(device).multi_processor_count


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Make the tensor's device the current one, which is where Triton launches."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
