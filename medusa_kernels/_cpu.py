"""Calls the CPU ops of csrc/cpu through their C ABI, on as many threads as PyTorch uses."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from medusa_kernels import _native, quantised
from medusa_kernels._registry import Chooser, Implementation, interpreted

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.float8_e4m3fn: 3}
CODE_TYPES = {"int4": 5, "nf4": 6, "fp4": 7, "dynamic": 8}
DYNAMIC_INT8 = 4
"""The enum Type of csrc/cpu/ops.h; of uint8 weights by what their codes stand for."""
MATRIX = 8
"""Members of the struct Matrix."""
ACTIVATIONS = (torch.float32, torch.bfloat16)

Word = Tensor | int | float | None


class OutsideError(ValueError):
    """An index, a length or a position was outside its tensor; the op has written nothing."""


def call(op: str, *members: Word) -> None:
    """Call a C function with the struct of its arguments, given member by member in the order of csrc/cpu/ops.h.

    A tensor stands for its address, None for a null pointer.
    """
    library = _native.cpu_library()
    assert library is not None, "the chooser serves this only with the library"
    form = "".join("d" if type(member) is float else "q" for member in members)
    words = [m.data_ptr() if isinstance(m, Tensor) else 0 if m is None else m for m in members]
    status = getattr(library, f"medusa_{op}_cpu")(struct.pack(form, *words))
    if status == 2:
        raise MemoryError(f"{op}: expected room for what lies between its stages, got none")
    if status == 3:
        raise OutsideError(f"{op}: expected indices, lengths and positions within their tensors, got one outside")
    if status:
        raise RuntimeError(f"medusa_{op}_cpu refused its arguments with status {status}")


threads = torch.get_num_threads
"""The number of threads that an op may use, its first member."""


def matrix(
    weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, zero: Tensor | None = None,
    codes: str = "int4",
) -> tuple[Word, ...]:  # fmt: skip
    """Return the members of the struct Matrix; the scale is fp32."""
    stride, kind = weight.stride(0) * weight.element_size(), weight_type(weight, codes)
    return weight, scale, zero, bias, weight.shape[0], stride, kind, quantised.group_size(weight, scale)


def weight_type(weight: Tensor, codes: str = "int4") -> int:
    """Return the member of the enum Type of a weight's elements."""
    if weight.dtype == torch.uint8:
        return CODE_TYPES[codes]
    return DYNAMIC_INT8 if codes == "dynamic" else TYPES[weight.dtype]


def native_or(op: str, function: Callable[..., Any], otherwise: Chooser, rest: str = "") -> Chooser:
    """Return a chooser of an op's C++ form on a CPU.

    Args:
        op: the op.
        function: calls the C++ form; returns None for arguments that it does not take.
        otherwise: chooses what serves those, and all in Triton's interpreter and without the library; its reason is
            extended by why that is.
        rest: what serves arguments that the C++ form does not take, for the reason.
    """

    def choose(device: torch.device) -> Implementation:
        other = otherwise(device)
        if interpreted():
            return other
        if _native.cpu_library() is None:
            return replace(other, reason=f"{other.reason}; {_native.why_missing('cpu')}")

        @functools.wraps(function)
        def run(*args: Any, **options: Any) -> Any:
            found = function(*args, **options)
            return other.function(*args, **options) if found is None else found

        reason = f"C++ with {_native.instruction_set()}"
        return Implementation("cpp", run, f"{reason}; {rest}" if rest else reason)

    return choose
