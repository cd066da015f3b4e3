"""Rows of the KV cache in 8 bits: D numbers of int8 and their scale in one row of D + 4 bytes.

Of a head's key or value x `[D]` a row holds the numbers `round(x * 127 / max |x|)` (to nearest, ties to even), and in
its last 4 bytes the scale `max |x| / 127` in fp32. As the scale is part of the row, whatever moves rows moves it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medusa_kernels import _checks

SCALE_BYTES = 4
LEAST = 1e-30
"""The largest magnitude is taken as at least this: zeros would have a scale of 0 to divide by."""


def row_width(head_dim: int, dtype: torch.dtype) -> int:
    """Return the numbers of a row: D, and in int8 those of the scale's bytes, too."""
    return head_dim + SCALE_BYTES if dtype == torch.int8 else head_dim


def head_size(cache: Tensor) -> int:
    """Return D, the numbers of a head, of a cache `[.., D]`, or int8 `[.., D + 4]`."""
    return cache.shape[-1] - (SCALE_BYTES if cache.dtype == torch.int8 else 0)


def quantised_rows(rows: Tensor) -> Tensor:
    """Return rows of a cache, int8 `[.., D + 4]`, for keys or values `[.., D]`."""
    rows = rows.float()
    largest = rows.abs().amax(-1, keepdim=True).clamp(min=LEAST)
    # PyTorch takes a number over a tensor for a product with a reciprocal, which is rounded twice; on a GPU so it does
    # a tensor over a number.
    most = torch.full_like(largest, 127)
    codes = (rows * (most / largest)).round().to(torch.int8)
    return torch.cat((codes, (largest / most).view(torch.int8)), -1)


def dequantised_rows(cache: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the keys or values `[.., D]`, rounded once to a dtype, of a cache `[.., D + 4]`, of any other itself."""
    if cache.dtype != torch.int8:
        return cache
    codes, scales = cache[..., :-SCALE_BYTES], cache[..., -SCALE_BYTES:].view(torch.float32)
    return (codes * (scales.double() if dtype == torch.float64 else scales)).to(dtype)


def check(name: str, cache: Tensor, expected: _checks.Shape, like: str, other: Tensor) -> None:
    """Check a cache whose last axis would have D numbers, the last of `expected`: in the dtype of another one or int8.

    Raises:
        ValueError: a wrong shape, dtype, device or layout.
    """
    if cache.dtype != torch.int8:
        _checks.match(name, cache, expected, like, other)
        return
    *outer, head_dim = expected
    assert isinstance(head_dim, int)
    _checks.shape(name, cache, (*outer, row_width(head_dim, torch.int8)))
    _checks.same_device(name, cache, like, other)
    *strides, last = cache.stride()
    aligned = last == 1 and not any(place % SCALE_BYTES for place in (cache.storage_offset(), *strides))
    expected, got = "rows of adjacent bytes that start at multiples of 4", (cache.storage_offset(), cache.stride())
    _checks.require(aligned, name, expected, f"offset and strides {got}")
