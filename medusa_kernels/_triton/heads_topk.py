"""heads_topk as three Triton kernels: residual blocks, vocabulary projections with top-k, merge.

The first two stream the weights once past all rows that use them; the second keeps, for each row and program, the best
k tokens and the sum of exponentials over the program's share of the vocabulary; the third merges them in a fixed order.
Between the kernels lie the heads' states and the partial results, never logits.

Best tokens are kept as int64 keys (see `streaming.packed`), which are all different and whose order is that of the
logits, so that one comparison is enough and equal logits go to the lowest index.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from medusa_kernels._registry import interpreted
from medusa_kernels._triton.best import NO_KEY, NO_ORDER, keep_best, keep_best_of_tile, no_keys
from medusa_kernels._triton.launch import (
    TRITON_TYPES,
    Device,
    Specialisation,
    describe,
    on_device,
)
from medusa_kernels._triton.streaming import (
    OPTIONS,
    Config,
    index_of,
    interpreted_config,
    number_of,
    ordered,
    product,
    shares,
    unit,
    wide,
)


@triton.jit(do_not_specialize=["batch", "tiles", "step"])
def residual_kernel(
    hidden, w1, b1, states,
    batch, heads, size, stride_h_b, stride_h_k, stride_w_k, stride_w_r, stride_b_k, tiles, step,
    UNIT: tl.constexpr, EVEN: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Store `h + SiLU(W1 h + b1)`, rounded once, for one program's share of one head's rows of W1."""
    i_m, i_p, i_k = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    programs = tl.num_programs(1)
    size = size * UNIT
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_v = tl.arange(0, BLOCK_V)
    m_m = o_m < batch
    p_a = hidden + i_k * (stride_h_k * UNIT) + o_m.to(tl.int64) * (stride_h_b * UNIT)
    for tile in range(tiles):
        first = (tile * programs + i_p) * step
        o_r = first + o_v
        m_r = (o_v < step) & (o_r < size)
        p_w = w1 + i_k * (stride_w_k * UNIT) + o_r.to(tl.int64) * (stride_w_r * UNIT)
        # [BLOCK_M, BLOCK_V]
        b_inner = product(p_a, m_m, p_w, m_r, size, BLOCK_M, BLOCK_V, BLOCK_K, EVEN, False)
        if HAS_BIAS:
            b_inner += tl.load(b1 + i_k * stride_b_k + o_r, mask=m_r, other=0.0).to(tl.float32)[None, :]
        m_state = m_m[:, None] & m_r[None, :]
        b_state = tl.load(p_a[:, None] + o_r[None, :], mask=m_state, other=0.0).to(tl.float32)
        b_state += b_inner * tl.sigmoid(b_inner)
        p_state = states + (o_m.to(tl.int64)[:, None] * heads + i_k) * size + o_r[None, :]
        tl.store(p_state, b_state.to(states.dtype.element_ty), mask=m_state)


