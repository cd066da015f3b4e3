"""Stream a weight matrix once past a few activation rows: shared by `heads_topk` and `tree_verify`.

A launch has a fixed number of programs per multiprocessor. Every program works through an equal share of the weight's
rows, tile by tile, and reduces its products in registers. This file does not know to what they are reduced.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from medusa_kernels._registry import interpreted
from medusa_kernels._triton import launch

OPTIONS = launch.OPTIONS | {"maxnreg": 255}
"""Compiler options of every launch. Without the limit, the assembler spills registers to fit more programs on a
multiprocessor than its shared memory holds."""

LOWEST_ROWS = 16
"""Fewest weight rows worth a program."""

NARROW_TILES = True
"""Whether the heads' tiles have fewer rows if each program has few, as with a trimmed vocabulary."""


@dataclass(frozen=True)
class Config:
    """How a weight is streamed.

    Attributes:
        block_m: activation rows per tile.
        block_v: weight rows per tile.
        block_k: columns per step.
        num_warps: warps per program.
        num_stages: steps in shared memory at once; all but one of them are being loaded.
        programs: programs launched per multiprocessor, of which `benchmarks.inspection` checks that they run at once.
    """

    block_m: int
    block_v: int
    block_k: int
    num_warps: int
    num_stages: int
    programs: int

    def blocks(self) -> dict[str, int]:
        """Return the constants of a kernel."""
        return {"BLOCK_M": self.block_m, "BLOCK_V": self.block_v, "BLOCK_K": self.block_k}


@dataclass(frozen=True)
class Shares:
    """Rows divided evenly: `programs` programs of `tiles` tiles of `step` rows.

    Tile t of program p starts at row `(t * programs + p) * step`, so that rows read at one time are close together.
    """

    programs: int
    tiles: int
    step: int


