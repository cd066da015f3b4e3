"""Streaming a weight matrix once past a few activation rows: what the projections of the heads and of the nodes share.

A launch has a fixed number of programs a multiprocessor, and every program works through an equal share of the rows of
the weight, tile by tile, keeping what it needs of its products in registers. This file does not know what that is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from medusa_kernels._triton import launch

OPTIONS = launch.OPTIONS | {"maxnreg": 255}
"""Compiler options of every launch. Left alone, the assembler spills to let more programs share a multiprocessor than
there is shared memory for."""

LOWEST_ROWS = 16
"""Fewest weight rows worth a program."""


@dataclass(frozen=True)
class Config:
    """How a weight is streamed.

    Attributes:
        block_m: activation rows a tile.
        block_v: weight rows a tile.
        block_k: columns a step.
        num_warps: warps a program.
        num_stages: steps in shared memory at once: all but one of them are on their way.
        programs: programs launched a multiprocessor; beyond what runs at once, they even out its differences in speed.
    """

    block_m: int
    block_v: int
    block_k: int
    num_warps: int
    num_stages: int
    programs: int


@dataclass(frozen=True)
class Shares:
    """Rows dealt out evenly: `programs` programs of `tiles` tiles of `step` rows.

    Tile t of program p starts at row `(t * programs + p) * step`, so that what is read at one time lies close together.
    """

    programs: int
    tiles: int
    step: int


def shares(rows: int, programs: int, block: int, multiple: int = 1) -> Shares:
    """Deal out `rows` to at most `programs` programs in tiles of at most `block` rows; no program is left without.

    The rows of a tile are a multiple of `multiple`, a divisor of the block.
    """
    share = max(-(-rows // max(programs, 1)), min(LOWEST_ROWS, block))
    tiles = -(-share // block)
    step = -(-share // (tiles * multiple)) * multiple
    return Shares(-(-rows // (tiles * step)), tiles, step)


def unit(*elements: int) -> int:
    """Return the largest of 1, 2, 4, 8 and 16 that divides all sizes and strides.

    Kernels get those in this unit, from which the compiler knows how many elements it may load at once.
    """
    return math.gcd(16, *elements)


def wide(elements: int, *dtypes: torch.dtype) -> bool:
    """Return whether sizes and strides in this unit allow 16-byte loads (8-byte ones of 1-byte dtypes)."""
    return all(elements * dtype.itemsize >= min(16, 8 * dtype.itemsize) for dtype in dtypes)


def interpreted_config(rows: int) -> Config:
    """Return what suits Triton's interpreter, where an operation on a tile costs the same whatever its size."""
    return Config(min(128, max(16, triton.next_power_of_2(rows))), 256, 128, 4, 1, 1)


@triton.jit
def decode_e4m3(p_bytes):
    """Return 1/256 of the float8_e4m3fn numbers with these bytes, exactly, in fp16 (NaN is not recognised).

    The exponent moves into the wider field of fp16, whose bias is larger by 8; subnormal numbers come out right too.
    Not every target has an instruction for it.
    """
    b_wide = p_bytes.to(tl.uint16)
    return (((b_wide & 0x80) << 8) | ((b_wide & 0x7F) << 7)).to(tl.float16, bitcast=True)


