"""`tree_verify` as two Triton launches: one streams the weight past all nodes, one merges the programs' results.

The first keeps, per node and program, the best token and the sums for log-sum-exp and entropy, over the program's share
of the vocabulary. The second combines them in a fixed order, and computes the one logit that the log-probability of a
child needs as a separate dot product. Logits exist one tile at a time, in registers.

If only the most likely tokens of many nodes are wanted, PyTorch multiplies instead: see `PRODUCT_ROWS`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear

from medusa_kernels._registry import interpreted
from medusa_kernels._triton import launch
from medusa_kernels._triton.launch import Device, Warps, describe, on_device
from medusa_kernels._triton.quantised_product import (
    constants,
    decodes_bytes,
    decoding,
    dot_of_rows,
    halves,
    packed_config,
    quantised_product,
    readable,
)
from medusa_kernels._triton.streaming import (
    OPTIONS,
    Config,
    exponential,
    index_of,
    interpreted_config,
    ordered,
    packed,
    shares,
    unit,
    wide,
)
from medusa_kernels._triton.tree_attention_kernels import tanh
from medusa_kernels.quantised import dequantised
from medusa_kernels.reference import scaled_logits

MERGE = Warps(num_warps=4, num_stages=3)
LOWEST_KEY = tl.constexpr(-(2**63))

PRODUCT_ROWS = 256
"""From how many nodes on PyTorch multiplies if only the most likely tokens of 16-bit states are wanted. There the
kernels are bound by arithmetic, at which cuBLAS is better: on an H200 they took 1.03 to 1.34 times as long as all
logits at once (benchmarks/results/nvidia-h200.jsonl)."""

MOST_LOGITS = 2**24
"""How many logits are in memory at once then."""


def configuration(
    device: Device,
    dtype: torch.dtype,
    rows: int,
    *,
    scaled: bool = False,
    vectors: bool = True,
    stored: torch.dtype | None = None,
    group: int = 0,
) -> Config:
    """Choose how the weight is streamed past `rows` nodes of the whole batch.

    `scaled`: whether there are a temperature and noise, which take registers; `vectors`: whether 16 bytes can be loaded
    at once (see `streaming.wide`); `stored`: the weight's dtype, if it is another; `group`: the columns of a group of
    4-bit codes.
    """
    if group:
        return packed_config(device, dtype, rows, group, crowded=scaled and rows > 32)
    if interpreted():
        return interpreted_config(rows)
    m = min(128, max(16, triton.next_power_of_2(rows)))
    if dtype == torch.float32 or not vectors:
        # In fp32 a chain of multiply-adds is as long as a block, see `dot_accumulate`.
        return Config(16, 32, 16 if dtype == torch.float32 else 32, 4, 4, 2)
    if m <= 32:
        bytes_each = 1 if stored is None else stored.itemsize
        return Config(m, 64, (128 if device.roomy else 64) * (2 if m == 16 and bytes_each == 1 else 1), 4, 4, 2)
    if device.hopper:
        if scaled:
            return Config(64, 128, 64, 8, 6, 1)
        return Config(m, 256, 64, 8, 4, 1) if m == 64 else Config(m, 128, 64, 8, 5, 1)
    if m == 64:
        return Config(m, 64, 64, 4, 3, 2)
    # There are registers for one program, which keeps the memory busy alone.
    return Config(m, 64, 64, 8, 5 if device.roomy else 4, 1)


@triton.jit
def logits_of(b_x, DTYPE: tl.constexpr, DIVISOR: tl.constexpr, SOFTCAP: tl.constexpr):
    """Return a product in fp32 as a model's logits: divided (unless by 1) and capped (unless SOFTCAP is None).

    Each operation rounds to DTYPE.
    """
    b_x = b_x.to(DTYPE).to(tl.float32)
    if DIVISOR != 1.0:
        b_x = tl.math.div_rn(b_x, tl.zeros_like(b_x) + DIVISOR).to(DTYPE).to(tl.float32)
    if SOFTCAP is not None:
        b_x = tl.math.div_rn(b_x, tl.zeros_like(b_x) + SOFTCAP).to(DTYPE).to(tl.float32)
        b_x = (tanh(b_x).to(DTYPE).to(tl.float32) * SOFTCAP).to(DTYPE).to(tl.float32)
    return b_x


@triton.jit(do_not_specialize=["rows", "tiles", "step", "nodes", "noises", "stride_noise_rows_b"])
def project_kernel(
    hidden, weight, scale, zero, noise, noise_rows, keys, peaks, sums, moments,
    rows, vocabulary, size, stride_weight_v, tiles, step, nodes, noises, stride_noise_rows_b, temperature,
    UNIT: tl.constexpr, EVEN: tl.constexpr, SCALED: tl.constexpr, STATS: tl.constexpr, VECTOR: tl.constexpr,
    DECODE: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_ZERO: tl.constexpr, GROUP: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
    DIVISOR: tl.constexpr = 1.0, SOFTCAP: tl.constexpr = None,
):  # fmt: skip
    """Reduce x = (logits of W h) / temperature over one program's share of the vocabulary, for BLOCK_M nodes.

    hidden [R, H], weight [V, H] and noise [B, noises, V], of which each node takes the row that noise_rows gives, make,
    all [R, P]: keys (argmax of x + noise, packed), peaks (m = max x), sums (sum of exp(x - m)) and moments (sum of
    exp(x - m) (x - m)). W h is accumulated in fp32 and rounded to the dtype of hidden, as a model rounds its logits;
    everything after `logits_of` is fp32. DECODE to GROUP, and what they make of hidden and the size, are as in
    `quantised_product`.
    """
    i_m, i_p, programs = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    size, vocabulary, step = size * UNIT, vocabulary * VECTOR, step * VECTOR
    o_m = i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    o_v = tl.arange(0, BLOCK_V)
    m_m = o_m < rows
    p_a = hidden + o_m.to(tl.int64) * (size * (2 if GROUP > 0 else 1))
    b_best = tl.full((BLOCK_M,), LOWEST_KEY, tl.int64)
    b_peak = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    b_sum = tl.zeros((BLOCK_M,), tl.float32)
    b_moment = tl.zeros((BLOCK_M,), tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if SCALED:
        # [BLOCK_M]
        b_row = tl.load(noise_rows + o_m // nodes * stride_noise_rows_b + o_m % nodes, mask=m_m, other=-1)
        # A kernel cannot refuse values: a row out of range counts as zeros, and nothing outside of the noise is read.
        m_noise = (b_row >= 0) & (b_row < noises)
        p_noise = noise + ((o_m // nodes).to(tl.int64) * noises + b_row)[:, None] * vocabulary
    for tile in range(tiles):
        first = (tile * programs + i_p) * step
        m_v = (o_v < step) & (first + o_v < vocabulary)
        o_w = (first + o_v).to(tl.int64)
        # [BLOCK_M, BLOCK_V]
        b_x = quantised_product(
            p_a, m_m, weight + o_w * (stride_weight_v * UNIT), m_v, scale, zero, o_w, size,
            BLOCK_M, BLOCK_V, BLOCK_K, EVEN, DECODE, HAS_SCALE, HAS_ZERO, GROUP,
        )  # fmt: skip
        b_x = logits_of(b_x, hidden.dtype.element_ty, DIVISOR, SOFTCAP)
        b_x = tl.where(m_v[None, :], b_x, -float("inf"))
        b_score = b_x
        if SCALED:
            b_x = tl.math.div_rn(b_x, tl.zeros_like(b_x) + temperature)
            # [BLOCK_M, BLOCK_V]
            b_noise = tl.load(p_noise + (first + o_v)[None, :], mask=m_noise[:, None] & m_v[None, :], other=0.0)
            b_score = b_x + b_noise
        b_score = tl.where(b_score != b_score, float("inf"), b_score)  # NaN is the largest, as PyTorch orders it
        b_top = tl.max(b_score, 1)
        # The lowest of equal scores; masked columns come last.
        b_id = tl.min(tl.where(b_score == b_top[:, None], (first + o_v)[None, :], vocabulary - 1), 1)
        b_best = tl.maximum(b_best, packed(ordered(b_top), b_id))
        if STATS:
            b_high = tl.maximum(b_peak, tl.max(b_x, 1))
            b_fall = tl.where(b_sum == 0.0, 0.0, b_peak - b_high)
            b_below = b_x - b_high[:, None]
            # exp(-200) is 0, and so is the product below, also for masked columns.
            b_below = tl.where(b_below < -200.0, -200.0, b_below)
            b_exp = exponential(b_below, hidden.dtype.element_ty == tl.float32)
            b_shrink = exponential(b_fall, hidden.dtype.element_ty == tl.float32)
            b_moment = b_shrink * (b_moment + b_fall * b_sum) + tl.sum(b_exp * b_below, 1)
            b_sum = b_shrink * b_sum + tl.sum(b_exp, 1)
            b_peak = b_high
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    o_part = o_m.to(tl.int64) * programs + i_p
    tl.store(keys + o_part, b_best, mask=m_m)
    if STATS:
        tl.store(peaks + o_part, b_peak, mask=m_m)
        tl.store(sums + o_part, b_sum, mask=m_m)
        tl.store(moments + o_part, b_moment, mask=m_m)


@triton.jit
def combined(peaks, sums, o_row, m_row, programs, BLOCK_P: tl.constexpr, EXACT: tl.constexpr):
    """Return m [R] = max of peaks, peaks - m and sums exp(peaks - m) [R, BLOCK_P], and the total of these sums [R]."""
    o_p = tl.arange(0, BLOCK_P)
    m_part = m_row[:, None] & (o_p < programs)[None, :]
    o_part = o_row.to(tl.int64)[:, None] * programs + o_p[None, :]
    # [R, BLOCK_P]
    b_peaks = tl.load(peaks + o_part, mask=m_part, other=-float("inf"))
    b_peak = tl.where(m_row, tl.max(b_peaks, 1), 0.0)
    b_fall = tl.where(m_part, b_peaks - b_peak[:, None], 0.0)
    # [R, BLOCK_P]
    b_sums = tl.load(sums + o_part, mask=m_part, other=0.0) * exponential(b_fall, EXACT)
    return b_peak, b_fall, b_sums, tl.where(m_row, tl.sum(b_sums, 1), 1.0)


@triton.jit(do_not_specialize=["rows", "nodes", "programs"])
def merge_kernel(
    keys, peaks, sums, moments, hidden, weight, scale, zero, candidates, parents, next_tokens, logsumexp, entropy,
    child_logprobs, rows, nodes, programs, vocabulary, size, stride_weight_v, stride_parents_b, temperature,
    UNIT: tl.constexpr, SCALED: tl.constexpr, STATS: tl.constexpr, CHAIN: tl.constexpr,
    DECODE: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_ZERO: tl.constexpr, GROUP: tl.constexpr,
    PDL: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_K: tl.constexpr,
    DIVISOR: tl.constexpr = 1.0, SOFTCAP: tl.constexpr = None,
):  # fmt: skip
    """Combine the shares of BLOCK_R nodes: argmax, log-sum-exp, entropy, and log-probability of each node's token.

    With m, S and T the peak, sum and moment over all programs: log-sum-exp = m + log S and entropy = log S - T / S. The
    log-probability of candidates[i] is its logit at the parent less the parent's log-sum-exp; the logit is rounded to
    the dtype of hidden. keys to moments are [R, P], hidden and weight as in `project_kernel`, results [R]; all else is
    fp32.
    """
    o_row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    m_row = o_row < rows
    o_p = tl.arange(0, BLOCK_P)
    m_part = m_row[:, None] & (o_p < programs)[None, :]
    o_part = o_row.to(tl.int64)[:, None] * programs + o_p[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    # [BLOCK_R, BLOCK_P]
    b_best = tl.max(tl.load(keys + o_part, mask=m_part, other=LOWEST_KEY), 1)
    tl.store(next_tokens + o_row, index_of(b_best), mask=m_row)
    if STATS:
        size = size * UNIT
        EXACT: tl.constexpr = hidden.dtype.element_ty == tl.float32
        b_peak, b_fall, b_sums, b_sum = combined(peaks, sums, o_row, m_row, programs, BLOCK_P, EXACT)
        # A moment is relative to its program's peak: relative to m it changes by (peak - m) times the sum.
        # [BLOCK_R, BLOCK_P]
        b_moments = tl.load(moments + o_part, mask=m_part, other=0.0) * exponential(b_fall, EXACT)
        b_moment = tl.sum(b_moments + b_fall * b_sums, 1)
        b_log = tl.log(b_sum)
        tl.store(logsumexp + o_row, b_peak + b_log, mask=m_row)
        # The peak cancels and is left out: exact also if one token has almost all of the probability.
        tl.store(entropy + o_row, b_log - tl.math.div_rn(b_moment, b_sum), mask=m_row)

        i_node, i_b = o_row % nodes, o_row // nodes
        b_parent = i_node - 1
        if not CHAIN:
            # [BLOCK_R]
            b_parent = tl.load(parents + i_b * stride_parents_b + i_node, mask=m_row, other=-1)
        # [BLOCK_R]
        b_token = tl.load(candidates + o_row, mask=m_row, other=0)
        # A kernel cannot refuse values: an index out of range gives NaN, and nothing outside the tensors is read.
        m_valid = (b_parent < nodes) & (b_token >= 0) & (b_token < vocabulary)
        m_child = m_row & (b_parent >= 0) & m_valid
        o_parent = i_b * nodes + tl.where(m_child, b_parent, 0)
        p_a = hidden + o_parent.to(tl.int64) * (size * (2 if GROUP > 0 else 1))
        o_w = tl.where(m_child, b_token, 0)
        b_logit = dot_of_rows(
            p_a, weight + o_w * (stride_weight_v * UNIT), m_child, scale, zero, o_w, size,
            BLOCK_R, BLOCK_K, DECODE, HAS_SCALE, HAS_ZERO, GROUP,
        )  # fmt: skip
        b_logit = logits_of(b_logit, hidden.dtype.element_ty, DIVISOR, SOFTCAP)
        if SCALED:
            b_logit = tl.math.div_rn(b_logit, tl.zeros_like(b_logit) + temperature)
        b_peak, b_fall, b_sums, b_sum = combined(peaks, sums, o_parent, m_child, programs, BLOCK_P, EXACT)
        b_logprob = b_logit - (b_peak + tl.log(b_sum))
        b_logprob = tl.where(m_valid, b_logprob, float("nan"))
        tl.store(child_logprobs + o_row, tl.where(b_parent < 0, 0.0, b_logprob), mask=m_row)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


def merge_blocks(rows: int, programs: int) -> dict[str, int]:
    """Choose the tile of the merge: one node per program while there are few, and all partial results at once."""
    block_r = 1 if rows <= 1024 else 8
    if interpreted():
        block_r = 128  # a program costs far more than its arithmetic there
    return {
        "BLOCK_R": block_r,
        "BLOCK_P": max(256, triton.next_power_of_2(programs)),
        "BLOCK_K": max(512, 4096 // block_r),
    }


def likeliest(
    hidden: Tensor, weight: Tensor, scale: Tensor | None = None, zero: Tensor | None = None, codes: str = "int4",
    divisor: float = 1.0, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """Return the token of the greatest logit of every node `[B, N]`, the lowest of equal ones.

    PyTorch multiplies with one part of the vocabulary after another, so that at most `MOST_LOGITS` are in memory, and
    as many numbers of a quantised weight.
    """
    states = hidden.flatten(0, 1)
    a_row = len(states) if scale is None else max(states.shape)
    parts = -(-a_row * len(weight) // MOST_LOGITS)
    stored = ([None] * parts if tensor is None else tensor.chunk(parts) for tensor in (weight, scale, zero))
    first, best, tokens = 0, states.new_empty(0), states.new_empty(0)
    for part, of_scale, of_zero in zip(*stored, strict=False):
        logits = linear(states, dequantised(part, of_scale, of_zero, codes).to(states.dtype))
        high, index = scaled_logits(logits, divisor, softcap).max(-1)
        # PyTorch takes NaN for the largest, also in `maximum`.
        tokens = torch.where((high > best) | (high.isnan() & ~best.isnan()), index + first, tokens) if first else index
        best, first = torch.maximum(high, best) if first else high, first + len(part)
    return tokens.view(hidden.shape[:2])


def tree_verify(
    hidden, weight, candidates, parents=None,
    *, temperature=0.0, noise=None, noise_rows=None, want_stats=True, weight_scale=None, weight_zero=None, codes="int4",
    divisor=1.0, softcap=None,
):  # fmt: skip
    """Launch both kernels; see the public `tree_verify`."""
    batch, nodes, _ = hidden.shape
    vocabulary, rows = weight.shape[0], batch * nodes
    if rows >= PRODUCT_ROWS and hidden.dtype.itemsize == 2 and temperature == 0 and not want_stats:
        tokens = likeliest(hidden, weight, weight_scale, weight_zero, codes, divisor, softcap)
        return tokens, *(hidden.new_empty(0, dtype=torch.float32) for _ in range(3))
    weight, scale, zero = readable(weight, weight_scale, weight_zero, codes, hidden.dtype)
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    hidden, candidates, size = halves(hidden, weight), candidates.contiguous(), weight.shape[1]
    next_tokens = torch.empty_like(candidates)
    logsumexp, entropy, child_logprobs = (
        hidden.new_empty(candidates.shape if want_stats else (0,), dtype=torch.float32) for _ in range(3)
    )
    scaled, noises = temperature > 0, 0
    if scaled:
        noise, noises = noise.contiguous(), noise.shape[1]
        noise_rows = torch.arange(nodes, device=hidden.device, dtype=torch.int32) if noise_rows is None else noise_rows
    elements = unit(size, weight.stride(0))
    device, stored = describe(hidden.device), constants(weight, scale, zero)
    config = configuration(
        device, hidden.dtype, rows, scaled=scaled, vectors=wide(elements, hidden.dtype, weight.dtype),
        stored=weight.dtype, group=stored["GROUP"],
    )  # fmt: skip
    m_tiles = triton.cdiv(rows, config.block_m)
    slots = device.multiprocessors * config.programs
    # The noise is loaded four numbers at once if rows and tiles start at multiples of four.
    vector = 4 if scaled and vocabulary % 4 == 0 else 1
    share = shares(vocabulary, slots // m_tiles, config.block_v, vector)
    keys = candidates.new_empty(rows, share.programs)
    peaks, sums, moments = hidden.new_empty(3, rows, share.programs, dtype=torch.float32).unbind()
    pdl = launch.programmatic(hidden.device)
    flags = {"UNIT": elements, "SCALED": scaled, "STATS": want_stats, "DIVISOR": divisor, "SOFTCAP": softcap, **stored}
    flags["DECODE"] = decoding(device, hidden.dtype, weight.dtype, codes)
    weights = (
        weight.view(torch.uint8) if decodes_bytes(device, weight.dtype) else weight,
        peaks if scale is None else scale, peaks if zero is None else zero,
    )  # fmt: skip
    with on_device(hidden):
        project_kernel[m_tiles, share.programs](
            hidden, *weights, noise if scaled else peaks, noise_rows.contiguous() if scaled else keys,
            keys, peaks, sums, moments,
            rows, vocabulary // vector, size // elements, weight.stride(0) // elements, share.tiles,
            share.step // vector, nodes, noises, nodes if scaled and noise_rows.dim() == 2 else 0, temperature,
            **flags, VECTOR=vector, EVEN=size % config.block_k == 0, PDL=pdl, **config.blocks(),
            **launch.options(config, pdl, OPTIONS),
        )  # fmt: skip
        blocks = merge_blocks(rows, share.programs)
        programs = triton.cdiv(rows, blocks["BLOCK_R"])
        merge_kernel[(programs,)](
            keys, peaks, sums, moments, hidden, *weights, candidates,
            keys if parents is None else parents.contiguous(), next_tokens, logsumexp, entropy, child_logprobs,
            rows, nodes, share.programs, vocabulary, size // elements, weight.stride(0) // elements,
            nodes if parents is not None and parents.dim() == 2 else 0, temperature,
            **flags, CHAIN=parents is None, PDL=pdl, **blocks,
            **launch.options(MERGE, pdl, OPTIONS),
        )  # fmt: skip
    return next_tokens, logsumexp, entropy, child_logprobs
