"""Host code shared by the Triton kernels: the description of a device, and of a compiled form of a kernel.

A launch configuration is a function of a `Device`, dtypes and sizes, never of values. Each kernel file lists every form
that its launches may ask for in `specialisations(device)`; `benchmarks.inspection` compiles all of them without a
GPU.
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
    def roomy(self) -> bool:
        """Whether blocks have as much shared memory as on data-centre GPUs."""
        return self.shared_memory >= 160 * 1024

    def blocks(self, shared: int) -> int:
        """Return how many blocks with this many bytes of shared memory a multiprocessor holds at once."""
        return self.multiprocessor_memory // (shared + RESERVED)


TARGETS = {
    "80": Device((8, 0), 108, 163 * 1024, 164 * 1024),  # A100
    "86": Device((8, 6), 84, 99 * 1024, 100 * 1024),  # A6000
    "89": Device((8, 9), 142, 99 * 1024, 100 * 1024),  # L40S
    "90": Device((9, 0), 132, 227 * 1024, 228 * 1024),  # H100 SXM, H200
    "100": Device((10, 0), 148, 227 * 1024, 228 * 1024),  # B200
    "120": Device((12, 0), 170, 99 * 1024, 100 * 1024),  # RTX 5090
}
"""One GPU per compilation target for which kernels are checked; shared memory from the CUDA C++ programming guide,
table of technical specifications."""

TRITON_TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv",
}
"""Names of dtypes in Triton's signatures."""


@dataclass(frozen=True)
class Specialisation:
    """One compiled form of a kernel.

    Attributes:
        name: op, kernel and what distinguishes this form: "tree_attention bf16 D128 M64".
        kernel: the `triton.jit` function.
        signature: Triton type of every argument that is not a constant: "*bf16", "i32", "fp32".
        constants: value of every `tl.constexpr` argument.
        num_warps: warps per program.
        num_stages: depth of software pipelining.
        aligned: integers that a launch always passes as multiples of 16, so that the compiler may load 16 bytes at
            once. Pointers always count as aligned.
        programs: programs per multiprocessor that a launch counts on; 0 if it does not.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int
    aligned: tuple[str, ...] = field(default=())
    programs: int = 0


@dataclass(frozen=True)
class Warps:
    """The launch configuration of a kernel that needs no other."""

    num_warps: int
    num_stages: int


def specialise(
    name: str,
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    config: Any,
    *,
    aligned: tuple[str, ...] = (),
    programs: int = 0,
) -> Specialisation:
    """Describe a compiled form of a kernel.

    The keys of `types` are names of arguments, separated by spaces, its values their Triton type. All other arguments
    that are not constants are "i32". `config` has `num_warps` and `num_stages`.
    """
    type_of = {argument: kind for arguments, kind in types.items() for argument in arguments.split()}
    signature = {argument: type_of.get(argument, "i32") for argument in kernel.arg_names if argument not in constants}
    return Specialisation(name, kernel, signature, constants, config.num_warps, config.num_stages, aligned, programs)


@functools.cache
def describe(device: torch.device) -> Device:
    """Describe a device; the interpreter as an H200 with few multiprocessors, because a program is slow there."""
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
    """Make the tensor's device the current one, on which Triton launches."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else contextlib.nullcontext()
