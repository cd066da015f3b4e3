"""`gumbel_noise` as one Triton launch: a program has a piece of one place's tokens, with one Philox per 4 of them."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from medusa_kernels._registry import interpreted
from medusa_kernels._triton import launch

WARPS = launch.Warps(num_warps=4, num_stages=1)
COUNTERS = 256
"""Counters per program, so 8 numbers per thread."""


@triton.jit(do_not_specialize=["rows"])
def _gumbel_noise_kernel(seeds, first, out, rows, vocabulary, PDL: tl.constexpr, COUNTERS: tl.constexpr):
    """Compute -log(-log(1 - v)) for one row of out [B, R, V], with v = min((x + 1/2) / 2^32, 1 - 2^-24).

    The random bits x are word token % 4 of Philox4x32-10 for the counter (token // 4, place, 0, 0) and the key seeds
    [B]; place is first [B] plus the row's number. Below 1/16 the inner logarithm is its series. Only x is not fp32.
    """
    i_row, i_piece = tl.program_id(0), tl.program_id(1)
    if PDL:
        tl.extra.cuda.gdc_wait()
    seed = tl.load(seeds + i_row // rows)
    place = (tl.load(first + i_row // rows) + i_row % rows).to(tl.int32)
    o_block = i_piece * COUNTERS + tl.arange(0, COUNTERS)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    zero = tl.zeros_like(o_block)
    b_0, b_1, b_2, b_3 = tl.philox(seed, o_block, zero + place, zero, zero)
    # [4 * COUNTERS]
    b_bits = tl.interleave(tl.interleave(b_0, b_2), tl.interleave(b_1, b_3))
    b_v = tl.minimum(b_bits.to(tl.float32) * 2.0**-32 + 2.0**-33, 1.0 - 2.0**-24)
    b_series = b_v * (1 + b_v * (1 / 2 + b_v * (1 / 3 + b_v * (1 / 4 + b_v * (1 / 5 + b_v * (1 / 6))))))
    b_wait = tl.where(b_v < 1 / 16, b_series, -tl.log(1 - b_v))
    o_v = i_piece * 4 * COUNTERS + tl.arange(0, 4 * COUNTERS)
    tl.store(out + i_row.to(tl.int64) * vocabulary + o_v, -tl.log(b_wait), mask=o_v < vocabulary)


def gumbel_noise(seeds, first, rows, vocabulary):
    """Launch the kernel; see the public `gumbel_noise`."""
    out = torch.empty(len(seeds), rows, vocabulary, dtype=torch.float32, device=seeds.device)
    counters = COUNTERS
    if interpreted():
        counters = triton.next_power_of_2(triton.cdiv(vocabulary, 4))  # a program costs far more than its arithmetic
    grid, pdl = (len(seeds) * rows, triton.cdiv(vocabulary, 4 * counters)), launch.programmatic(seeds.device)
    with launch.on_device(seeds):
        _gumbel_noise_kernel[grid](
            seeds.contiguous(), first.contiguous(), out, rows, vocabulary,
            PDL=pdl, COUNTERS=counters, **launch.options(WARPS, pdl),
        )  # fmt: skip
    return out
