"""Top-k of many numbers, updated one tile at a time: parts of kernels that keep k keys per row in registers.

A key packs a number and its index into an int64 (see `streaming.packed`). All keys differ, so one comparison is enough
and equal numbers are ordered by index. This file does not know what the numbers are.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from medusa_kernels._triton.streaming import packed

NO_ORDER = tl.constexpr(-(2**31))
"""Below what `streaming.ordered` makes of any number, NaN included."""
NO_KEY = tl.constexpr(-(2**63))
FREE = tl.constexpr(-(2**63) + 1)
"""The key of an empty place is FREE plus the place: all differ, and are below the key of any number."""
TAKEN = tl.constexpr(2**63 - 1)
"""The key of a place beyond the k-th, which is never replaced."""


@triton.jit
def empty_topk(BLOCK_M: tl.constexpr, K: tl.constexpr, PLACES: tl.constexpr):
    """Return `[BLOCK_M, PLACES]` keys, the first K of each row empty. PLACES is K rounded up to a power of two."""
    o_place = tl.arange(0, PLACES)
    b_keys = tl.where(o_place < K, FREE + o_place.to(tl.int64), TAKEN)
    return tl.zeros((BLOCK_M, PLACES), tl.int64) + b_keys[None, :]


@triton.jit
def merge_topk(b_topk, b_keys):
    """Return the top k of b_topk [M, PLACES] and b_keys [M, n]: the greatest key replaces the least while greater."""
    b_high, b_low = tl.max(b_keys, 1), tl.min(b_topk, 1)
    while tl.sum((b_high > b_low).to(tl.int32), 0) > 0:
        m_out = (b_topk == b_low[:, None]) & (b_high > b_low)[:, None]
        b_topk = tl.where(m_out, b_high[:, None], b_topk)
        b_keys = tl.where(b_keys == b_high[:, None], NO_KEY, b_keys)
        b_high, b_low = tl.max(b_keys, 1), tl.min(b_topk, 1)
    return b_topk


@triton.jit
def merge_topk_of_tile(b_topk, b_order, first):
    """Return the top k of b_topk [M, PLACES] and a tile of `ordered` numbers [M, n]; its column 0 has index `first`."""
    o_v = tl.arange(0, b_order.shape[1])
    b_top, b_column = tl.max(b_order, 1, return_indices=True)
    b_high = tl.where(b_top == NO_ORDER, NO_KEY, packed(b_top, first + b_column))
    b_low = tl.min(b_topk, 1)
    while tl.sum((b_high > b_low).to(tl.int32), 0) > 0:
        m_out = (b_topk == b_low[:, None]) & (b_high > b_low)[:, None]
        b_topk = tl.where(m_out, b_high[:, None], b_topk)
        b_order = tl.where(o_v[None, :] == b_column[:, None], NO_ORDER, b_order)
        b_top, b_column = tl.max(b_order, 1, return_indices=True)
        b_high = tl.where(b_top == NO_ORDER, NO_KEY, packed(b_top, first + b_column))
        b_low = tl.min(b_topk, 1)
    return b_topk
