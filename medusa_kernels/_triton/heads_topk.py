"""`heads_topk` as Triton launches: the root's term, each residual block, vocabulary projections with top-k, merge.

All but the last stream the weights once past all rows that use them. The projections keep, per row and program, the
top k tokens and the sum of exponentials over the program's share of the vocabulary. The merge has a fixed order. Only
the heads' states and these partial results are stored in between, never logits.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from medusa_kernels._registry import interpreted
from medusa_kernels._triton import launch
from medusa_kernels._triton.launch import Device, Warps, describe, on_device
from medusa_kernels._triton.quantised_product import (
    constants,
    decodes_bytes,
    halves,
    packed_config,
    quantised_product,
    readable,
)
from medusa_kernels._triton.quantised_product import decoding as decoding_of
from medusa_kernels._triton.streaming import (
    OPTIONS,
    Config,
    index_of,
    interpreted_config,
    narrowed,
    number_of,
    ordered,
    product,
    shares,
    unit,
    wide,
)
from medusa_kernels._triton.topk import NO_KEY, NO_ORDER, empty_topk, merge_topk, merge_topk_of_tile
from medusa_kernels._triton.tree_attention_kernels import tanh
from medusa_kernels.heads_topk import residual_blocks

MERGE = Warps(num_warps=4, num_stages=3)

HALF_PRECISION_BYTES = True
"""Whether quantised weights and the states that they are multiplied by become fp16 if the states have 16 bits. That
takes fewer instructions than bf16."""


def configuration(
    device: Device,
    dtype: torch.dtype,
    stored: torch.dtype,
    rows: int,
    stage: str,
    *,
    vectors: bool = True,
    noise: bool = False,
    group: int = 0,
) -> Config:
    """Choose how weights of dtype `stored` are streamed past `rows` states, in the stage "residual" or "vocabulary".

    `vectors`: whether 16 bytes can be loaded at once (see `streaming.wide`). `noise`: whether noise is added. `group`:
    columns of a group of 4-bit codes.
    """
    if group:
        return packed_config(device, dtype, rows, group, crowded=noise or rows > 32)
    if interpreted():
        return interpreted_config(rows)
    m = min(64, max(16, triton.next_power_of_2(rows)))
    if dtype == torch.float32 or not vectors:
        # In fp32 a chain of multiply-adds is as long as a block, see `dot_accumulate`.
        return Config(16, 32, 16 if dtype == torch.float32 else 32, 4, 4, 2)
    # The addresses of the noise of more rows spill with 4 warps.
    warps = 8 if noise and m > 16 else 4
    # As many programs as there are registers for: 8 warps of up to 255 registers, or 12 of up to 168.
    programs = 8 // warps
    # From 9.0 on the residual block of 64 rows spills with 64 weight rows.
    if not device.roomy or (device.capability[0] >= 9 and stage == "residual" and m == 64):
        return Config(m, 32, 64, warps, 4, programs if m == 64 else 12 // warps)
    if device.hopper and stage == "vocabulary" and m == 16:
        # Best on an H200 for own, shared and gathered rows.
        return Config(m, 128, 128 if stored.itemsize == 1 else 64, 4, 5, 2)
    block_k = 128 if m == 16 or (m == 32 and stage == "vocabulary") else 64
    return Config(m, 64, block_k * 2 if stored.itemsize == 1 and m == 16 else block_k, warps, 4, programs)


@triton.jit(do_not_specialize=["batch", "tiles", "step"])
def residual_kernel(
    x, hidden, w1, b1, states,
    batch, heads, size, columns, stride_x_b, stride_x_k, stride_hidden_b, stride_hidden_k, stride_w1_k, stride_w1_r,
    stride_b1_k, tiles, step,
    UNIT: tl.constexpr, EVEN: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATE: tl.constexpr,
    PDL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute h + SiLU(W1 x + b1) for BLOCK_M rows and one program's share of the rows of one head's W1.

    hidden (h) [B, H] or [B, K, H], x likewise with R instead of H, w1 [K, H, R] and b1 [K, H] give states [B, K, H];
    without ACTIVATE h + W1 x + b1. Everything is fp32 until the one rounding to the dtype of the states, which may be
    fp16 instead of bf16. Sizes (H and R, the columns) and strides come in units of UNIT elements.
    """
    i_m, i_p, i_k = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    programs = tl.num_programs(1)
    size, columns = size * UNIT, columns * UNIT
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_v = tl.arange(0, BLOCK_V)
    m_m = o_m < batch
    p_a = x + i_k * stride_x_k * UNIT + o_m.to(tl.int64) * (stride_x_b * UNIT)
    p_h = hidden + i_k * stride_hidden_k * UNIT + o_m.to(tl.int64) * (stride_hidden_b * UNIT)
    if PDL:
        tl.extra.cuda.gdc_wait()
    for tile in range(tiles):
        first = (tile * programs + i_p) * step
        o_r = first + o_v
        m_r = (o_v < step) & (o_r < size)
        p_w = w1 + i_k * stride_w1_k * UNIT + o_r.to(tl.int64) * (stride_w1_r * UNIT)
        # [BLOCK_M, BLOCK_V]
        b_inner = product(p_a, m_m, p_w, m_r, columns, BLOCK_M, BLOCK_V, BLOCK_K, EVEN, "")
        if HAS_BIAS:
            # [BLOCK_V]
            b_inner += tl.load(b1 + i_k * stride_b1_k + o_r, mask=m_r, other=0.0).to(tl.float32)[None, :]
        m_state = m_m[:, None] & m_r[None, :]
        # [BLOCK_M, BLOCK_V]
        b_state = tl.load(p_h[:, None] + o_r[None, :], mask=m_state, other=0.0).to(tl.float32)
        b_state += b_inner * tl.sigmoid(b_inner) if ACTIVATE else b_inner
        if states.dtype.element_ty != hidden.dtype.element_ty:
            # fp16 ends at 65504. Infinities and NaN stay what they are.
            b_state = tl.where(tl.abs(b_state) < float("inf"), tl.clamp(b_state, -65504.0, 65504.0), b_state)
        p_state = states + (o_m.to(tl.int64)[:, None] * heads + i_k) * size + o_r[None, :]
        tl.store(p_state, b_state.to(states.dtype.element_ty), mask=m_state)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit(do_not_specialize=["rows", "tiles", "step"])
