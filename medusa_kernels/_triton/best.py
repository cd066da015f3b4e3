"""The best k of many numbers, found a tile at a time: pieces of kernels that keep a few in registers.

Numbers and their indices are int64 keys (see `streaming.packed`), all different, so that the greatest is one of them.
This file does not know what the numbers are.
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
"""Keys of an empty place among the best are FREE plus the place: all different, and below the key of any number."""
TAKEN = tl.constexpr(2**63 - 1)
"""Key of a place beyond the k-th, which is never given up."""


@triton.jit
def no_keys(BLOCK_M: tl.constexpr, K: tl.constexpr, PLACES: tl.constexpr):
    """Return `[BLOCK_M, PLACES]` keys, of which K places are empty."""
    o_place = tl.arange(0, PLACES)
    b_keys = tl.where(o_place < K, FREE + o_place.to(tl.int64), TAKEN)
    return tl.zeros((BLOCK_M, PLACES), tl.int64) + b_keys[None, :]


@triton.jit
def keep_best(b_best, b_keys):
    """Let the greatest of `b_keys` [M, n] replace the least of `b_best` [M, PLACES], until none is greater."""
    b_high, b_low = tl.max(b_keys, 1), tl.min(b_best, 1)
    while tl.max((b_high > b_low).to(tl.int32), 0) > 0:
        m_out = (b_best == b_low[:, None]) & (b_high > b_low)[:, None]
        b_best = tl.where(m_out, b_high[:, None], b_best)
        b_keys = tl.where(b_keys == b_high[:, None], NO_KEY, b_keys)
        b_high, b_low = tl.max(b_keys, 1), tl.min(b_best, 1)
    return b_best


@triton.jit
def keep_best_of_tile(b_best, b_order, first):
    """Do the same with the numbers of a tile [M, n], as int32 in their order; `first` is the index of column 0."""
    o_v = tl.arange(0, b_order.shape[1])
    b_top, b_column = tl.max(b_order, 1, return_indices=True)
    b_high = tl.where(b_top == NO_ORDER, NO_KEY, packed(b_top, first + b_column))
    b_low = tl.min(b_best, 1)
    while tl.max((b_high > b_low).to(tl.int32), 0) > 0:
        m_out = (b_best == b_low[:, None]) & (b_high > b_low)[:, None]
        b_best = tl.where(m_out, b_high[:, None], b_best)
        b_order = tl.where(o_v[None, :] == b_column[:, None], NO_ORDER, b_order)
        b_top, b_column = tl.max(b_order, 1, return_indices=True)
        b_high = tl.where(b_top == NO_ORDER, NO_KEY, packed(b_top, first + b_column))
        b_low = tl.min(b_best, 1)
    return b_best
