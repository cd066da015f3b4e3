"""What the Triton kernels share on the host: facts of a device, and how a specialisation is described.

A launch configuration is a function of a `Device`, dtypes and sizes, never of values. Each kernel file lists, through
`specialisations(device)`, every configuration that its launches may ask for; the inspection
(`medusa_kernels.inspection`) compiles all of them without a GPU.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from medusa_kernels._registry import interpreted

OPTIONS = {"enable_fp_fusion": True}
"""Compiler options of every launch, to which a kernel's file may add. Fusing a product and a sum is asked for because
Triton's default changes: it is on up to 3.9 and off from 3.10."""

RESERVED = 1024
"""Bytes of shared memory that each block takes besides its own, from compute capability 8.0 on."""


@dataclass(frozen=True)
class Device:
    """What launch configurations are chosen by.

    Attributes:
        capability: compute capability. What tensor-core instructions there are depends on its first number: 9 has
            asynchronous ones over shared memory (wgmma), which neither 8 nor 10 nor 12 has.
        multiprocessors: how many there are to fill.
        shared_memory: bytes that one block may have at most.
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
    def roomy(self) -> bool:
        """Whether blocks have the shared memory of the data centres' GPUs."""
        return self.shared_memory >= 160 * 1024

    def blocks(self, shared: int) -> int:
        """Return how many blocks of so many bytes of shared memory a multiprocessor holds at once."""
        return self.multiprocessor_memory // (shared + RESERVED)


TARGETS = {
    "80": Device((8, 0), 108, 163 * 1024, 164 * 1024),  # A100
    "86": Device((8, 6), 84, 99 * 1024, 100 * 1024),  # A6000
    "89": Device((8, 9), 142, 99 * 1024, 100 * 1024),  # L40S
    "90": Device((9, 0), 132, 227 * 1024, 228 * 1024),  # H100 SXM, H200
    "100": Device((10, 0), 148, 227 * 1024, 228 * 1024),  # B200
    "120": Device((12, 0), 170, 99 * 1024, 100 * 1024),  # RTX 5090
}
"""A GPU of each compilation target that kernels are checked for, by the target's number; shared memory from the CUDA
C++ programming guide, table of technical specifications."""

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
        programs: programs that a launch counts on to share a multiprocessor; 0 if it counts on nothing.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int
    aligned: tuple[str, ...] = field(default=())
    programs: int = 0


@functools.cache
def describe(device: torch.device) -> Device:
    """Describe a device by its own properties.

    The interpreter stands in as an H200 of few multiprocessors, since a program is slow there.
    """
    if interpreted():
        return replace(TARGETS["90"], multiprocessors=4)
    found: Any = torch.cuda.get_device_properties(device)  # PyTorch's stubs do not know all of it
    return Device(
        (found.major, found.minor),
        found.multi_processor_count,
        found.shared_memory_per_block_optin,
        found.shared_memory_per_multiprocessor,
    )


def on_device(tensor: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """Make the tensor's device the current one, which is where Triton launches."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