def vocabulary_kernel(
    states, w2, scale, zero, token_map, noise, keys, peaks, sums,
    rows, groups, heads, vocabulary, ids, size, stride_w2_g, stride_w2_v, stride_scale_g, stride_noise_b,
    stride_noise_k, tiles, step, inverse_temperature,
    UNIT: tl.constexpr, EVEN: tl.constexpr, DECODE: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_ZERO: tl.constexpr,
    GROUP: tl.constexpr, GATHER: tl.constexpr, HAS_MAP: tl.constexpr, HAS_NOISE: tl.constexpr,
    PDL: tl.constexpr, K: tl.constexpr, PLACES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
    SOFTCAP: tl.constexpr = None,
):  # fmt: skip
    """Reduce x = W2 s / temperature + noise over a share of the vocabulary: top K keys, m = max x, sum of exp(x - m).

    states [R * G, H], w2 [G, V, H], scale and zero [G, V, ..] give keys [R * G, P, K], peaks (m) and sums
    [R * G, P]. With one projection per head the G groups are the heads and the R rows the batch; a shared projection is
    one group whose rows are all states. Row r of group g is state r * G + g. GATHER: token_map names the V rows of W2.
    State b * heads + j takes row j of noise [B, .., ids]; with a token_map (HAS_MAP) it names the ids. W2 s is the fp32
    accumulator, which is not rounded; with a SOFTCAP c it becomes c tanh(W2 s / c). DECODE to GROUP, and what they make
    of states and the size, are as in `quantised_product`.
    """
    i_m, i_p, i_g = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    programs = tl.num_programs(1)
    size = size * UNIT
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_v = tl.arange(0, BLOCK_V)
    m_m = o_m < rows
    o_state = o_m.to(tl.int64) * groups + i_g
    p_a = states + o_state * (size * (2 if GROUP > 0 else 1))
    p_noise = noise + o_state // heads * stride_noise_b + o_state % heads * stride_noise_k
    b_topk = empty_topk(BLOCK_M, K, PLACES)
    b_peak = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_M,), tl.float32)
    p_group = w2 + i_g * stride_w2_g * UNIT
    if PDL:
        tl.extra.cuda.gdc_wait()
    for tile in range(tiles):
        first = (tile * programs + i_p) * step
        m_v = (o_v < step) & (first + o_v < vocabulary)
        o_w = (first + o_v).to(tl.int64)
        if GATHER:
            # [BLOCK_V]
            o_w = tl.load(token_map + o_w, mask=m_v, other=0)
        # [BLOCK_M, BLOCK_V]
        b_x = quantised_product(
            p_a, m_m, p_group + o_w * (stride_w2_v * UNIT), m_v, scale + i_g * stride_scale_g,
            zero + i_g * stride_scale_g, o_w, size,
            BLOCK_M, BLOCK_V, BLOCK_K, EVEN, DECODE, HAS_SCALE, HAS_ZERO, GROUP,
        )  # fmt: skip
        m_x = m_m[:, None] & m_v[None, :]
        if SOFTCAP is not None:
            b_x = tanh(b_x * (1.0 / SOFTCAP)) * SOFTCAP
        b_x *= inverse_temperature
        if HAS_NOISE:
            o_id = (first + o_v).to(tl.int64)
            if HAS_MAP:
                # [BLOCK_V]
                o_id = tl.load(token_map + o_id, mask=m_v, other=0)
            # [BLOCK_M, BLOCK_V]
            b_x += tl.load(
                p_noise[:, None] + o_id[None, :], mask=m_x & ((o_id >= 0) & (o_id < ids))[None, :], other=0.0
            )
        b_topk = merge_topk_of_tile(b_topk, tl.where(m_x, ordered(b_x), NO_ORDER), first)
        b_x = tl.where(m_v[None, :], b_x, -float("inf"))
        b_high = tl.maximum(b_peak, tl.max(b_x, 1))
        b_sum = b_sum * tl.exp(b_peak - b_high) + tl.sum(tl.exp(b_x - b_high[:, None]), 1)
        b_peak = b_high
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    o_part = o_state * programs + i_p
    tl.store(peaks + o_part, b_peak, mask=m_m)
    tl.store(sums + o_part, b_sum, mask=m_m)
    o_place = tl.arange(0, PLACES)
    tl.store(keys + o_part[:, None] * K + o_place[None, :], b_topk, mask=m_m[:, None] & (o_place < K)[None, :])


