"""Tree attention in Triton: split over the keys, every query head of a KV head in one tile, partial results merged.

The query heads of one KV head are packed into rows, row r being node `r // G` of head `r % G` (G heads a KV head), so
that keys and values are read for all of them at once. The keys of a batch row are cut into units, first whole blocks
of the prefix without any mask, then blocks with one: the ragged end of the prefix, and the tree, whose blocks start
exactly at row `cache_lens[b]` so that each lies in one ancestor word. The units are dealt to as many programs as fill
the device; each writes its part normalised, with its log-sum-exp, and a second kernel merges the parts in a fixed
order. The grid depends on shapes only; lengths are read on the device. How large tiles are is not decided here but in
`tree_attention_configs`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from medusa_kernels._triton.launch import capability, multiprocessors
from medusa_kernels._triton.tree_attention_configs import Config, candidates, configuration

__all__ = ["Config", "candidates", "configuration", "specialisations", "tree_attention"]

LOG2E = tl.constexpr(math.log2(math.e))
MERGE_CHUNK = 8
"""Parts that the merge loads at once."""


@triton.jit
def _shares(
    length,
    nodes,
    window,
    splits,
    SINGLE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TREE_BLOCK: tl.constexpr,
    MIN_UNITS: tl.constexpr,
):
    """Cut the keys of a batch row into units: the first block seen, whole blocks, ragged ones, all units, programs.

    A single node sees itself like one more key of the prefix, and has no tree.
    """
    prefix = length + 1 if SINGLE else length
    # The root, which has the lowest position, sees the lowest keys.
    first = tl.maximum(length + 1 - window, 0) // BLOCK_N if HAS_WINDOW else 0
    whole = prefix // BLOCK_N - first
    ragged = (prefix % BLOCK_N + TREE_BLOCK - 1) // TREE_BLOCK
    units = whole + ragged
    if not SINGLE:
        units += (nodes + TREE_BLOCK - 1) // TREE_BLOCK
    used = tl.minimum(splits, tl.maximum(units // MIN_UNITS, 1))
    return first, whole, ragged, units, used


@triton.jit
def _depths(anc_ptr, stride_an, stride_aw, node, end, nodes):
    """Size of each node's ancestor set less one, node being < end where it is one: bits counted by halving."""
    count = tl.zeros_like(node).to(tl.int64)
    # As many words as there can be: with a loop in it, a loop over blocks would not be pipelined.
    for word in tl.static_range(4):
        x = tl.load(anc_ptr + node * stride_an + word * stride_aw, mask=node < tl.where(word * 64 < nodes, end, 0), other=0)
        x = x - ((x >> 1) & 0x5555555555555555)
        x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
        x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
        x = x + (x >> 8)
        x = x + (x >> 16)
        count += (x + (x >> 32)) & 0x7F
    return count.to(tl.int32) - 1


@triton.jit
def _tanh(x):
    """Hyperbolic tangent to fp32 rounding: an odd polynomial where 1 - 2 / (exp(2x) + 1) would cancel.

    The coefficients interpolate (tanh(x) / x - 1) / x^2 at the Chebyshev points of x^2 in [0, 0.36].
    """
    t = x * x
    small = 0.002373515162616968
    small = small * t - 0.008412553928792477
    small = small * t + 0.021789107471704483
    small = small * t - 0.053961653262376785
    small = small * t + 0.13333313167095184
    small = small * t - 0.3333333432674408
    magnitude = tl.minimum(tl.abs(x), 20.0)
    large = 1.0 - 2.0 / (tl.exp(2.0 * magnitude) + 1.0)
    return tl.where(magnitude < 0.6, x + x * (t * small), tl.where(x < 0, -large, large))


