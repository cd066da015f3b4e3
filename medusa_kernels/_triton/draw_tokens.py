"""`draw_tokens` as one Triton launch: a program finds the edge of its node's nucleus by bisection, then draws.

A row is read again at each halving, some 15 times, instead of sorted at each node of the path. A vocabulary is not
divided among programs: their sums would have another order, and the tokens at the edge of a nucleus would depend on the
number of programs.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from medusa_kernels._registry import interpreted
from medusa_kernels._triton import launch

WARPS = launch.Warps(num_warps=8, num_stages=1)


def configuration(aligned: bool) -> dict[str, int]:
    """Return the size of a tile, BLOCK_R times BLOCK_V tokens; `aligned`: sizes and strides are multiples of 16.

    Every thread has all rows of its columns: they keep its loads in flight, and it sums over them in registers. With
    loads of single elements, eight rows take more registers than there are.
    """
    return {"BLOCK_R": 8 if aligned else 2, "BLOCK_V": 2048}


@triton.jit
def _tile(logits, first, vocabulary, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr):
    """Return logits from token `first` on in fp32, NaN after the last token, and the ids: both [BLOCK_R, BLOCK_V]."""
    o_v = first + tl.arange(0, BLOCK_R)[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    # [BLOCK_R, BLOCK_V]
    b_x = tl.load(logits + o_v, mask=o_v < vocabulary, other=float("nan"))
    return b_x.to(tl.float32), o_v


@triton.jit
def _edge(
    logits, vocabulary, low, high, floor, limit, peak, factor,
    COUNT: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Return the lowest logit t for which the tokens with floor <= x <= t weigh more than `limit`.

    A token weighs 1 if COUNT, else 2^((x - peak) factor), in fp32. t is `high` if it is not below; low <= t <= high.
    Halved are logits, and both ends move on to the next logit that there is: some dozens of halvings at most.
    """
    while (low < high) & (high < float("inf")):
        middle = 0.5 * low + 0.5 * high
        middle = tl.where((middle >= low) & (middle < high), middle, low)
        b_weight = tl.zeros((BLOCK_V,), tl.float32)
        b_below = tl.full((BLOCK_V,), -float("inf"), tl.float32)
        b_above = tl.full((BLOCK_V,), float("inf"), tl.float32)
        for first in range(0, vocabulary, BLOCK_R * BLOCK_V):
            b_x, o_v = _tile(logits, first, vocabulary, BLOCK_R, BLOCK_V)
            m_below = b_x <= middle
            b_own = tl.full((BLOCK_R, BLOCK_V), 1.0, tl.float32) if COUNT else tl.exp2((b_x - peak) * factor)
            b_weight += tl.sum(tl.where(m_below & (b_x >= floor), b_own, 0.0), 0)
            b_below = tl.maximum(b_below, tl.max(tl.where(m_below, b_x, -float("inf")), 0))
            b_above = tl.minimum(b_above, tl.min(tl.where(b_x > middle, b_x, float("inf")), 0))
        enough = tl.sum(b_weight, 0) > limit
        high = tl.where(enough, tl.max(b_below, 0), high)
        low = tl.where(enough, low, tl.min(b_above, 0))
    return high


