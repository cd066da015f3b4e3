"""`rope_append` as one Triton launch: rotate queries, rotate keys into the cache, copy values into the cache.

A program holds whole heads, so it can also add up the parts of a divided projection and normalise heads.

It does not know what a depth or a cache row means. The public function checks the arguments, except for values on the
device: a cache row outside the cache is not written, and a position outside the tables is not read but taken as NaN.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from medusa_kernels._registry import interpreted
from medusa_kernels._triton import launch
from medusa_kernels._triton.add_rms_norm import weighted

OPTIONS = launch.OPTIONS | {"enable_fp_fusion": False}
"""Compiler options of every launch. A fused product and sum would be rounded once, where PyTorch rounds twice."""


@dataclass(frozen=True)
class Config(launch.Warps):
    """How the work is divided: `rows` heads per program, of as many nodes as that spans."""

    rows: int


def configuration(dtype: torch.dtype, head_dim: int, num_warps: int = 2) -> Config:
    """Return a tile of which every thread holds 16 bytes of either half of a head.

    Two warps divide the work of one decoded token into enough programs (12 for 32 heads of 128 with as many keys and
    values), and let 32 programs share a multiprocessor when there are many.
    """
    half_bytes = triton.next_power_of_2(head_dim // 2) * dtype.itemsize
    rows = max(1, num_warps * 32 * 16 // half_bytes)
    return Config(num_warps, 1, max(rows, 256) if interpreted() else rows)


# Strides of small index tensors, which change with the tree.
_UNSPECIALISED = ("stride_cache_lens_b", "stride_depths_b", "stride_depths_n")


@triton.jit
def _product(b_x, b_y):
    """Return x * y rounded to the dtype of x, as eager PyTorch multiplies."""
    return (b_x.to(tl.float32) * b_y.to(tl.float32)).to(b_x.dtype)


@triton.jit
def _sum(b_x, b_y):
    """Return x + y rounded to the dtype of x, as eager PyTorch adds."""
    return (b_x.to(tl.float32) + b_y.to(tl.float32)).to(b_x.dtype)


@triton.jit
def _load(p_in, m_in, stride_part, like, PARTS: tl.constexpr):
    """Return a number, or the sum of its PARTS in order rounded to the dtype of `like`: [ROWS, HALF]."""
    # [ROWS, HALF]
    b_x = tl.load(p_in, mask=m_in, other=0.0)
    if PARTS > 1:
        for part in tl.static_range(1, PARTS):
            b_x += tl.load(p_in + part * stride_part, mask=m_in, other=0.0)
    return b_x.to(like.dtype.element_ty)


@triton.jit
def _scaled(b_x, b_scale, b_weight, EXACT: tl.constexpr, OFFSET: tl.constexpr):
    """Return x * scale, or exactly x / scale, times the weight, rounded as by `weighted`."""
    b_wide = b_x.to(tl.float32)
    b_normed = tl.div_rn(b_wide, tl.zeros_like(b_wide) + b_scale) if EXACT else b_wide * b_scale
    return weighted(b_normed, b_weight, OFFSET)


@triton.jit
def _normed(b_first, b_second, norm, o_d, o_first, apart, size, eps, OFFSET: tl.constexpr):
    """Return both halves of each head divided by the root of its mean square, times the weight norm [D]."""
    m_d = o_d < size // 2
    # [1, HALF]
    b_weight = tl.load(norm + o_first, mask=m_d, other=0.0)
    b_weight_second = tl.load(norm + apart + o_first, mask=m_d, other=0.0)
    b_f, b_s = b_first.to(tl.float32), b_second.to(tl.float32)
    b_square = tl.sum(b_f * b_f + b_s * b_s, 1)[:, None]
    EXACT: tl.constexpr = b_first.dtype == tl.float32
    if EXACT:
        b_scale = tl.sqrt_rn(tl.div_rn(b_square, tl.zeros_like(b_square) + size) + eps)
    else:
        b_scale = tl.rsqrt(b_square / size + eps)
    b_first = _scaled(b_first, b_scale, b_weight, EXACT, OFFSET)
    return b_first, _scaled(b_second, b_scale, b_weight_second, EXACT, OFFSET)


@triton.jit
def _store(p_out, half_out, b_first, b_second, m_out, o_d, D: tl.constexpr, EIGHT_BITS: tl.constexpr):
    """Store both halves of each head at p_out [ROWS, HALF], or in 8 bits with the scale in the 4 bytes after them."""
    if EIGHT_BITS:
        m_d = o_d < D // 2
        b_first = tl.where(m_d, b_first.to(tl.float32), 0.0)
        b_second = tl.where(m_d, b_second.to(tl.float32), 0.0)
        b_most = tl.max(tl.maximum(tl.abs(b_first), tl.abs(b_second)), 1)[:, None]
        # 8 bits have neither NaN nor infinity: of either, the scale is NaN.
        b_most = tl.maximum(b_most, 1e-30) + tl.sum(b_first * 0.0 + b_second * 0.0, 1)[:, None]
        b_factor = tl.div_rn(tl.zeros_like(b_most) + 127.0, b_most)
        # Adding 1.5 * 2^23 rounds to the nearest integer, ties to even.
        tl.store(p_out, (b_first * b_factor + 12582912.0 - 12582912.0).to(tl.int8), mask=m_out)
        tl.store(p_out + half_out, (b_second * b_factor + 12582912.0 - 12582912.0).to(tl.int8), mask=m_out)
        p_scale = (p_out + (D - o_d)).to(tl.pointer_type(tl.float32), bitcast=True)
        b_scale = tl.div_rn(b_most, tl.zeros_like(b_most) + 127.0)
        tl.store(p_scale, b_scale + tl.zeros_like(b_first), mask=m_out & (o_d == 0))
    else:
        tl.store(p_out, b_first, mask=m_out)
        tl.store(p_out + half_out, b_second, mask=m_out)


@triton.jit
def _rotate(
    p_in, p_out, p_cos, p_sin, half_in, half_out, half_cos, half_sin, m_in, m_out, m_table, stride_part, norm, o_d,
    o_first, apart, eps,
    PARTS: tl.constexpr, HAS_NORM: tl.constexpr, OFFSET: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
    EIGHT_BITS: tl.constexpr,
):  # fmt: skip
    """Store (x1 cos1 - x2 sin1, x2 cos2 + x1 sin2) for halves x1, x2 of each head's first R numbers, and the others.

    Every operation is rounded. All pointers and masks are [ROWS, HALF]; half_* is the distance between the halves.
    """
    # The inputs come first, because the tables wait for the position. All loads: [ROWS, HALF]
    b_first = _load(p_in, m_in, stride_part, p_cos, PARTS)
    b_second = _load(p_in + half_in, m_in, stride_part, p_cos, PARTS)
    if HAS_NORM:
        b_first, b_second = _normed(b_first, b_second, norm, o_d, o_first, apart, D, eps, OFFSET)
    if R < D:
        m_kept = m_table & (o_d >= R // 2)
        m_table &= o_d < R // 2
    b_cos_first = tl.load(p_cos, mask=m_table, other=float("nan"))
    b_cos_second = tl.load(p_cos + half_cos, mask=m_table, other=float("nan"))
    b_sin_first = tl.load(p_sin, mask=m_table, other=float("nan"))
    b_sin_second = tl.load(p_sin + half_sin, mask=m_table, other=float("nan"))
    b_negated = (-b_second.to(tl.float32)).to(b_second.dtype)
    b_out_first = _sum(_product(b_first, b_cos_first), _product(b_negated, b_sin_first))
    b_out_second = _sum(_product(b_second, b_cos_second), _product(b_first, b_sin_second))
    if R < D:
        b_out_first = tl.where(m_kept, b_first, b_out_first)
        b_out_second = tl.where(m_kept, b_second, b_out_second)
    _store(p_out, half_out, b_out_first, b_out_second, m_out, o_d, D, EIGHT_BITS)


@triton.jit(do_not_specialize=["nodes", "heads", "kv_heads", "sequences", "cache_rows", "positions", *_UNSPECIALISED])
def _rope_append_kernel(
    q, k, v, cos, sin, k_cache, v_cache, cache_lens, depths, slots, q_norm, k_norm, out, eps,
    nodes, heads, kv_heads, sequences, cache_rows, positions,
    stride_q_b, stride_q_n, stride_q_h, stride_k_b, stride_k_n, stride_k_h, stride_v_b, stride_v_n, stride_v_h,
    stride_cos_b, stride_cos_p, stride_sin_b, stride_sin_p,
    stride_k_cache_b, stride_k_cache_h, stride_k_cache_s, stride_v_cache_b, stride_v_cache_h, stride_v_cache_s,
    stride_cache_lens_b, stride_depths_b, stride_depths_n, stride_q_s, stride_k_s, stride_v_s,
    STRIDE_Q_D: tl.constexpr, STRIDE_K_D: tl.constexpr, STRIDE_V_D: tl.constexpr,
    STRIDE_COS_D: tl.constexpr, STRIDE_SIN_D: tl.constexpr,
    STRIDE_K_CACHE_D: tl.constexpr, STRIDE_V_CACHE_D: tl.constexpr,
    D: tl.constexpr, R: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr,
    HAS_NORM: tl.constexpr, OFFSET: tl.constexpr, HAS_SLOTS: tl.constexpr,
    EIGHT_BITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute x cos(p) + rotate_half(x) sin(p) for ROWS heads of q or k, or copy ROWS heads of v.

    p = cache_lens[b] + depths[b, i] is the row of the tables cos, sin [B or 1, P, R]; what a head has after its first R
    numbers is copied. q [B, N, Hq, D] goes to out; k and v [B, N, Hkv, D] go to row cache_lens[b] + i of the caches
    [C, Hkv, S, D], of their sequence slots[b] if HAS_SLOTS, else b. Each product and each sum is computed in fp32 and
    rounded to the dtype of the tables, as in PyTorch. EIGHT_BITS: the caches [C, Hkv, S, D + 4] are int8, see
    `medusa_kernels.cache_rows`. Of PARTS, which have a first axis, x is the sum. With norms q_norm and k_norm [D] x is
    first x / sqrt(mean(x^2) + eps) times the weight, rounded as by `weighted`.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # The programs of a batch row: tiles of all nodes' query heads, then of their key heads, then of their value heads.
    i_t, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    q_tiles, kv_tiles = tl.cdiv(nodes * heads, ROWS), tl.cdiv(nodes * kv_heads, ROWS)
    is_q, is_v = i_t < q_tiles, i_t >= q_tiles + kv_tiles
    first_tile = tl.where(is_q, 0, tl.where(is_v, q_tiles + kv_tiles, q_tiles))
    own_heads = tl.where(is_q, heads, kv_heads)

    # [ROWS, 1]: node and head of each row of the tile, its row in the cache and its position in the tables.
    o_r = (i_t - first_tile) * ROWS + tl.arange(0, ROWS)[:, None]
    o_n, o_h = (o_r // own_heads).to(tl.int64), (o_r % own_heads).to(tl.int64)
    m_n = o_n < nodes
    length = tl.load(cache_lens + i_b * stride_cache_lens_b).to(tl.int64)
    o_s = length + o_n
    slot = tl.load(slots + i_b).to(tl.int64) if HAS_SLOTS else i_b

    # [ROWS, HALF]
    o_d = tl.arange(0, HALF)[None, :]
    m_in = m_n & (o_d < D // 2)
    m_out = m_in & (o_s >= 0) & (o_s < tl.where((slot >= 0) & (slot < sequences), cache_rows, 0))
    if is_v:
        p_v = v + i_b * stride_v_b + o_n * stride_v_n + o_h * stride_v_h + o_d * STRIDE_V_D
        p_v_cache = (
            v_cache + slot * stride_v_cache_b + o_h * stride_v_cache_h + o_s * stride_v_cache_s + o_d * STRIDE_V_CACHE_D
        )
        # [ROWS, HALF]
        b_first = _load(p_v, m_in, stride_v_s, cos, PARTS)
        b_second = _load(p_v + D // 2 * STRIDE_V_D, m_in, stride_v_s, cos, PARTS)
        _store(p_v_cache, D // 2 * STRIDE_V_CACHE_D, b_first, b_second, m_out, o_d, D, EIGHT_BITS)
    else:
        # [ROWS, 1]
        o_p = length + tl.load(depths + i_b * stride_depths_b + o_n * stride_depths_n, mask=m_n, other=0)
        m_table = m_in & (o_p >= 0) & (o_p < positions)
        # [1, HALF]: the numbers of a first half, of R or of the others, and how far after them those of the second are.
        o_first, apart = o_d, D // 2
        if R < D:
            o_first = o_d + tl.where(o_d < R // 2, 0, R // 2)
            apart = tl.where(o_d < R // 2, R // 2, (D - R) // 2)
            STEP: tl.constexpr = (R // 2 | D // 2) & -(R // 2 | D // 2)  # the largest power of two that divides both
            o_first = tl.max_contiguous(tl.multiple_of(o_first, (1, STEP)), (1, STEP))
            apart = tl.max_constancy(tl.multiple_of(apart, (1, STEP)), (1, STEP))
        p_cos = cos + i_b * stride_cos_b + o_p * stride_cos_p + o_d * STRIDE_COS_D
        p_sin = sin + i_b * stride_sin_b + o_p * stride_sin_p + o_d * STRIDE_SIN_D
        half_cos, half_sin = R // 2 * STRIDE_COS_D, R // 2 * STRIDE_SIN_D
        if is_q:
            p_q = q + i_b * stride_q_b + o_n * stride_q_n + o_h * stride_q_h + o_first * STRIDE_Q_D
            p_out = out + ((i_b * nodes + o_n) * heads + o_h) * D + o_first
            half_q = apart * STRIDE_Q_D
            _rotate(
                p_q, p_out, p_cos, p_sin, half_q, apart, half_cos, half_sin, m_in, m_in, m_table, stride_q_s, q_norm,
                o_d, o_first, apart, eps, PARTS, HAS_NORM, OFFSET, D, R, False,
            )  # fmt: skip
        else:
            p_k = k + i_b * stride_k_b + o_n * stride_k_n + o_h * stride_k_h + o_first * STRIDE_K_D
            p_k_cache = k_cache + slot * stride_k_cache_b + o_h * stride_k_cache_h + o_s * stride_k_cache_s
            p_k_cache += o_first * STRIDE_K_CACHE_D
            half_k, half_k_cache = apart * STRIDE_K_D, apart * STRIDE_K_CACHE_D
            _rotate(
                p_k, p_k_cache, p_cos, p_sin, half_k, half_k_cache, half_cos, half_sin, m_in, m_out, m_table,
                stride_k_s, k_norm, o_d, o_first, apart, eps, PARTS, HAS_NORM, OFFSET, D, R, EIGHT_BITS,
            )  # fmt: skip


def rope_append(
    q, k, v, cos, sin, k_cache, v_cache, cache_lens, depths, *, q_norm=None, k_norm=None, eps=1e-6, slots=None,
    norm_offset=None,
):  # fmt: skip
    """Launch the kernel; see the public `rope_append`."""
    parts = q.shape[0] if q.dim() == 5 else 1
    batch, nodes, heads, head_dim = q.shape[-4:]
    kv_heads = k.shape[-2]
    out = q.new_empty(q.shape[-4:], dtype=cos.dtype)
    if not q.numel() and not k.numel():
        return out
    config = configuration(cos.dtype, head_dim)
    tiles = triton.cdiv(nodes * heads, config.rows) + 2 * triton.cdiv(nodes * kv_heads, config.rows)
    # A table or depths that all batch rows share have a batch stride of 0.
    table_strides = [stride for t in (cos, sin) for stride in (t.stride() if t.dim() == 3 else (0, *t.stride()))[:2]]
    depth_strides = depths.stride() if depths.dim() == 2 else (0, depths.stride(0))
    pdl = launch.programmatic(q.device)
    norms = (cos if norm is None else norm.contiguous() for norm in (q_norm, k_norm))
    with launch.on_device(q):
        _rope_append_kernel[(tiles, batch)](
            q, k, v, cos, sin, k_cache, v_cache, cache_lens, depths,
            cache_lens if slots is None else slots.contiguous(), *norms, out, eps,
            nodes, heads, kv_heads, *k_cache.shape[0:3:2], cos.shape[-2],
            *q.stride()[-4:-1], *k.stride()[-4:-1], *v.stride()[-4:-1], *table_strides,
            *k_cache.stride()[:3], *v_cache.stride()[:3], cache_lens.stride(0), *depth_strides,
            *(t.stride(0) if parts > 1 else 0 for t in (q, k, v)),
            *(t.stride(-1) for t in (q, k, v, cos, sin, k_cache, v_cache)),
            head_dim, cos.shape[-1], triton.next_power_of_2(head_dim // 2), config.rows, parts, q_norm is not None,
            norm_offset, slots is not None, k_cache.dtype == torch.int8, pdl, **launch.options(config, pdl, OPTIONS),
        )  # fmt: skip
    return out