@triton.jit(do_not_specialize=["programs"])
def merge_kernel(
    keys, peaks, sums, token_map, logprobs, tokens, programs,
    HAS_MAP: tl.constexpr, K: tl.constexpr, PLACES: tl.constexpr, PDL: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Merge the shares of one row: log-probability x - (m + log sum exp(x - m)) and token of its top K, best first.

    keys [rows, P, K], peaks and sums [rows, P] as `vocabulary_kernel` stores them; logprobs and tokens are [rows, K].
    token_map [V] gives the token of each index. All arithmetic is fp32.
    """
    i_row = tl.program_id(0).to(tl.int64)
    o_p = tl.arange(0, BLOCK_P)
    if PDL:
        tl.extra.cuda.gdc_wait()
    # [BLOCK_P]
    b_peaks = tl.load(peaks + i_row * programs + o_p, mask=o_p < programs, other=-float("inf"))
    b_sums = tl.load(sums + i_row * programs + o_p, mask=o_p < programs, other=0.0)
    b_peak = tl.max(b_peaks, 0)
    b_logsumexp = b_peak + tl.log(tl.sum(b_sums * tl.exp(b_peaks - b_peak), 0))
    b_topk = empty_topk(1, K, PLACES)
    count = programs * K
    for first in range(0, count, BLOCK_N):
        o_n = first + tl.arange(0, BLOCK_N)
        # [BLOCK_N]
        b_keys = tl.load(keys + i_row * count + o_n, mask=o_n < count, other=NO_KEY)
        b_topk = merge_topk(b_topk, b_keys[None, :])
    b_topk = tl.reshape(b_topk, (PLACES,))
    o_place = tl.arange(0, PLACES)
    m_place = o_place < K
    # The place of a key in the result is the number of greater keys.
    m_greater = m_place[None, :] & (b_topk[None, :] > b_topk[:, None])
    b_rank = tl.sum(m_greater.to(tl.int32), 1)
    b_token = index_of(b_topk)
    if HAS_MAP:
        # [PLACES]
        b_token = tl.load(token_map + b_token, mask=m_place, other=0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(logprobs + i_row * K + b_rank, number_of(b_topk) - b_logsumexp, mask=m_place)
    tl.store(tokens + i_row * K + b_rank, b_token, mask=m_place)


def in_half_precision(dtype: torch.dtype, stored: torch.dtype) -> bool:
    """Return whether states of this dtype are multiplied by weights of dtype `stored` in fp16, not in their own."""
    return HALF_PRECISION_BYTES and stored.itemsize == 1 and dtype.itemsize == 2


def decoding(device: Device, dtype: torch.dtype, stored: torch.dtype, codes: str = "int4") -> str:
    """Return how weights are converted, see `quantised_product`; `dtype` is that of the states."""
    chosen = decoding_of(device, dtype, stored, codes)
    return chosen if HALF_PRECISION_BYTES or chosen != "int8" else ""


def merge_blocks(programs: int, k: int) -> dict[str, int]:
    """Choose the tiles of the merge."""
    return {
        "BLOCK_P": max(256, triton.next_power_of_2(programs)),
        "BLOCK_N": 1024 if programs * k <= 1024 else 2048,
    }


def rows_first(tensor: Tensor) -> Tensor:
    """Return the tensor with a contiguous last axis, copied only if needed."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def heads_topk(
    hidden, w1, b1, w2, k,
    *, w2_scale=None, token_map=None, gather=False, root=None, w_root=None, temperature=1.0, noise=None,
    w2_zero=None, codes="int4", divisor=1.0, softcap=None,
):  # fmt: skip
    """Launch the kernels; see the public `heads_topk`."""
    w2, w2_scale, w2_zero = readable(w2, w2_scale, w2_zero, codes, hidden.dtype)
    with on_device(hidden):
        states = hidden if root is None else _states(root, hidden, w_root, None, hidden.dtype, activate=False)
        *before, (weight, bias) = residual_blocks(w1, b1)
        for inner in before:
            states = _states(states, states, *inner, hidden.dtype)
        last = torch.float16 if in_half_precision(hidden.dtype, w2.dtype) else hidden.dtype
        states = _states(states, states, weight, bias, last)
        # softcap tanh(x / divisor / softcap) / temperature is a cap of divisor softcap, divided at the end.
        scaled = temperature * divisor, noise, None if softcap is None else divisor * softcap
        return _top_k(states, rows_first(w2), k, w2_scale, w2_zero, codes, token_map, gather, *scaled)