@triton.jit(do_not_specialize=["nodes", "noises", "stride_noise_rows_b", "top_k"])
def _draw_tokens_kernel(
    logits, noise, noise_rows, tokens, best,
    vocabulary, nodes, noises, stride_logits_b, stride_logits_n, stride_noise_rows_b,
    temperature, factor, top_k, tail, min_p,
    TOP_K: tl.constexpr, TOP_P: tl.constexpr, MIN_P: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Draw the argmax of x / temperature + noise among the kept tokens of one node.

    x are its logits [V] of logits [B, N, V], and m is their largest. Weights are 2^((x - m) factor), proportional to
    probabilities at the temperature. Kept are x >= t, where t is found by `_edge`; of the tokens with x = t all but the
    first whose weights fit in what is left of `tail` times the sum; and of these the weights of min_p or more. Sums are
    fp32, each thread's in the order of ids, then across threads. The results are tokens and best [B, N].
    """
    i_row = tl.program_id(0)
    i_b, i_n = (i_row // nodes).to(tl.int64), (i_row % nodes).to(tl.int64)
    logits += i_b * stride_logits_b + i_n * stride_logits_n
    b_peak = tl.full((BLOCK_V,), -float("inf"), tl.float32)
    for first in range(0, vocabulary, BLOCK_R * BLOCK_V):
        b_x, o_v = _tile(logits, first, vocabulary, BLOCK_R, BLOCK_V)
        b_peak = tl.maximum(b_peak, tl.max(tl.where(b_x == b_x, b_x, -float("inf")), 0))
    peak = tl.max(b_peak, 0)
    edge = tl.full((), -float("inf"), tl.float32)
    gone = tl.zeros((), tl.float32)
    if TOP_K:
        edge = _edge(logits, vocabulary, edge, peak, edge, vocabulary - top_k, peak, factor, True, BLOCK_R, BLOCK_V)
    if TOP_P:
        b_sum = tl.zeros((BLOCK_V,), tl.float32)
        for first in range(0, vocabulary, BLOCK_R * BLOCK_V):
            b_x, o_v = _tile(logits, first, vocabulary, BLOCK_R, BLOCK_V)
            b_sum += tl.sum(tl.where(b_x >= edge, tl.exp2((b_x - peak) * factor), 0.0), 0)
        limit = tail * tl.sum(b_sum, 0)
        floor = edge
        edge = _edge(logits, vocabulary, floor, peak, floor, limit, peak, factor, False, BLOCK_R, BLOCK_V)
        b_sum = tl.zeros((BLOCK_V,), tl.float32)
        b_ties = tl.zeros((BLOCK_V,), tl.float32)
        for first in range(0, vocabulary, BLOCK_R * BLOCK_V):
            b_x, o_v = _tile(logits, first, vocabulary, BLOCK_R, BLOCK_V)
            m_below = (b_x >= floor) & (b_x < edge)
            b_sum += tl.sum(tl.where(m_below, tl.exp2((b_x - peak) * factor), 0.0), 0)
            b_ties += tl.sum(tl.where(b_x == edge, 1.0, 0.0), 0)
        room = tl.math.div_rn(limit - tl.sum(b_sum, 0), tl.exp2((edge - peak) * factor))
        gone = tl.maximum(tl.minimum(tl.floor(room), tl.sum(b_ties, 0) - 1.0), 0.0)
    row = tl.load(noise_rows + i_b * stride_noise_rows_b + i_n)
    # A kernel cannot refuse values: a row out of range counts as zeros, and nothing outside of the noise is read.
    readable = tl.where((row >= 0) & (row < noises), vocabulary, 0)
    noise += (i_b * noises + row) * vocabulary
    HALF_R: tl.constexpr = (BLOCK_R + 1) // 2  # scores, noise and ids need registers too
    b_best = tl.full((BLOCK_V,), -float("inf"), tl.float32)
    b_token = tl.full((BLOCK_V,), vocabulary - 1, tl.int32)
    seen = tl.zeros((), tl.float32)
    for first in range(0, vocabulary, HALF_R * BLOCK_V):
        b_x, o_v = _tile(logits, first, vocabulary, HALF_R, BLOCK_V)
        m_kept = b_x >= edge
        if gone > seen:
            # Tokens in the order of their ids: rows of the tile, then columns.
            b_tie = tl.where(b_x == edge, 1.0, 0.0)
            b_in_row = tl.sum(b_tie, 1)
            b_rank = (tl.cumsum(b_in_row, 0) - b_in_row)[:, None] + tl.cumsum(b_tie, 1)
            m_kept = m_kept & ((b_x > edge) | (seen + b_rank > gone))
            seen += tl.sum(b_in_row, 0)
        if MIN_P:
            m_kept = m_kept & (tl.exp2((b_x - peak) * factor) >= min_p)
        # [HALF_R, BLOCK_V]
        b_noise = tl.load(noise + o_v, mask=m_kept & (o_v < readable), other=0.0)
        b_score = tl.where(m_kept, tl.math.div_rn(b_x, tl.zeros_like(b_x) + temperature) + b_noise, -float("inf"))
        b_top = tl.max(b_score, 0)
        b_id = tl.min(tl.where(b_score == b_top[None, :], o_v, vocabulary - 1), 0)
        b_token = tl.where(b_top > b_best, b_id, b_token)
        b_best = tl.maximum(b_best, b_top)
    top = tl.max(b_best, 0)
    tl.store(best + i_row, top)
    tl.store(tokens + i_row, tl.min(tl.where(b_best == top, b_token, vocabulary - 1), 0).to(tl.int64))


def draw_tokens(logits, noise, noise_rows=None, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Launch the kernel; see the public `draw_tokens`."""
    batch, nodes, vocabulary = logits.shape
    logits = logits if logits.stride(2) == 1 else logits.contiguous()
    noise = noise.contiguous()
    noise_rows = torch.arange(nodes, device=logits.device, dtype=torch.int32) if noise_rows is None else noise_rows
    tokens = logits.new_empty(batch, nodes, dtype=torch.int64)
    best = logits.new_empty(batch, nodes, dtype=torch.float32)
    blocks = configuration(not any(size % 16 for size in (vocabulary, logits.stride(0), logits.stride(1))))
    if interpreted():
        blocks = {"BLOCK_R": 2, "BLOCK_V": triton.next_power_of_2(triton.cdiv(vocabulary, 2))}
    factor = min(math.log2(math.e) / temperature, 1e38)  # finite in fp32, so that 0 times it is 0
    with launch.on_device(logits):
        _draw_tokens_kernel[(batch * nodes,)](
            logits, noise, noise_rows.contiguous(), tokens, best,
            vocabulary, nodes, noise.shape[1], logits.stride(0), logits.stride(1),
            nodes if noise_rows.dim() == 2 else 0,
            temperature, factor, top_k, 1 - top_p, min_p,
            TOP_K=0 < top_k < vocabulary, TOP_P=top_p < 1, MIN_P=min_p > 0, **blocks, **launch.options(WARPS, False),
        )  # fmt: skip
    return tokens, best