def shares(rows: int, programs: int, block: int, multiple: int = 1) -> Shares:
    """Divide `rows` among at most `programs` programs, in tiles of at most `block` rows; every program gets some.

    The rows of a tile are a multiple of `multiple`, a divisor of the block.
    """
    share = max(-(-rows // max(programs, 1)), min(LOWEST_ROWS, block))
    tiles = -(-share // block)
    step = -(-share // (tiles * multiple)) * multiple
    return Shares(-(-rows // (tiles * step)), tiles, step)


def narrowed(config: Config, share: Shares) -> Config:
    """Return the configuration with tiles of at most half empty rows: few rows in a wide tile take its instructions."""
    if not NARROW_TILES:
        return config
    return replace(config, block_v=min(config.block_v, max(32, triton.next_power_of_2(share.step))))


def unit(*elements: int) -> int:
    """Return the largest of 1, 2, 4, 8 and 16 that divides all sizes and strides.

    Kernels get those in this unit, from which the compiler knows how many elements it may load at once.
    """
    return math.gcd(16, *elements)


def wide(elements: int, *dtypes: torch.dtype) -> bool:
    """Return whether sizes and strides in this unit allow 16-byte loads (8-byte ones of 1-byte dtypes)."""
    return all(elements * dtype.itemsize >= min(16, 8 * dtype.itemsize) for dtype in dtypes)


def interpreted_config(rows: int) -> Config:
    """Return a configuration for Triton's interpreter, in which an operation costs the same for any tile size."""
    return Config(min(128, max(16, triton.next_power_of_2(rows))), 256, 128, 4, 1, 1)


COMPILED = tl.constexpr(not interpreted())

INT8_TO_FP16 = tl.constexpr("""
{
    .reg .b32 bytes, bias;
    mov.b32 bias, 0x64806480;
    xor.b32 bytes, $2, 0x80808080;
    prmt.b32 $0, bytes, 0x64646464, 0x4140;
    prmt.b32 $1, bytes, 0x64646464, 0x4342;
    sub.rn.f16x2 $0, $0, bias;
    sub.rn.f16x2 $1, $1, bias;
}
""")
"""Convert four int8 numbers in $2 to fp16 in $0 and $1. A byte with its sign bit flipped is the number plus 128; below
an upper byte of 0x64 it is that plus 1024 in fp16. 0x6480 is 1152, and the difference is exact."""

INT8_TO_BF16 = tl.constexpr("""
{
    .reg .b32 less, minus;
    mov.b32 minus, 0xbf80bf80;
    prmt.b32 $0, $2, 0x43434343, 0x4140;
    and.b32 less, $0, 0xff80ff80;
    and.b32 $0, $0, 0xff7fff7f;
    fma.rn.bf16x2 $0, less, minus, $0;
    prmt.b32 $1, $2, 0x43434343, 0x4342;
    and.b32 less, $1, 0xff80ff80;
    and.b32 $1, $1, 0xff7fff7f;
    fma.rn.bf16x2 $1, less, minus, $1;
}
""")
"""The same to bf16. The lower seven bits below 0x43 are 128 plus their number, the sign bit below 0x43 is 128 or 256;
the difference is exact."""

_E4M3 = """
{
    .reg .b32 low, high, low_sign, high_sign;
    prmt.b32 low_sign, $2, 0, 0x1404;
    prmt.b32 high_sign, $2, 0, 0x3424;
    and.b32 low, low_sign, 0x7f007f00;
    and.b32 high, high_sign, 0x7f007f00;
    shr.b32 low, low, SHIFT;
    shr.b32 high, high, SHIFT;
    lop3.b32 $0, low_sign, 0x80008000, low, 0xea;
    lop3.b32 $1, high_sign, 0x80008000, high, 0xea;
    MORE
}
"""
E4M3_TO_FP16 = tl.constexpr(_E4M3.replace("SHIFT", "1").replace("MORE", ""))
"""Convert four bytes in $2 as `decode_e4m3` says, to $0 and $1; 0xea is (a & b) | c."""
E4M3_TO_BF16 = tl.constexpr(
    _E4M3.replace("SHIFT", "4").replace(
        "MORE",
        """
        mov.b32 low, 0x77807780;
        mov.b32 high, 0x80008000;
        fma.rn.bf16x2 $0, $0, low, high;
        fma.rn.bf16x2 $1, $1, low, high;
        """,
    )
)
"""The same to bf16, whose bias is larger by 120: times 2^112, plus -0."""


@triton.jit
def decode_int8(b_weights, DTYPE: tl.constexpr = tl.float16):
    """Return int8 numbers in fp16 or bf16, exactly. Compiled, four are converted without conversion instructions."""
    if not COMPILED:
        return b_weights.to(tl.float32).to(DTYPE)
    elif DTYPE.is_bf16():
        return tl.inline_asm_elementwise(
            INT8_TO_BF16, "=&r,=&r,r", [b_weights], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        return tl.inline_asm_elementwise(INT8_TO_FP16, "=r,=r,r", [b_weights], dtype=tl.float16, is_pure=True, pack=4)


@triton.jit
def decode_e4m3(b_bytes, DTYPE: tl.constexpr = tl.float16):
    """Return 1/256 of the float8_e4m3fn numbers with these bytes, exactly, in fp16 or bf16 (NaN is not recognised).

    The exponent moves into the wider field of fp16, whose bias is larger by 8; subnormal numbers are right too. It is
    for targets without an instruction for this conversion.
    """
    if COMPILED and DTYPE.is_bf16():
        return tl.inline_asm_elementwise(E4M3_TO_BF16, "=&r,=&r,r", [b_bytes], dtype=tl.bfloat16, is_pure=True, pack=4)
    elif COMPILED:
        return tl.inline_asm_elementwise(E4M3_TO_FP16, "=r,=r,r", [b_bytes], dtype=tl.float16, is_pure=True, pack=4)
    else:
        b_wide = b_bytes.to(tl.uint16)
        b_half = (((b_wide & 0x80) << 8) | ((b_wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
        return b_half.to(tl.float32).to(DTYPE)


@triton.jit
def product(
    p_a, m_a, p_w, m_w, size,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, DECODE: tl.constexpr,
):  # fmt: skip
    """Return A W^T over `size` columns, accumulated in fp32 and not rounded: `[BLOCK_M, BLOCK_V]`.

    p_a [BLOCK_M] and p_w [BLOCK_V] point at the first elements of rows, m_a and m_w mask them. EVEN: BLOCK_K divides
    the size. DECODE: how weights are converted to the dtype of A, "" by Triton, "int8" by `decode_int8`;
    "e4m3" by `decode_e4m3`: the weights are bytes of float8_e4m3fn, and the product is 1/256 of the true one.
    """
    o_k = tl.arange(0, BLOCK_K)
    b_acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    b_comp = b_acc
    for k in range(0, size, BLOCK_K):
        if EVEN:
            m_at, m_wt = m_a[:, None], m_w[:, None]
        else:
            m_k = (k + o_k) < size
            m_at, m_wt = m_a[:, None] & m_k[None, :], m_w[:, None] & m_k[None, :]
        # [BLOCK_M, BLOCK_K]
        b_a = tl.load(p_a[:, None] + (k + o_k)[None, :], mask=m_at, other=0.0)
        # [BLOCK_V, BLOCK_K]
        b_w = tl.load(p_w[:, None] + (k + o_k)[None, :], mask=m_wt, other=0.0)
        if DECODE == "e4m3":
            b_w = decode_e4m3(b_w)
        elif DECODE == "int8":
            b_w = decode_int8(b_w, b_a.dtype)
        b_b = tl.trans(b_w.to(b_a.dtype))
        if b_a.dtype == tl.float32:
            b_acc, b_comp = dot_accumulate(b_a, b_b, b_acc, b_comp)
        else:
            b_acc = tl.dot(b_a, b_b, b_acc)
    return b_acc


@triton.jit
def dot_accumulate(b_a, b_b, b_acc, b_comp):
    """Return b_acc + A B of fp32 tiles by compensated summation (Kahan 1965), and the new compensation b_comp.

    `tl.dot` with an accumulator is one chain of multiply-adds over all columns, each rounded at the size of the whole
    sum. Here a chain is as long as the tile and starts at zero, as b_acc and b_comp do. b_comp is subtracted from the
    product: Triton would fuse an addition into one product with an accumulator again.
    """
    b_y = tl.dot(b_a, b_b, input_precision="ieee") - b_comp
    total = b_acc + b_y
    return total, (total - b_acc) - b_y


@triton.jit
def exponential(b_x, EXACT: tl.constexpr):
    """Return exp(x) for x <= 0, on request exact to fp32 rounding.

    The hardware computes powers of two, whose argument has been rounded: the error grows with the argument. Exact: Cody
    and Waite's reduction by ln 2 in two parts, then the Taylor series within half of ln 2.
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
        # Below the normal numbers the result is 0: there is no exponent for the power of two.
        m_tiny = b_x < -87.0
        b_bits = (tl.where(m_tiny, 0.0, b_n).to(tl.int32) + 127) << 23
        b_exp = tl.where(m_tiny, 0.0, b_e * b_bits.to(tl.float32, bitcast=True))
    else:
        b_exp = tl.exp(b_x)
    return b_exp


@triton.jit
def ordered(b_x):
    """Return int32 numbers above -2^31 in the order of the fp32 ones. Zeros of both signs are equal.

    A NaN comes after or before all numbers, by its sign. It stays in the order, so its index is valid.
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
