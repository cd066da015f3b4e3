"""`rope_append` as one Triton launch: queries rotated, keys rotated into the cache, values copied into the cache.

It does not know what a depth or a cache row means, and it checks nothing: the public function does, save for values,
which lie on the device. A cache row outside the cache is not written, and a position outside the tables is not read
(NaN takes its place).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from medusa_kernels._registry import interpreted
from medusa_kernels._triton import launch
from medusa_kernels._triton.programmatic import has_programmatic, launch_options, programmatic

OPTIONS = launch.OPTIONS | {"enable_fp_fusion": False}
"""Compiler options of every launch. Fused, a product and a sum would be rounded once, where PyTorch rounds twice."""

HEAD_DIMS = (64, 80, 96, 128, 256)
"""Head sizes that are compiled ahead for inspection; any even one runs."""


# Strides of small index tensors, which change with the tree.
_UNSPECIALISED = ("stride_l_b", "stride_n_b", "stride_n_n")


@dataclass(frozen=True)
class Config:
    """How the work is cut: `rows` heads a program, of as many nodes as that spans."""

    rows: int
    num_warps: int
    num_stages: int = 1


def configuration(device: launch.Device, dtype: torch.dtype, head_dim: int) -> Config:
    """Return the launch configuration: a tile in which every thread holds 16 bytes of either half of a head.

    Two warps keep the programs of one decoded token apart (12 for 32 heads of 128 with as many keys and values) and
    let 32 programs share a multiprocessor when there are many.
    """
    half_bytes = triton.next_power_of_2(head_dim // 2) * dtype.itemsize
    num_warps = 2
    rows = max(1, num_warps * 32 * 16 // half_bytes)
    return Config(rows=max(rows, 256) if interpreted() else rows, num_warps=num_warps)


def candidates(device: launch.Device, dtype: torch.dtype, head_dim: int) -> list[Config]:
    """List configurations worth timing, the chosen one first."""
    chosen = configuration(device, dtype, head_dim)
    per_warp = 32 * 16 // (triton.next_power_of_2(head_dim // 2) * dtype.itemsize)
    configs = (Config(max(1, num_warps * per_warp), num_warps) for num_warps in (1, 2, 4, 8))
    return [chosen, *(config for config in configs if config != chosen)]


@triton.jit
def _product(x, y):
    # As eager PyTorch multiplies: in fp32, rounded to the dtype of x.
    return (x.to(tl.float32) * y.to(tl.float32)).to(x.dtype)


@triton.jit
def _sum(x, y):
    return (x.to(tl.float32) + y.to(tl.float32)).to(x.dtype)


@triton.jit
def _rotate(p_in, p_out, p_cos, p_sin, half_in, half_out, half_cos, half_sin, m_in, m_out, m_table):
    # All [ROWS, HALF]. The inputs come first: the tables wait for the position.
    b_first = tl.load(p_in, mask=m_in, other=0.0)
    b_second = tl.load(p_in + half_in, mask=m_in, other=0.0)
    b_cos_first = tl.load(p_cos, mask=m_table, other=float("nan"))
    b_cos_second = tl.load(p_cos + half_cos, mask=m_table, other=float("nan"))
    b_sin_first = tl.load(p_sin, mask=m_table, other=float("nan"))
    b_sin_second = tl.load(p_sin + half_sin, mask=m_table, other=float("nan"))
    b_negated = (-b_second.to(tl.float32)).to(b_second.dtype)
    b_out_first = _sum(_product(b_first, b_cos_first), _product(b_negated, b_sin_first))
    b_out_second = _sum(_product(b_second, b_cos_second), _product(b_first, b_sin_second))
    tl.store(p_out, b_out_first, mask=m_out)
    tl.store(p_out + half_out, b_out_second, mask=m_out)


@triton.jit(do_not_specialize=["nodes", "heads", "kv_heads", "cache_rows", "positions", *_UNSPECIALISED])
def _rope_append_kernel(
    q,
    k,
    v,
    cos,
    sin,
    k_cache,
    v_cache,
    cache_lens,
    depths,
    out,
    nodes,
    heads,
    kv_heads,
    cache_rows,
    positions,
    stride_q_b,
    stride_q_n,
    stride_q_h,
    stride_k_b,
    stride_k_n,
    stride_k_h,
    stride_v_b,
    stride_v_n,
    stride_v_h,
    stride_c_b,
    stride_c_p,
    stride_s_b,
    stride_s_p,
    stride_kc_b,
    stride_kc_h,
    stride_kc_s,
    stride_vc_b,
    stride_vc_h,
    stride_vc_s,
    stride_l_b,
    stride_n_b,
    stride_n_n,
    STRIDE_Q_D: tl.constexpr,
    STRIDE_K_D: tl.constexpr,
    STRIDE_V_D: tl.constexpr,
    STRIDE_C_D: tl.constexpr,
    STRIDE_S_D: tl.constexpr,
    STRIDE_KC_D: tl.constexpr,
    STRIDE_VC_D: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # The programs of a batch row: tiles of all nodes' query heads, then of their key heads, then of their value heads.
    i_t, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    q_tiles, kv_tiles = tl.cdiv(nodes * heads, ROWS), tl.cdiv(nodes * kv_heads, ROWS)
    is_q, is_v = i_t < q_tiles, i_t >= q_tiles + kv_tiles
    first_tile = tl.where(is_q, 0, tl.where(is_v, q_tiles + kv_tiles, q_tiles))
    own_heads = tl.where(is_q, heads, kv_heads)

    # [ROWS, 1]: node and head of every row of the tile, its target in the cache and its position in the tables.
    o_r = (i_t - first_tile) * ROWS + tl.arange(0, ROWS)[:, None]
    o_n, o_h = (o_r // own_heads).to(tl.int64), (o_r % own_heads).to(tl.int64)
    m_n = o_n < nodes
    length = tl.load(cache_lens + i_b * stride_l_b).to(tl.int64)
    o_s = length + o_n

    # [ROWS, HALF]
    o_d = tl.arange(0, HALF)[None, :]
    m_in = m_n & (o_d < D // 2)
    m_out = m_in & (o_s >= 0) & (o_s < cache_rows)
    if is_v:
        p_v = v + i_b * stride_v_b + o_n * stride_v_n + o_h * stride_v_h + o_d * STRIDE_V_D
        p_vc = v_cache + i_b * stride_vc_b + o_h * stride_vc_h + o_s * stride_vc_s + o_d * STRIDE_VC_D
        b_first = tl.load(p_v, mask=m_in)
        b_second = tl.load(p_v + D // 2 * STRIDE_V_D, mask=m_in)
        tl.store(p_vc, b_first, mask=m_out)
        tl.store(p_vc + D // 2 * STRIDE_VC_D, b_second, mask=m_out)
    else:
        o_p = length + tl.load(depths + i_b * stride_n_b + o_n * stride_n_n, mask=m_n, other=0)
        m_table = m_in & (o_p >= 0) & (o_p < positions)
        p_cos = cos + i_b * stride_c_b + o_p * stride_c_p + o_d * STRIDE_C_D
        p_sin = sin + i_b * stride_s_b + o_p * stride_s_p + o_d * STRIDE_S_D
        half_cos, half_sin = D // 2 * STRIDE_C_D, D // 2 * STRIDE_S_D
        if is_q:
            p_q = q + i_b * stride_q_b + o_n * stride_q_n + o_h * stride_q_h + o_d * STRIDE_Q_D
            p_out = out + ((i_b * nodes + o_n) * heads + o_h) * D + o_d
            half_q = D // 2 * STRIDE_Q_D
            _rotate(p_q, p_out, p_cos, p_sin, half_q, D // 2, half_cos, half_sin, m_in, m_in, m_table)
        else:
            p_k = k + i_b * stride_k_b + o_n * stride_k_n + o_h * stride_k_h + o_d * STRIDE_K_D
            p_kc = k_cache + i_b * stride_kc_b + o_h * stride_kc_h + o_s * stride_kc_s + o_d * STRIDE_KC_D
            half_k, half_kc = D // 2 * STRIDE_K_D, D // 2 * STRIDE_KC_D
            _rotate(p_k, p_kc, p_cos, p_sin, half_k, half_kc, half_cos, half_sin, m_in, m_out, m_table)


def rope_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_lens: Tensor,
    depths: Tensor,
) -> Tensor:
    """Launch the kernel; see the public `rope_append`."""
    batch, nodes, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if not q.numel() and not k.numel():
        return out
    config = configuration(launch.describe(q.device), q.dtype, head_dim)
    tiles = triton.cdiv(nodes * heads, config.rows) + 2 * triton.cdiv(nodes * kv_heads, config.rows)
    # A table or depths that all batch rows share have a batch stride of 0.
    cos_rows, sin_rows = ((t.stride() if t.dim() == 3 else (0, *t.stride())) for t in (cos, sin))
    depth_strides = depths.stride() if depths.dim() == 2 else (0, depths.stride(0))
    last = (*(t.stride(-1) for t in (q, k, v, cos, sin, k_cache, v_cache)),)
    pdl = programmatic(q.device)
    with launch.on_device(q):
        _rope_append_kernel[(tiles, batch)](
            q,
            k,
            v,
            cos,
            sin,
            k_cache,
            v_cache,
            cache_lens,
            depths,
            out,
            nodes,
            heads,
            kv_heads,
            k_cache.shape[2],
            cos.shape[-2],
            *q.stride()[:3],
            *k.stride()[:3],
            *v.stride()[:3],
            *cos_rows[:2],
            *sin_rows[:2],
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            cache_lens.stride(0),
            *depth_strides,
            *last,
            head_dim,
            triton.next_power_of_2(head_dim // 2),
            config.rows,
            pdl,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **OPTIONS,
            **launch_options(pdl),
        )
    return out


_POINTERS = ("q", "k", "v", "cos", "sin", "k_cache", "v_cache", "cache_lens", "depths", "out")
_LAST_STRIDES = ("STRIDE_Q_D", "STRIDE_K_D", "STRIDE_V_D", "STRIDE_C_D", "STRIDE_S_D", "STRIDE_KC_D", "STRIDE_VC_D")


def specialisations(device: launch.Device) -> Iterator[launch.Specialisation]:
    """Yield every dtype and head size with heads of adjacent elements, and one with heads of strided elements."""
    cases = [(dtype, dim, 1) for dtype in (torch.bfloat16, torch.float16, torch.float32) for dim in HEAD_DIMS]
    for dtype, dim, last in [*cases, (torch.bfloat16, 128, 2)]:
        config = configuration(device, dtype, dim)
        kind = launch.TRITON_TYPES[dtype]
        indices = ("cache_lens", "depths")
        names = _rope_append_kernel.arg_names
        signature = {n: "*i32" if n in indices else f"*{kind}" for n in _POINTERS} | {
            n: "i32" for n in names if n.islower() and n not in _POINTERS
        }
        yield launch.Specialisation(
            name=f"rope_append {kind} D{dim}" + (" strided" if last != 1 else ""),
            kernel=_rope_append_kernel,
            signature=signature,
            constants=dict.fromkeys(_LAST_STRIDES, last)
            | {"D": dim, "HALF": triton.next_power_of_2(dim // 2), "ROWS": config.rows}
            | {"PDL": has_programmatic(device)},
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            aligned=tuple(n for n in names if n.startswith("stride_") and n not in _UNSPECIALISED),
        )