@triton.jit(do_not_specialize=["rows", "tiles", "step"])
def vocabulary_kernel(
    states, w2, scale, token_map, keys, peaks, sums,
    rows, groups, vocabulary, size, stride_w_g, stride_w_v, stride_s_g, tiles, step,
    UNIT: tl.constexpr, EVEN: tl.constexpr, E4M3: tl.constexpr, HAS_SCALE: tl.constexpr, GATHER: tl.constexpr,
    K: tl.constexpr, PLACES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Reduce one program's share of one projection to the best K keys, the largest logit and the sum of exponentials.

    A projection of its own for each head: the groups are the heads, the rows the batch. A shared one: one group, whose
    rows are all states. Either way row r of group g is state r * groups + g.
    """
    i_m, i_p, i_g = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    programs = tl.num_programs(1)
    size = size * UNIT
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_v = tl.arange(0, BLOCK_V)
    m_m = o_m < rows
    o_state = o_m.to(tl.int64) * groups + i_g
    p_a = states + o_state * size
    b_best = no_keys(BLOCK_M, K, PLACES)
    b_peak = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_M,), tl.float32)
    for tile in range(tiles):
        first = (tile * programs + i_p) * step
        m_v = (o_v < step) & (first + o_v < vocabulary)
        o_w = (first + o_v).to(tl.int64)
        if GATHER:
            o_w = tl.load(token_map + o_w, mask=m_v, other=0)
        p_w = w2 + i_g * (stride_w_g * UNIT) + o_w * (stride_w_v * UNIT)
        # [BLOCK_M, BLOCK_V]
        b_x = product(p_a, m_m, p_w, m_v, size, BLOCK_M, BLOCK_V, BLOCK_K, EVEN, E4M3)
        if HAS_SCALE:
            b_scale = tl.load(scale + i_g * stride_s_g + o_w, mask=m_v, other=0.0)
            b_x *= (b_scale * 256.0 if E4M3 else b_scale)[None, :]
        m_x = m_m[:, None] & m_v[None, :]
        b_best = keep_best_of_tile(b_best, tl.where(m_x, ordered(b_x), NO_ORDER), first)
        b_x = tl.where(m_v[None, :], b_x, -float("inf"))
        b_high = tl.maximum(b_peak, tl.max(b_x, 1))
        b_sum = b_sum * tl.exp(b_peak - b_high) + tl.sum(tl.exp(b_x - b_high[:, None]), 1)
        b_peak = b_high
    o_part = o_state * programs + i_p
    tl.store(peaks + o_part, b_peak, mask=m_m)
    tl.store(sums + o_part, b_sum, mask=m_m)
    o_place = tl.arange(0, PLACES)
    tl.store(keys + o_part[:, None] * K + o_place[None, :], b_best, mask=m_m[:, None] & (o_place < K)[None, :])


@triton.jit(do_not_specialize=["programs"])
def merge_kernel(
    keys, peaks, sums, token_map, logprobs, tokens, programs,
    HAS_MAP: tl.constexpr, K: tl.constexpr, PLACES: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Merge the programs' shares for one row, and order its best tokens."""
    i_row = tl.program_id(0).to(tl.int64)
    o_p = tl.arange(0, BLOCK_P)
    b_peaks = tl.load(peaks + i_row * programs + o_p, mask=o_p < programs, other=-float("inf"))
    b_sums = tl.load(sums + i_row * programs + o_p, mask=o_p < programs, other=0.0)
    b_peak = tl.max(b_peaks, 0)
    b_logsumexp = b_peak + tl.log(tl.sum(b_sums * tl.exp(b_peaks - b_peak), 0))
    b_best = no_keys(1, K, PLACES)
    count = programs * K
    for first in range(0, count, BLOCK_N):
        o_n = first + tl.arange(0, BLOCK_N)
        b_keys = tl.load(keys + i_row * count + o_n, mask=o_n < count, other=NO_KEY)
        b_best = keep_best(b_best, b_keys[None, :])
    b_best = tl.reshape(b_best, (PLACES,))
    o_place = tl.arange(0, PLACES)
    m_place = o_place < K
    # A key's place in the answer is the number of greater ones.
    m_greater = m_place[None, :] & (b_best[None, :] > b_best[:, None])
    b_rank = tl.sum(m_greater.to(tl.int32), 1)
    b_token = index_of(b_best)
    if HAS_MAP:
        b_token = tl.load(token_map + b_token, mask=m_place, other=0)
    tl.store(logprobs + i_row * K + b_rank, number_of(b_best) - b_logsumexp, mask=m_place)
    tl.store(tokens + i_row * K + b_rank, b_token, mask=m_place)


def block_m(rows: int) -> int:
    """Return how many rows share a tile."""
    return min(64, max(16, triton.next_power_of_2(rows)))


def configuration(
    device: Device, dtype: torch.dtype, stored: torch.dtype, rows: int, stage: str, *, vectors: bool = True
) -> Config:
    """Choose how weights are streamed.

    Args:
        device: where it runs.
        dtype: of the states.
        stored: of the weights.
        rows: states that use the same weights.
        stage: "residual" or "vocabulary".
        vectors: whether 16 bytes can be loaded at once (see `streaming.wide`).
    """
    if interpreted():
        return interpreted_config(rows)
    m = block_m(rows)
    if dtype == torch.float32 or not vectors:
        # In fp32 a chain of multiply-adds is as long as a block, see `dot_accumulate`.
        return Config(16, 32, 16 if dtype == torch.float32 else 32, 4, 4, 2)
    # On 10.0 the residual block of 64 rows spills with 64 weight rows.
    if not device.roomy or (device.capability[0] == 10 and stage == "residual" and m == 64):
        return Config(m, 32, 64, 4, 4, 3)
    if device.hopper and stage == "vocabulary" and m == 16:
        # Best on an H200 for own, shared and gathered rows.
        return Config(m, 128, 128 if stored.itemsize == 1 else 64, 4, 5, 2)
    block_k = 128 if m == 16 or (m == 32 and stage == "vocabulary") else 64
    return Config(m, 64, block_k * 2 if stored.itemsize == 1 and m == 16 else block_k, 4, 4, 2)


def candidates(device: Device, dtype: torch.dtype, stored: torch.dtype, rows: int, stage: str) -> list[Config]:
    """List configurations worth timing against the chosen one."""
    chosen = configuration(device, dtype, stored, rows, stage)
    if dtype == torch.float32 or not device.hopper:
        return [chosen]
    if stored.itemsize == 1:
        shapes = [
            (64, 256, 4, 3, 2), (64, 256, 4, 5, 2), (64, 128, 4, 6, 2), (64, 128, 4, 8, 2),
            (32, 256, 4, 5, 2), (128, 128, 4, 5, 2), (128, 256, 8, 5, 1), (64, 512, 8, 4, 1), (64, 256, 4, 4, 8),
            (32, 256, 4, 5, 12), (128, 128, 4, 4, 8),
        ]  # fmt: skip
    else:
        shapes = [
            (64, 128, 4, 3, 2), (64, 128, 4, 5, 2), (64, 128, 4, 6, 2), (64, 64, 4, 6, 3), (64, 256, 4, 3, 2),
            (32, 128, 4, 5, 3), (32, 256, 4, 4, 2), (128, 64, 4, 5, 2), (128, 128, 8, 5, 1), (64, 256, 8, 5, 1),
            (64, 128, 4, 4, 8), (64, 64, 4, 6, 12), (32, 128, 4, 5, 12),
        ]  # fmt: skip
    configs = (Config(chosen.block_m, *shape) for shape in shapes)
    return [chosen, *(config for config in configs if config != chosen)]


def specialisations(device: Device) -> Iterator[Specialisation]:
    """List the compiled forms: each tile of rows in bf16, and what else changes the code at one of them."""
    fp16, bf16, fp32 = torch.float16, torch.bfloat16, torch.float32
    for rows in (1, 32, 64):
        yield _residual(device, bf16, rows)
        yield _vocabulary(device, bf16, bf16, rows)
    for elements in (8, 1):
        yield _residual(device, bf16, 1, elements=elements)
        yield _vocabulary(device, bf16, bf16, 1, elements=elements)
    yield _residual(device, fp16, 1)
    yield _residual(device, fp32, 1)
    yield _vocabulary(device, bf16, bf16, 1, k=32)
    yield _vocabulary(device, bf16, bf16, 1, gather=True)
    for dtype in (fp16, bf16, fp32):
        yield _vocabulary(device, dtype, torch.int8, 1)
        yield _vocabulary(device, dtype, torch.float8_e4m3fn, 1)
    yield _vocabulary(device, bf16, torch.int8, 32, gather=True)
    yield _vocabulary(device, fp16, fp16, 1)
    yield _vocabulary(device, fp32, fp32, 1)
    for programs, k in ((66, 10), (264, 10), (264, 32)):
        yield _merge(programs, k)


def _residual(device: Device, dtype: torch.dtype, rows: int, *, elements: int = 16) -> Specialisation:
    config = configuration(device, dtype, dtype, rows, "residual", vectors=wide(elements, dtype))
    integers = ("batch", "heads", "size", "stride_h_b", "stride_h_k", "stride_w_k", "stride_w_r", "stride_b_k")
    return Specialisation(
        name=f"heads_topk residual {TRITON_TYPES[dtype]} {config.block_m}x{config.block_v}x{config.block_k}"
        + (f" unit{elements} masked" if elements < 16 else ""),
        kernel=residual_kernel,
        signature=dict.fromkeys(("hidden", "w1", "b1", "states"), "*" + TRITON_TYPES[dtype])
        | dict.fromkeys((*integers, "tiles", "step"), "i32"),
        constants={"UNIT": elements, "EVEN": elements == 16, "HAS_BIAS": True, "BLOCK_M": config.block_m,
                   "BLOCK_V": config.block_v, "BLOCK_K": config.block_k},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip


def _vocabulary(
    device: Device, dtype: torch.dtype, stored: torch.dtype, rows: int,
    *, k: int = 10, gather: bool = False, elements: int = 16,
) -> Specialisation:  # fmt: skip
    config = configuration(device, dtype, stored, rows, "vocabulary", vectors=wide(elements, dtype, stored))
    as_bytes = decodes_bytes(device, stored)
    integers = ("rows", "groups", "vocabulary", "size", "stride_w_g", "stride_w_v", "stride_s_g", "tiles", "step")
    return Specialisation(
        name=f"heads_topk vocabulary {TRITON_TYPES[dtype]} x {TRITON_TYPES[stored]} k{k} "
        f"{config.block_m}x{config.block_v}x{config.block_k}" + " gather" * gather
        + (f" unit{elements} masked" if elements < 16 else ""),
        kernel=vocabulary_kernel,
        signature={"states": "*" + TRITON_TYPES[dtype], "w2": "*u8" if as_bytes else "*" + TRITON_TYPES[stored]}
        | {"scale": "*fp32", "token_map": "*i64", "keys": "*i64", "peaks": "*fp32", "sums": "*fp32"}
        | dict.fromkeys(integers, "i32"),
        constants={"UNIT": elements, "EVEN": elements == 16, "E4M3": as_bytes, "HAS_SCALE": stored.itemsize == 1,
                   "GATHER": gather, "K": k, "PLACES": triton.next_power_of_2(k), "BLOCK_M": config.block_m,
                   "BLOCK_V": config.block_v, "BLOCK_K": config.block_k},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )  # fmt: skip


def _merge(programs: int, k: int) -> Specialisation:
    blocks = merge_blocks(programs, k)
    return Specialisation(
        name=f"heads_topk merge k{k} {blocks['BLOCK_N']}",
        kernel=merge_kernel,
        signature={"keys": "*i64", "peaks": "*fp32", "sums": "*fp32", "token_map": "*i64", "logprobs": "*fp32"}
        | {"tokens": "*i64", "programs": "i32"},
        constants={"HAS_MAP": True, "K": k, "PLACES": triton.next_power_of_2(k), **blocks},
        num_warps=4,
        num_stages=3,
    )


def decodes_bytes(device: Device, stored: torch.dtype) -> bool:
    """Return whether float8_e4m3fn weights are read as bytes: where Triton cannot convert them."""
    return stored == torch.float8_e4m3fn and (interpreted() or device.capability < (8, 9))


def merge_blocks(programs: int, k: int) -> dict[str, int]:
    """Choose the merge's tiles."""
    return {
        "BLOCK_P": max(256, triton.next_power_of_2(programs)),
        "BLOCK_N": 1024 if programs * k <= 1024 else 2048,
    }


def rows_first(tensor: Tensor) -> Tensor:
    """Return the tensor with its last axis contiguous, copied only if it is not."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def heads_topk(
    hidden: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    k: int,
    *,
    w2_scale: Tensor | None = None,
    token_map: Tensor | None = None,
    gather: bool = False,
) -> tuple[Tensor, Tensor]:
    """Launch the three kernels; see the public `heads_topk`."""
    with on_device(hidden):
        return _top_k(_states(hidden, w1, b1), rows_first(w2), k, w2_scale, token_map, gather)


def _states(hidden: Tensor, w1: Tensor, b1: Tensor | None) -> Tensor:
    """Return `[B, K, H]`, every head's state."""
    hidden, w1 = rows_first(hidden), rows_first(w1)
    batch, (heads, size, _) = hidden.shape[0], w1.shape
    stride_h_k = hidden.stride(1) if hidden.dim() == 3 else 0
    elements = unit(size, hidden.stride(0), stride_h_k, w1.stride(0), w1.stride(1))
    vectors = wide(elements, hidden.dtype)
    device = describe(hidden.device)
    config = configuration(device, hidden.dtype, w1.dtype, batch, "residual", vectors=vectors)
    tiles = triton.cdiv(batch, config.block_m)
    share = shares(size, device.multiprocessors * config.programs // (heads * tiles), config.block_v)
    bias = hidden if b1 is None else rows_first(b1)
    states = hidden.new_empty(batch, heads, size)
    residual_kernel[tiles, share.programs, heads](
        hidden, w1, bias, states,
        batch, heads, size // elements, hidden.stride(0) // elements, stride_h_k // elements,
        w1.stride(0) // elements, w1.stride(1) // elements, bias.stride(0), share.tiles, share.step,
        UNIT=elements, EVEN=size % config.block_k == 0, HAS_BIAS=b1 is not None,
        BLOCK_M=config.block_m, BLOCK_V=config.block_v, BLOCK_K=config.block_k,
        num_warps=config.num_warps, num_stages=config.num_stages, **OPTIONS,
    )  # fmt: skip
    return states


def _top_k(
    states: Tensor, w2: Tensor, k: int, scale: Tensor | None, token_map: Tensor | None, gather: bool
) -> tuple[Tensor, Tensor]:
    """Return the best k log-probabilities and tokens of every state, `[B, K, k]`."""
    batch, heads, size = states.shape
    groups = heads if w2.dim() == 3 else 1
    rows = batch * heads // groups
    device = describe(states.device)
    vocabulary = w2.shape[-2] if token_map is None else token_map.shape[0]
    stride_w_g = w2.stride(0) if w2.dim() == 3 else 0
    elements = unit(size, stride_w_g, w2.stride(-2))
    vectors = wide(elements, states.dtype, w2.dtype)
    config = configuration(device, states.dtype, w2.dtype, rows, "vocabulary", vectors=vectors)
    tiles = triton.cdiv(rows, config.block_m)
    share = shares(vocabulary, device.multiprocessors * config.programs // (groups * tiles), config.block_v)
    as_bytes = decodes_bytes(device, w2.dtype)
    keys = states.new_empty(batch * heads, share.programs, k, dtype=torch.int64)
    peaks, sums = states.new_empty(2, batch * heads, share.programs, dtype=torch.float32).unbind()
    scale = None if scale is None else scale.contiguous()
    ids = keys if token_map is None else token_map.contiguous()
    places = triton.next_power_of_2(k)
    vocabulary_kernel[tiles, share.programs, groups](
        states, w2.view(torch.uint8) if as_bytes else w2, peaks if scale is None else scale, ids, keys, peaks, sums,
        rows, groups, vocabulary, size // elements, stride_w_g // elements, w2.stride(-2) // elements,
        scale.stride(0) if scale is not None and groups > 1 else 0, share.tiles, share.step,
        UNIT=elements, EVEN=size % config.block_k == 0, E4M3=as_bytes,
        HAS_SCALE=scale is not None, GATHER=gather, K=k, PLACES=places,
        BLOCK_M=config.block_m, BLOCK_V=config.block_v, BLOCK_K=config.block_k,
        num_warps=config.num_warps, num_stages=config.num_stages, **OPTIONS,
    )  # fmt: skip
    logprobs = states.new_empty(batch, heads, k, dtype=torch.float32)
    tokens = keys.new_empty(batch, heads, k)
    merge_kernel[(batch * heads,)](
        keys, peaks, sums, ids, logprobs, tokens, share.programs,
        HAS_MAP=token_map is not None, K=k, PLACES=places, **merge_blocks(share.programs, k), num_warps=4, **OPTIONS,
    )  # fmt: skip
    return logprobs, tokens
