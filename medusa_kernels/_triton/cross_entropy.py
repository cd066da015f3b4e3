"""`cross_entropy` as one Triton launch: a program reads its row of logits twice, the second time mostly from the L2."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from medusa_kernels._registry import interpreted
from medusa_kernels._triton import launch

WARPS = launch.Warps(num_warps=16, num_stages=1)
"""Two programs fill a multiprocessor: on an H200, the 264 rows of all of them take 34 MB with V = 32,000."""
BLOCKS = {"BLOCK_R": 4, "BLOCK_V": 2048}


@triton.jit
def _cross_entropy_kernel(
    logits, targets, losses, ranks, gradient,
    vocabulary, stride_logits_m, stride_gradient_m,
    RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute log(sum exp x) - x[target] of one row, the target's rank, and softmax(x) - onehot(target).

    logits [M, V] fp32 and targets [M] give losses [M] fp32, ranks [M] int64 (if RANK) and gradient [M, V] (if there is
    one), which may be the logits. A row without a target (below 0) has loss 0, rank V and gradient 0. Every thread has
    all BLOCK_R rows of its columns of a tile, and keeps a maximum and a sum of exponentials.
    """
    i_m = tl.program_id(0).to(tl.int64)
    logits += i_m * stride_logits_m
    target = tl.load(targets + i_m)
    readable = tl.where(target < 0, 0, vocabulary)
    o_tile = tl.arange(0, BLOCK_R)[:, None] * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    chosen = tl.load(logits + target, mask=target >= 0, other=0.0)
    # Finite, so that the difference of two of them is a number.
    b_peak = tl.full((BLOCK_V,), -3.0e38, tl.float32)
    b_sum = tl.zeros((BLOCK_V,), tl.float32)
    b_below = tl.zeros((BLOCK_V,), tl.int32)
    for first in range(0, readable, BLOCK_R * BLOCK_V):
        o_v = first + o_tile
        # [BLOCK_R, BLOCK_V]
        b_x = tl.load(logits + o_v, mask=o_v < vocabulary, other=-float("inf"))
        b_high = tl.maximum(b_peak, tl.max(b_x, 0))
        b_sum = b_sum * tl.exp(b_peak - b_high) + tl.sum(tl.exp(b_x - b_high[None, :]), 0)
        b_peak = b_high
        if RANK:
            m_below = (b_x < chosen) | ((b_x == chosen) & (o_v >= target))
            b_below += tl.sum((m_below & (o_v < vocabulary)).to(tl.int32), 0)
    peak = tl.max(b_peak, 0)
    total = tl.sum(b_sum * tl.exp(b_peak - peak), 0)
    tl.store(losses + i_m, tl.where(target < 0, 0.0, peak - chosen + tl.log(total)))
    if RANK:
        tl.store(ranks + i_m, vocabulary - tl.sum(b_below, 0).to(tl.int64))
    if gradient is not None:
        gradient += i_m * stride_gradient_m
        inverse = tl.div_rn(tl.full((), 1.0, tl.float32), total)
        for first in range(0, vocabulary, BLOCK_R * BLOCK_V):
            o_v = first + o_tile
            # [BLOCK_R, BLOCK_V]
            b_x = tl.load(logits + o_v, mask=o_v < readable, other=-float("inf"))
            b_p = tl.exp(b_x - peak) * inverse - tl.where(o_v == target, 1.0, 0.0)
            b_p = tl.where(target < 0, 0.0, b_p)
            tl.store(gradient + o_v, b_p.to(gradient.dtype.element_ty), mask=o_v < vocabulary)


def cross_entropy(logits, targets, top, dtype):
    """Launch the kernel; see the internal `cross_entropy`."""
    rows, vocabulary = logits.shape
    losses = logits.new_empty(rows)
    ranks = targets.new_empty(rows if top else 0)
    gradient = None
    if dtype is not None:
        gradient = logits if dtype == logits.dtype else torch.empty_like(logits, dtype=dtype)
    blocks = {"BLOCK_R": 1, "BLOCK_V": triton.next_power_of_2(vocabulary)} if interpreted() else BLOCKS
    with launch.on_device(logits):
        _cross_entropy_kernel[(rows,)](
            logits, targets, losses, ranks, gradient,
            vocabulary, logits.stride(0), 0 if gradient is None else gradient.stride(0),
            RANK=top > 0, **blocks, **launch.options(WARPS, False),
        )  # fmt: skip
    return losses, ranks, gradient