@triton.jit
def product(
    p_a, m_a, p_w, m_w, size,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, E4M3: tl.constexpr,
):  # fmt: skip
    """Return activations times transposed weights over `size` columns, fp32 `[BLOCK_M, BLOCK_V]`.

    p_a and p_w are the addresses of the rows' first elements, m_a and m_w say which rows exist. EVEN: BLOCK_K divides
    the size. E4M3: the weights are bytes of float8_e4m3fn, and the product is 1/256 of the true one.
    """
    o_k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    comp = acc
    for k in range(0, size, BLOCK_K):
        if EVEN:
            m_at, m_wt = m_a[:, None], m_w[:, None]
        else:
            m_k = (k + o_k) < size
            m_at, m_wt = m_a[:, None] & m_k[None, :], m_w[:, None] & m_k[None, :]
        # [BLOCK_M, BLOCK_K], [BLOCK_V, BLOCK_K]
        b_a = tl.load(p_a[:, None] + (k + o_k)[None, :], mask=m_at, other=0.0)
        b_w = tl.load(p_w[:, None] + (k + o_k)[None, :], mask=m_wt, other=0.0)
        if E4M3:
            b_w = decode_e4m3(b_w)
        b_b = tl.trans(b_w.to(b_a.dtype))
        if b_a.dtype == tl.float32:
            acc, comp = dot_accumulate(b_a, b_b, acc, comp)
        else:
            acc = tl.dot(b_a, b_b, acc)
    return acc


@triton.jit
def dot_accumulate(b_a, b_b, acc, comp):
    """Add the product of two fp32 tiles to a sum by compensated summation (Kahan 1965): return both anew.

    Alone, `tl.dot` with an accumulator is one chain of multiply-adds over all columns, each rounded at the size of the
    whole sum. Here a chain is as long as the tile and starts at zero. Both `acc` and `comp` start at zero too. The
    product is subtracted from, not added to: Triton would make a sum of it one product with an accumulator again.
    """
    b_y = tl.dot(b_a, b_b, input_precision="ieee") - comp
    total = acc + b_y
    return total, (total - acc) - b_y


@triton.jit
def exponential(b_x, EXACT: tl.constexpr):
    """Return e to the power of numbers that are 0 or less; on request exact to fp32 rounding.

    The hardware computes powers of two, of arguments that have then been rounded: an error that grows with the
    argument. Exact: Cody and Waite's reduction by a ln 2 in two parts, then the Taylor series within half of it.
    """
    if EXACT:
        b_n = tl.floor(b_x * 1.4426950408889634 + 0.5)
        b_r = (b_x - b_n * 0.693359375) + b_n * 2.12194440054690583e-4
        b_e = 1.0 / 5040
        b_e = b_e * b_r + 1.0 / 720
        b_e = b_e * b_r + 1.0 / 120
        b_e = b_e * b_r + 1.0 / 24
        b_e = b_e * b_r + 1.0 / 6
        b_e = b_e * b_r + 0.5
        b_e = b_e * b_r + 1.0
        b_e = b_e * b_r + 1.0
        # Below the normal numbers there is only 0, and no exponent to make the power of two of.
        m_tiny = b_x < -87.0
        b_bits = (tl.where(m_tiny, 0.0, b_n).to(tl.int32) + 127) << 23
        b_exp = tl.where(m_tiny, 0.0, b_e * b_bits.to(tl.float32, bitcast=True))
    else:
        b_exp = tl.exp(b_x)
    return b_exp


@triton.jit
def ordered(b_x):
    """Return int32 numbers above -2^31 in the order of the fp32 ones. Zeros of both signs are equal.

    A NaN comes behind or before all numbers, by its sign, but stays a number of the order: its index is a valid one.
    """
    b_bits = tl.where(b_x == 0.0, 0.0, b_x).to(tl.int32, bitcast=True)
    # Two's complement orders positive floats as they are, negative ones backwards. The NaN of all ones would be -2^31.
    return tl.maximum(b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF), -(2**31) + 1)


@triton.jit
def packed(b_order, o_v):
    """Pack `ordered` numbers and their indices into int64 keys: the greatest number at its lowest index is greatest."""
    return (b_order.to(tl.int64) << 32) | (0xFFFFFFFF - o_v.to(tl.int64))


@triton.jit
def index_of(b_key):
    """Return the int64 index in a packed key."""
    return 0xFFFFFFFF - (b_key & 0xFFFFFFFF)


@triton.jit
def number_of(b_key):
    """Return the fp32 number in a packed key."""
    b_order = (b_key >> 32).to(tl.int32)
    return (b_order ^ ((b_order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
