"""The product of `heads_topk` and `tree_verify` with a vocabulary projection that may be quantised.

Weights in 8 bits are converted to the dtype of the states, and the product is multiplied by the scale of each row. Of
4-bit codes, the product over one step's columns, which are in one group, is multiplied by the scale of that group.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from medusa_kernels._registry import interpreted
from medusa_kernels._triton.four_bits import decode_codes
from medusa_kernels._triton.launch import Device
from medusa_kernels._triton.streaming import Config, decode_e4m3, product
from medusa_kernels.quantised import dequantised, group_size

LEAST_COLUMNS = 32
"""Fewest columns of a step: 16 bytes of codes, and the 16 numbers of each half that a matrix instruction takes."""


def decodes_bytes(device: Device, stored: torch.dtype) -> bool:
    """Return whether float8_e4m3fn weights are read as bytes, because Triton cannot convert them on the device."""
    return stored == torch.float8_e4m3fn and (interpreted() or device.capability < (8, 9))


def decoding(device: Device, dtype: torch.dtype, stored: torch.dtype, codes: str = "int4") -> str:
    """Return how weights are converted for states of `dtype`: the name of 4-bit codes, or as in `streaming.product`."""
    if stored == torch.uint8:
        return codes
    if decodes_bytes(device, stored):
        return "e4m3"
    return "int8" if stored == torch.int8 and dtype.itemsize == 2 else ""


def columns_per_step(group: int) -> int:
    """Return how many columns are multiplied before a group's scale: whatever the rows, so that sums do not differ."""
    return math.gcd(128, group)


def readable(weight: Tensor, scale: Tensor | None, zero: Tensor | None, codes: str, dtype: torch.dtype) -> Any:
    """Return a weight, scale and zero points that kernels read; groups of an odd number of 16 columns are restored."""
    if weight.dtype == torch.uint8 and columns_per_step(group_size(weight, scale)) < LEAST_COLUMNS:
        return dequantised(weight, scale, zero, codes).to(dtype), None, None
    return weight, scale, zero


def halves(states: Tensor, weight: Tensor) -> Tensor:
    """Return the states as kernels read them: for 4-bit codes the even columns first, then the odd ones."""
    if weight.dtype != torch.uint8:
        return states.contiguous()
    return states.unflatten(-1, (-1, 2)).transpose(-1, -2).contiguous().view(states.shape)


def constants(weight: Tensor, scale: Tensor | None, zero: Tensor | None) -> dict[str, Any]:
    """Return the constants of a kernel that say what a weight has, besides DECODE."""
    return {"GROUP": group_size(weight, scale), "HAS_SCALE": scale is not None, "HAS_ZERO": zero is not None}