@triton.jit
def _scores(q, keys, scale, softcap, NEGATIVE: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """Scores of a tile, but for the size of the scale, which is in the exponent's factor. With a cap they are final."""
    scores = tl.dot(q, tl.trans(keys), input_precision="ieee")
    if NEGATIVE:
        scores = -scores
    if HAS_SOFTCAP:
        scores = softcap * _tanh(scores * (scale / softcap))
    return scores


@triton.jit
def _accumulate(scores, values, acc, high, total, factor, MASKED: tl.constexpr):
    """Add one block to the running softmax: acc [M, D] and total [M], both relative to the largest score so far."""
    new_high = tl.maximum(high, tl.max(scores, 1))
    # Until a row has seen a key its largest score is -inf, and -inf less -inf would be NaN.
    base = tl.where(new_high == float("-inf"), 0.0, new_high) if MASKED else new_high
    if values.dtype == tl.float32:
        probs = tl.exp2((scores - base[:, None]) * factor)
        shrink = tl.exp2((high - base) * factor)
    else:
        # One operation instead of two; the rounding is far below that of the probabilities to 16 bits.
        base *= factor
        probs = tl.exp2(scores * factor - base[:, None])
        shrink = tl.exp2(high * factor - base)
    total = total * shrink + tl.sum(probs, 1)
    acc = tl.dot(probs.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
    return acc, new_high, total


@triton.jit(do_not_specialize=["nodes", "groups", "splits", "window", "stride_ab", "stride_an", "stride_aw"])
def _attend_kernel(
    q_ptr,  # [B, N, Hkv * G, D]
    k_ptr,  # [B, Hkv, S, D]
    v_ptr,
    lens_ptr,  # [B]
    anc_ptr,  # [B or 1, N, W]
    out_ptr,  # [B, N, Hkv * G, D], contiguous
    part_ptr,  # [B, Hkv, splits, N * G, D]
    lse_ptr,  # [B, Hkv, splits, N * G], base 2
    scale,  # its size; with NEGATIVE the scores change sign
    softcap,
    nodes,
    groups,
    splits,
    window,
    stride_qb,
    stride_qn,
    stride_qh,
    stride_qd,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_kd,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_vd,
    stride_ab,
    stride_an,
    stride_aw,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TREE_BLOCK: tl.constexpr,
    MIN_UNITS: tl.constexpr,
    SINGLE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    DEEP: tl.constexpr,  # whether a path of the tree can be longer than the window
    HAS_SOFTCAP: tl.constexpr,
    NEGATIVE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """One tile of rows of one KV head against one share of its keys."""
    rows = nodes * groups
    tiles = (rows + BLOCK_M - 1) // BLOCK_M
    # The tiles of one share run side by side: the first brings its keys into the L2 cache, the others find them there.
    split = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    kv_head = tl.program_id(1)
    batch = tl.program_id(2)
    length = tl.load(lens_ptr + batch)
    first, whole, ragged, units, used = _shares(
        length, nodes, window, splits, SINGLE, HAS_WINDOW, BLOCK_N, TREE_BLOCK, MIN_UNITS
    )
    if split >= used:
        return
    begin = split * units // used
    end = (split + 1) * units // used

    o_r = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, BLOCK_D)
    m_r = o_r < rows
    m_d = o_d < D
    node = o_r // groups
    head = kv_head * groups + o_r % groups
    # [BLOCK_M, BLOCK_D]
    q = tl.load(
        q_ptr
        + batch.to(tl.int64) * stride_qb
        + (node.to(tl.int64) * stride_qn + head.to(tl.int64) * stride_qh)[:, None]
        + o_d[None, :] * stride_qd,
        mask=m_r[:, None] & m_d[None, :],
        other=0.0,
    )
    factor = LOG2E if HAS_SOFTCAP else scale * LOG2E
    k_base = k_ptr + batch.to(tl.int64) * stride_kb + kv_head.to(tl.int64) * stride_kh
    v_base = v_ptr + batch.to(tl.int64) * stride_vb + kv_head.to(tl.int64) * stride_vh
    anc_ptr += batch.to(tl.int64) * stride_ab
    if HAS_WINDOW:
        position = tl.zeros_like(node) + length
        if not SINGLE:
            position += _depths(anc_ptr, stride_an, stride_aw, node, nodes, nodes)

    high = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    # Whole blocks of the prefix: every node sees every key, but for a window.
    o_n = tl.arange(0, BLOCK_N)
    o_k = o_n[:, None] * stride_ks + o_d[None, :] * stride_kd
    o_v = o_n[:, None] * stride_vs + o_d[None, :] * stride_vd
    for unit in tl.range(tl.minimum(begin, whole), tl.minimum(end, whole), num_stages=STAGES):
        row = (first + unit) * BLOCK_N
        p_k = k_base + row.to(tl.int64) * stride_ks + o_k
        p_v = v_base + row.to(tl.int64) * stride_vs + o_v
        # [BLOCK_N, BLOCK_D]
        if D == BLOCK_D:
            keys = tl.load(p_k)
        else:
            keys = tl.load(p_k, mask=m_d[None, :], other=0.0)
        scores = _scores(q, keys, scale, softcap, NEGATIVE, HAS_SOFTCAP)
        if HAS_WINDOW:
            scores = tl.where(position[:, None] - (row + o_n)[None, :] < window, scores, float("-inf"))
        if D == BLOCK_D:
            values = tl.load(p_v)
        else:
            values = tl.load(p_v, mask=m_d[None, :], other=0.0)
        acc, high, total = _accumulate(scores, values, acc, high, total, factor, HAS_WINDOW)

    # The ragged end of the prefix, then the tree.
    o_t = tl.arange(0, TREE_BLOCK)
    o_k = o_t[:, None] * stride_ks + o_d[None, :] * stride_kd
    o_v = o_t[:, None] * stride_vs + o_d[None, :] * stride_vd
    for unit in tl.range(tl.maximum(begin, whole) - whole, tl.maximum(end, whole) - whole, num_stages=STAGES):
        in_tree = unit >= ragged
        first_node = tl.where(in_tree, (unit - ragged) * TREE_BLOCK, 0)
        row = tl.where(in_tree, length + first_node, (first + whole) * BLOCK_N + unit * TREE_BLOCK)
        prefix = length + 1 if SINGLE else length
        m_t = o_t < tl.where(in_tree, length + nodes, prefix) - row
        m_kv = m_t[:, None] & m_d[None, :]
        # [TREE_BLOCK, BLOCK_D]; rows beyond the valid ones may hold NaN, which no probability of zero would silence.
        keys = tl.load(k_base + row.to(tl.int64) * stride_ks + o_k, mask=m_kv, other=0.0)
        scores = _scores(q, keys, scale, softcap, NEGATIVE, HAS_SOFTCAP)
        # [BLOCK_M, TREE_BLOCK]
        visible = m_t[None, :]
        if not SINGLE:
            # Every node sees the prefix: all bits set.
            p_word = anc_ptr + node * stride_an + first_node // 64 * stride_aw
            word = tl.load(p_word, mask=o_r < tl.where(in_tree, rows, 0), other=-1) >> (first_node % 64)
            low, high_half = word.to(tl.int32), (word >> 32).to(tl.int32)
            half = tl.where((o_t < 32)[None, :], low[:, None], high_half[:, None])
            visible = visible & (((half >> (o_t % 32)[None, :]) & 1) != 0)
        if HAS_WINDOW:
            key_position = row + o_t
            if DEEP:
                tree_end = tl.where(in_tree, nodes, 0)
                depths = _depths(anc_ptr, stride_an, stride_aw, first_node + o_t, tree_end, nodes)
                key_position = tl.where(in_tree, length + depths, key_position)
            visible = visible & (position[:, None] - key_position[None, :] < window)
        scores = tl.where(visible, scores, float("-inf"))
        values = tl.load(v_base + row.to(tl.int64) * stride_vs + o_v, mask=m_kv, other=0.0)
        acc, high, total = _accumulate(scores, values, acc, high, total, factor, True)

    # A row may have seen no key of this share.
    seen = total > 0
    # Indices are made anew from a zero that the compiler cannot see, or it would keep those of q over both loops.
    zero = (tl.max(total, 0) < 0).to(tl.int32)
    o_r = (tile + zero) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_r = o_r < rows
    node = o_r // groups
    head = kv_head * groups + o_r % groups
    acc = acc / tl.where(seen, total, 1.0)[:, None]
    m_out = m_r[:, None] & m_d[None, :]
    if used == 1:
        o_out = (batch.to(tl.int64) * nodes + node) * (tl.num_programs(1) * groups) + head
        tl.store(out_ptr + o_out[:, None] * D + o_d[None, :], acc.to(out_ptr.dtype.element_ty), mask=m_out)
    else:
        o_part = ((batch.to(tl.int64) * tl.num_programs(1) + kv_head) * splits + split) * rows + o_r
        tl.store(part_ptr + o_part[:, None] * D + o_d[None, :], acc, mask=m_out)
        lse = tl.where(seen, high * factor + tl.log2(tl.where(seen, total, 1.0)), float("-inf"))
        tl.store(lse_ptr + o_part, lse, mask=m_r)


@triton.jit(do_not_specialize=["nodes", "groups", "splits", "window"])
def _merge_kernel(
    part_ptr,  # [B, Hkv, splits, N * G, D]
    lse_ptr,  # [B, Hkv, splits, N * G], base 2
    lens_ptr,  # [B]
    out_ptr,  # [B, N, Hkv * G, D], contiguous
    nodes,
    groups,
    splits,
    window,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TREE_BLOCK: tl.constexpr,
    MIN_UNITS: tl.constexpr,
    SINGLE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Merge the parts of one row, in order; parts that no program wrote are not read."""
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    batch = tl.program_id(2)
    length = tl.load(lens_ptr + batch)
    _, _, _, _, used = _shares(length, nodes, window, splits, SINGLE, HAS_WINDOW, BLOCK_N, TREE_BLOCK, MIN_UNITS)
    if used == 1:
        return
    o_d = tl.arange(0, BLOCK_D)
    m_d = o_d < D
    high = float("-inf")
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    base = (batch.to(tl.int64) * tl.num_programs(1) + kv_head) * splits
    for start in range(0, used, CHUNK):
        o_s = start + tl.arange(0, CHUNK)
        m_s = o_s < used
        o_part = (base + o_s) * (nodes * groups) + row
        lse = tl.load(lse_ptr + o_part, mask=m_s, other=float("-inf"))
        # [CHUNK, BLOCK_D]
        parts = tl.load(
            part_ptr + o_part[:, None] * D + o_d[None, :], mask=m_s[:, None] & m_d[None, :], other=0.0
        )
        new_high = tl.maximum(high, tl.max(lse, 0))
        shift = tl.where(new_high == float("-inf"), 0.0, new_high)
        weights = tl.exp2(lse - shift)
        shrink = tl.exp2(high - shift)
        total = total * shrink + tl.sum(weights, 0)
        acc = acc * shrink + tl.sum(weights[:, None] * parts, 0)
        high = new_high
    node = row // groups
    o_out = (batch.to(tl.int64) * nodes + node) * (tl.num_programs(1) * groups) + kv_head * groups + row % groups
    tl.store(out_ptr + o_out * D + o_d, (acc / total).to(out_ptr.dtype.element_ty), mask=m_d)


def _constants(config: Config, head_dim: int, nodes: int, window: int | None) -> dict[str, Any]:
    """Constants that both kernels take: they decide how keys are cut into units, which both must do alike."""
    return {
        "D": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_N": config.block_n,
        # A block lies in one ancestor word. Where the depths of its nodes are needed they take many registers.
        "TREE_BLOCK": min(32 if _deep(nodes, window) else 64, config.block_n),
        "MIN_UNITS": max(1, config.min_keys // config.block_n),
        "SINGLE": nodes == 1,
        "HAS_WINDOW": window is not None,
    }


def _deep(nodes: int, window: int | None) -> bool:
    """Whether a node may be too deep in the tree to see the root."""
    return window is not None and window < nodes


def _splits(config: Config, programs: int, slots: int, keys: int) -> int:
    """Return into how many shares the keys are cut so that `programs` times as many programs fill `slots`.

    The time is taken as waves times the keys of a share, plus a constant for what every program does besides; the
    fewest shares of the least time win. With more than a few waves nothing is gained, so no more are looked at.
    """
    most = max(1, min(keys // config.min_keys, 4 * slots // programs, 256))
    overhead = 128
    return min(range(1, most + 1), key=lambda s: (-(-programs * s // slots) * (keys / s + overhead * (s > 1)), s))


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_lens: Tensor,
    ancestors: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Launch the kernels; arguments as checked by the public `tree_attention`."""
    batch, nodes, heads, head_dim = q.shape
    kv_heads, capacity = k_cache.shape[1:3]
    groups = heads // kv_heads
    rows = nodes * groups
    out = q.new_empty(q.shape)
    if out.numel() == 0:
        return out
    config = configuration(capability(q.device), q.dtype, head_dim, rows)
    tiles = -(-rows // config.block_m)
    slots = multiprocessors(q.device) * config.programs
    splits = _splits(config, batch * kv_heads * tiles, slots, capacity)
    constants = _constants(config, head_dim, nodes, window)
    if splits == 1:
        parts = lse = out
    else:
        parts = torch.empty(batch, kv_heads, splits, rows, head_dim, dtype=torch.float32, device=q.device)
        lse = torch.empty(batch, kv_heads, splits, rows, dtype=torch.float32, device=q.device)
    scale = head_dim**-0.5 if scale is None else scale
    sizes = (nodes, groups, splits, 0 if window is None else window)
    words = ancestors if ancestors.dim() == 3 else ancestors.expand(batch, -1, -1)
    with torch.cuda.device(q.device if q.is_cuda else -1):
        _attend_kernel[(tiles * splits, kv_heads, batch)](
            *(q, k_cache, v_cache, cache_lens, words, out, parts, lse),
            # A scale of zero becomes one too small to matter: the kernel would multiply infinity by it.
            max(abs(scale), 1e-30),
            1.0 if softcap is None else softcap,
            *sizes,
            *(*q.stride(), *k_cache.stride(), *v_cache.stride(), *words.stride()),
            **constants,
            BLOCK_M=config.block_m,
            DEEP=_deep(nodes, window),
            HAS_SOFTCAP=softcap is not None,
            NEGATIVE=scale < 0,
            STAGES=config.num_stages,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )
        if splits > 1:
            _merge_kernel[(rows, kv_heads, batch)](
                *(parts, lse, cache_lens, out), *sizes, **constants, CHUNK=MERGE_CHUNK, num_warps=1
            )
    return out
