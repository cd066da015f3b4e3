"""Argument checks shared by all ops.

Each check raises `ValueError` with the argument's name, what was expected and what was received.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
Shape = Sequence[int | str]


def shape(name: str, tensor: Tensor, expected: Shape) -> None:
    """Check a shape: an int must match, a letter stands for any size."""
    if tensor.shape == expected:
        return
    got = tuple(tensor.shape)
    if len(got) != len(expected) or any(isinstance(e, int) and e != g for e, g in zip(expected, got, strict=True)):
        wanted = ", ".join(str(e) for e in expected)
        raise ValueError(f"{name}: expected shape [{wanted}], got {list(got)}")


def axes(name: str, tensor: Tensor, *names: str) -> None:
    """Check that a tensor has the named axes, of any size."""
    if tensor.dim() != len(names):
        shape(name, tensor, names)


def dtype(name: str, tensor: Tensor, *expected: torch.dtype) -> None:
    """Check a dtype against the allowed ones."""
    if tensor.dtype not in expected:
        wanted = " or ".join(str(e).removeprefix("torch.") for e in expected)
        raise ValueError(f"{name}: expected dtype {wanted}, got {str(tensor.dtype).removeprefix('torch.')}")


def same_device(name: str, tensor: Tensor, like: str, other: Tensor) -> None:
    """Check that two arguments are on one device."""
    if tensor.device != other.device:
        raise ValueError(f"{name}: expected on {other.device} like {like}, got {tensor.device}")


def contiguous(name: str, tensor: Tensor) -> None:
    """Check that a tensor's memory is contiguous."""
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: expected a contiguous tensor, got strides {tuple(tensor.stride())}")


def cache_slots(name: str, kv: Tensor) -> int:
    """Check that a cache `[L, 2, B, Hkv, S, D]` is contiguous, or neighbouring sequences of a contiguous one.

    Return the number of sequences that the contiguous one has.
    """
    if kv.is_contiguous():
        return kv.shape[2]
    layers, two, batch, *inner = kv.shape
    slots = kv.stride(1) // max(math.prod(inner), 1)
    strides = torch.empty(layers, two, slots, *inner, device="meta").stride()
    if slots < batch or kv.stride() != strides:
        raise ValueError(
            f"{name}: expected a contiguous tensor or neighbouring sequences of one, got strides {tuple(kv.stride())}"
        )
    return slots


def match(name: str, tensor: Tensor, expected: Shape, like: str, other: Tensor) -> None:
    """Check an argument's shape, and that it has the dtype and the device of another one."""
    shape(name, tensor, expected)
    if tensor.dtype != other.dtype:
        wanted, got = (str(t.dtype).removeprefix("torch.") for t in (other, tensor))
        raise ValueError(f"{name}: expected dtype {wanted} like {like}, got {got}")
    same_device(name, tensor, like, other)


def typed(name: str, tensor: Tensor, expected: Shape, wanted: torch.dtype, like: str, other: Tensor) -> None:
    """Check an argument's shape and dtype, and that it is on the device of another one."""
    shape(name, tensor, expected)
    dtype(name, tensor, wanted)
    same_device(name, tensor, like, other)


def slots_axis(name: str, cache: Tensor, batch: int, slots: Tensor | None) -> int | str:
    """Return the expected size of a cache's axis of sequences; with `slots`, check these as well."""
    if slots is None:
        return batch
    typed("slots", slots, (batch,), torch.int32, name, cache)
    return "C"


def slots_fit(slots: Tensor | None, count: int) -> list[int] | None:
    """Check on the host that all slots are among the `count` sequences of a cache; return them as a list."""
    if slots is None:
        return None
    for row, slot in enumerate(found := slots.tolist()):
        if not 0 <= slot < count:
            raise ValueError(f"slots: expected 0 to {count - 1}, got {slot} in batch row {row}")
    return found


def rows_fit(lengths: Sequence[int], added: int, capacity: int) -> None:
    """Check on the host that `added` rows after each cached prefix are within the cache."""
    for row, length in enumerate(lengths):
        if length < 0 or length + added > capacity:
            raise ValueError(
                f"cache_lens: expected 0 to {capacity - added} so that {added} more rows fit {capacity} cache rows, "
                f"got {length} in batch row {row}"
            )


def require(condition: bool, name: str, expected: object, got: object) -> None:
    """Raise the standard error unless the condition holds."""
    if not condition:
        raise ValueError(f"{name}: expected {expected}, got {got}")