def packed_config(device: Device, dtype: torch.dtype, rows: int, group: int, *, crowded: bool) -> Config:
    """Choose how 4-bit codes are streamed past `rows` states; `crowded`: whether other numbers take many registers.

    Tiles have as many weight rows as there are registers for, because a program loads all states for every tile.
    """
    k = columns_per_step(group)
    if interpreted():
        return Config(min(128, max(16, triton.next_power_of_2(rows))), 256, k, 4, 1, 1)
    if dtype == torch.float32:
        return Config(16, 32, LEAST_COLUMNS, 4, 3, 2)
    m = min(64, max(16, triton.next_power_of_2(rows)))
    n = 128 if m == 16 or (m == 64 and device.hopper) else 64
    warps, stages, programs = (8, 5, 1) if m == 64 else (4, 4, 2)
    return Config(m, n // 2 if crowded else n, k, warps, stages if k == 128 else 6, programs)


@triton.jit
def quantised_product(
    p_a, m_a, p_w, m_w, scale, zero, o_row, size,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr, DECODE: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_ZERO: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Return A W^T, accumulated in fp32 and not rounded, times the scales if there are some: `[BLOCK_M, BLOCK_V]`.

    As `product`; o_row [BLOCK_V] are the rows of scale and zero. GROUP: the columns of a group of 4-bit codes, or 0.
    Then `size` is that of a row of W in bytes, and rows of A have the even columns first (see `halves`).
    """
    if GROUP > 0:
        o_group = o_row * (size * 2 // GROUP)
        b_x = product_of_codes(
            p_a, m_a, p_w, m_w, scale + o_group, zero + o_group, size,
            BLOCK_M, BLOCK_V, BLOCK_K // 2, DECODE, HAS_ZERO, GROUP // 2,
        )  # fmt: skip
    else:
        b_x = product(p_a, m_a, p_w, m_w, size, BLOCK_M, BLOCK_V, BLOCK_K, EVEN, DECODE)
        if HAS_SCALE:
            # [BLOCK_V]
            b_scale = tl.load(scale + o_row, mask=m_w, other=0.0)
            b_x *= (b_scale * 256.0 if DECODE == "e4m3" else b_scale)[None, :]
    return b_x


@triton.jit
def product_of_codes(
    p_a, m_a, p_w, m_w, p_scale, p_zero, size,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_B: tl.constexpr,
    CODES: tl.constexpr, HAS_ZERO: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Return A W^T `[BLOCK_M, BLOCK_V]` for rows of `size` bytes of codes, BLOCK_B in a step and GROUP in a group.

    p_scale and p_zero [BLOCK_V] point at the first group of each row. BLOCK_B divides GROUP. The weight is the left
    factor, so that it is multiplied from the registers in which it was decoded.
    """
    o_k = tl.arange(0, BLOCK_B)
    b_acc = tl.zeros((BLOCK_V, BLOCK_M), tl.float32)
    b_comp = b_acc
    for k in range(0, size, BLOCK_B):
        # [BLOCK_V]
        b_scale = tl.load(p_scale + k // GROUP, mask=m_w, other=0.0).to(tl.float32)
        # [BLOCK_M, BLOCK_B]
        b_even = tl.load(p_a[:, None] + (k + o_k)[None, :], mask=m_a[:, None], other=0.0)
        b_odd = tl.load(p_a[:, None] + (size + k + o_k)[None, :], mask=m_a[:, None], other=0.0)
        # [BLOCK_V, BLOCK_B]
        b_bytes = tl.load(p_w[:, None] + (k + o_k)[None, :], mask=m_w[:, None], other=0)
        b_low, b_high = decode_codes(b_bytes, CODES, b_even.dtype)
        if HAS_ZERO:
            # [BLOCK_V]
            b_zero = tl.load(p_zero + k // GROUP, mask=m_w, other=8).to(tl.int32) - 8
            b_zero = b_zero.to(tl.float32).to(b_even.dtype)[:, None]
            b_low, b_high = b_low - b_zero, b_high - b_zero
        b_part = tl.dot(b_low, tl.trans(b_even), input_precision="ieee")
        b_part = tl.dot(b_high, tl.trans(b_odd), b_part, input_precision="ieee")
        if b_even.dtype == tl.float32:
            # As in `dot_accumulate`.
            b_y = b_part * b_scale[:, None] - b_comp
            total = b_acc + b_y
            b_acc, b_comp = total, (total - b_acc) - b_y
        else:
            b_acc += b_part * b_scale[:, None]
    return tl.trans(b_acc)


@triton.jit
def dot_of_rows(
    p_a, p_w, m_row, scale, zero, o_row, size,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, DECODE: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_ZERO: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Return the product of each row of A with one row of W in fp32, not rounded: `[BLOCK_R]`.

    The arguments are as in `quantised_product`, and the weights are converted as there.
    """
    o_k = tl.arange(0, BLOCK_K)
    b_x = tl.zeros((BLOCK_R,), tl.float32)
    for k in range(0, size, BLOCK_K):
        m_k = m_row[:, None] & (k + o_k < size)[None, :]
        # [BLOCK_R, BLOCK_K]
        b_a = tl.load(p_a[:, None] + (k + o_k)[None, :], mask=m_k, other=0.0)
        b_w = tl.load(p_w[:, None] + (k + o_k)[None, :], mask=m_k, other=0.0)
        if GROUP > 0:
            b_odd = tl.load(p_a[:, None] + (size + k + o_k)[None, :], mask=m_k, other=0.0).to(tl.float32)
            b_low, b_high = decode_codes(b_w, DECODE, b_a.dtype)
            b_low, b_high = b_low.to(tl.float32), b_high.to(tl.float32)
            o_group = o_row[:, None] * (size * 2 // GROUP) + ((k + o_k) * 2 // GROUP)[None, :]
            if HAS_ZERO:
                b_zero = tl.load(zero + o_group, mask=m_k, other=8).to(tl.float32) - 8.0
                b_low, b_high = b_low - b_zero, b_high - b_zero
            b_scale = tl.load(scale + o_group, mask=m_k, other=0.0).to(tl.float32)
            b_x += tl.sum((b_a.to(tl.float32) * b_low + b_odd * b_high) * b_scale, 1)
        else:
            if DECODE == "e4m3":
                b_w = decode_e4m3(b_w)
            b_x += tl.sum(b_a.to(tl.float32) * b_w.to(tl.float32), 1)
    if HAS_SCALE and GROUP == 0:
        # [BLOCK_R]
        b_scale = tl.load(scale + o_row, mask=m_row, other=0.0)
        b_x *= b_scale * 256.0 if DECODE == "e4m3" else b_scale
    return b_x