def _states(
    x: Tensor, hidden: Tensor, w1: Tensor, b1: Tensor | None, dtype: torch.dtype, *, activate: bool = True
) -> Tensor:
    """Return `[B, K, H]` in `dtype`, hidden plus SiLU(W1 x + b1), or without the activation, of every head."""
    x, hidden, w1 = rows_first(x), rows_first(hidden), rows_first(w1)
    batch, (heads, size, columns) = hidden.shape[0], w1.shape
    strides = [tensor.stride()[i] if tensor.dim() > i + 1 else 0 for tensor in (x, hidden) for i in (0, 1)]
    strides += w1.stride()[:2]
    elements = unit(size, columns, *strides)
    vectors = wide(elements, hidden.dtype)
    device = describe(hidden.device)
    config = configuration(device, hidden.dtype, w1.dtype, batch, "residual", vectors=vectors)
    tiles = triton.cdiv(batch, config.block_m)
    share = shares(size, device.multiprocessors * config.programs // (heads * tiles), config.block_v)
    bias = hidden if b1 is None else rows_first(b1)
    states = hidden.new_empty(batch, heads, size, dtype=dtype)
    pdl = launch.programmatic(hidden.device)
    residual_kernel[tiles, share.programs, heads](
        x, hidden, w1, bias, states,
        batch, heads, size // elements, columns // elements, *(stride // elements for stride in strides),
        bias.stride(0), share.tiles, share.step,
        UNIT=elements, EVEN=columns % config.block_k == 0, HAS_BIAS=b1 is not None, ACTIVATE=activate,
        PDL=pdl, **config.blocks(), **launch.options(config, pdl, OPTIONS),
    )  # fmt: skip
    return states


def _top_k(
    states: Tensor, w2: Tensor, k: int, scale: Tensor | None, zero: Tensor | None, codes: str,
    token_map: Tensor | None, gather: bool, temperature: float, noise: Tensor | None, softcap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the top k log-probabilities and tokens of every state, `[B, K, k]`."""
    batch, heads, _ = states.shape
    states, size, stored = halves(states, w2), w2.shape[-1], constants(w2, scale, zero)
    groups = heads if w2.dim() == 3 else 1
    rows = batch * heads // groups
    device = describe(states.device)
    vocabulary = w2.shape[-2] if token_map is None else token_map.shape[0]
    stride_w2_g = w2.stride(0) if w2.dim() == 3 else 0
    elements = unit(size, stride_w2_g, w2.stride(-2))
    vectors = wide(elements, states.dtype, w2.dtype)
    config = configuration(
        device, states.dtype, w2.dtype, rows, "vocabulary",
        vectors=vectors, noise=noise is not None, group=stored["GROUP"],
    )  # fmt: skip
    tiles = triton.cdiv(rows, config.block_m)
    share = shares(vocabulary, device.multiprocessors * config.programs // (groups * tiles), config.block_v)
    config = narrowed(config, share)
    keys = states.new_empty(batch * heads, share.programs, k, dtype=torch.int64)
    peaks, sums = states.new_empty(2, batch * heads, share.programs, dtype=torch.float32).unbind()
    scale = None if scale is None else scale.contiguous()
    ids = keys if token_map is None else token_map.contiguous()
    noise = None if noise is None else rows_first(noise)
    places, pdl = triton.next_power_of_2(k), launch.programmatic(states.device)
    vocabulary_kernel[tiles, share.programs, groups](
        states, w2.view(torch.uint8) if decodes_bytes(device, w2.dtype) else w2, peaks if scale is None else scale,
        peaks if zero is None else zero, ids, peaks if noise is None else noise, keys, peaks, sums,
        rows, groups, heads, vocabulary, 0 if noise is None else noise.shape[-1], size // elements,
        stride_w2_g // elements, w2.stride(-2) // elements,
        scale.stride(0) if scale is not None and groups > 1 else 0, *((0, 0) if noise is None else noise.stride()[:2]),
        share.tiles, share.step, 1 / temperature,
        UNIT=elements, EVEN=size % config.block_k == 0, DECODE=decoding(device, states.dtype, w2.dtype, codes),
        **stored, GATHER=gather, HAS_MAP=token_map is not None,
        HAS_NOISE=noise is not None, K=k, PLACES=places, SOFTCAP=softcap,
        # The rows to gather are known only from the map, which the kernel before may have written.
        PDL=pdl, **config.blocks(), **launch.options(config, pdl, OPTIONS),
    )  # fmt: skip
    logprobs = states.new_empty(batch, heads, k, dtype=torch.float32)
    tokens = keys.new_empty(batch, heads, k)
    merge_kernel[(batch * heads,)](
        keys, peaks, sums, ids, logprobs, tokens, share.programs,
        HAS_MAP=token_map is not None, K=k, PLACES=places, PDL=pdl,
        **merge_blocks(share.programs, k), **launch.options(MERGE, pdl, OPTIONS),
    )  # fmt: skip
    return logprobs, tokens
