"""`tree_select` as one Triton launch: a program scores the candidates of its row and numbers the kept ones.

The lowest kept score is found by bisection over its bits: costs (negated scores, never negative) are compared as the
integers of their bits, which have the order of the floats.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from medusa_kernels._triton import launch
from medusa_kernels.reference import WORD

OPTIONS = launch.OPTIONS | {"maxnreg": 128}
"""As many registers as sixteen warps of one program may have. By default, ptxas takes a few less here and spills.

With Triton 3.6 blocks of 8192 still spill 16 to 40 bytes; with 3.9 none does."""


def configuration(candidates: int, nodes: int) -> tuple[dict[str, int], launch.Warps]:
    """Return the kernel's constants and warps for `candidates` candidates, of which `nodes` are kept.

    BLOCK_M holds all candidates, BLOCK_N all nodes. WORDS are the ancestor words per node, BITS the bits of a cost: a
    float without its sign.
    """
    block_m, block_n = max(64, triton.next_power_of_2(candidates)), max(16, triton.next_power_of_2(nodes))
    constants = {"BLOCK_M": block_m, "BLOCK_N": block_n, "WORDS": -(-nodes // WORD), "BITS": 31}
    return constants, launch.Warps(num_warps=4 if block_m <= 256 else 16, num_stages=1)


@triton.jit(do_not_specialize=["candidates", "path_len", "nodes"])
def _tree_select_kernel(
    tokens, logprobs, depths, paths, numbers, chosen,
    out_tokens, out_parents, out_depths, out_ancestors, out_paths,
    candidates, path_len, nodes,
    PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WORDS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Keep the N candidates with the greatest score(m) = sum of min(logprobs, 0) along paths[m], for one row.

    tokens, logprobs [B, M], depths [M], paths [M, P]. numbers [B, M] and chosen [B, N] are scratch memory, out_* are
    the results [B, N, ...]. Sums are fp32, in the order of the path; nothing is rounded further.
    """
    i_b = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
    tokens += i_b * candidates
    logprobs += i_b * candidates
    numbers += i_b * candidates
    chosen += i_b * nodes
    o_m = tl.arange(0, BLOCK_M)
    m_m = o_m < candidates

    # The cost of a path is the sum of its candidates' costs, from the root on. The padding repeats the last candidate.
    b_cost = tl.zeros((BLOCK_M,), tl.float32)
    b_last = tl.zeros((BLOCK_M,), tl.int64)
    for place in range(1, path_len):
        # [BLOCK_M]
        b_node = tl.load(paths + o_m * path_len + place, mask=m_m, other=0)
        b_own = tl.load(logprobs + b_node, mask=m_m & (b_node != b_last), other=0.0)
        b_own = tl.where(b_own != b_own, -float("inf"), tl.where(b_own > 0.0, 0.0, b_own))
        b_cost += 0.0 - b_own
        b_last = b_node
    b_key = b_cost.to(tl.int32, bitcast=True)
    b_key = tl.where(m_m, b_key, 0x7FFFFFFF)

    # The largest integer below which fewer than `nodes` costs lie: the cost of the last one kept.
    limit = tl.zeros((), tl.int32)
    for step in range(BITS):
        trial = limit | (1 << (BITS - 1 - step))
        below = tl.sum((b_key < trial).to(tl.int32), 0)
        limit = tl.where(below < nodes, trial, limit)
    b_below = (b_key < limit).to(tl.int32)
    b_equal = ((b_key == limit) & m_m).to(tl.int32)
    # Of equal costs take the first: a parent comes before its children.
    room = nodes - tl.sum(b_below, 0)
    b_kept = (b_below != 0) | ((b_equal != 0) & (tl.cumsum(b_equal, 0) <= room))
    b_number = tl.cumsum(b_kept.to(tl.int32), 0) - 1
    tl.store(numbers + o_m, b_number, mask=m_m)
    tl.store(chosen + b_number, o_m, mask=b_kept)
    # From here on, threads read the numbers of other threads.
    tl.debug_barrier()

    o_n = tl.arange(0, BLOCK_N)
    m_n = o_n < nodes
    # [BLOCK_N]
    b_chosen = tl.load(chosen + o_n, mask=m_n, other=0)
    b_depth = tl.load(depths + b_chosen, mask=m_n, other=0)
    b_parent = tl.full((BLOCK_N,), -1, tl.int32)
    o_row = i_b * nodes + o_n
    for place in range(0, path_len):
        # [BLOCK_N]
        b_node = tl.load(paths + b_chosen * path_len + place, mask=m_n, other=0)
        b_step = tl.load(numbers + b_node, mask=m_n, other=0)
        tl.store(out_paths + o_row * path_len + place, b_step.to(tl.int64), mask=m_n)
        b_parent = tl.where(place == b_depth - 1, b_step, b_parent)
    for word in tl.static_range(WORDS):
        b_word = tl.zeros((BLOCK_N,), tl.int64)
        for place in range(0, path_len):
            # [BLOCK_N]
            b_node = tl.load(paths + b_chosen * path_len + place, mask=m_n, other=0)
            b_step = tl.load(numbers + b_node, mask=m_n, other=0)
            b_bit = tl.full((BLOCK_N,), 1, tl.int64) << (b_step % 64).to(tl.int64)
            b_word |= tl.where(b_step // 64 == word, b_bit, 0)
        tl.store(out_ancestors + o_row * WORDS + word, b_word, mask=m_n)
    tl.store(out_tokens + o_row, tl.load(tokens + b_chosen, mask=m_n, other=0), mask=m_n)
    tl.store(out_parents + o_row, b_parent, mask=m_n)
    tl.store(out_depths + o_row, b_depth, mask=m_n)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


def tree_select(tokens, logprobs, depths, paths, nodes):
    """Launch the kernel, one program per row; see the public `tree_select`."""
    (batch, candidates), path_len = tokens.shape, paths.shape[1]
    constants, warps = configuration(candidates, nodes)
    out_tokens, out_parents = tokens.new_empty(batch, nodes), depths.new_empty(batch, nodes)
    out_depths, out_paths = depths.new_empty(batch, nodes), tokens.new_empty(batch, nodes, path_len)
    ancestors = tokens.new_empty(batch, nodes, constants["WORDS"])
    if batch:
        pdl = launch.programmatic(tokens.device)
        numbers, chosen = depths.new_empty(batch, candidates), depths.new_empty(batch, nodes)
        with launch.on_device(tokens):
            _tree_select_kernel[(batch,)](
                *(t.contiguous() for t in (tokens, logprobs, depths, paths)), numbers, chosen,
                out_tokens, out_parents, out_depths, ancestors, out_paths, candidates, path_len, nodes,
                PDL=pdl, **constants, **launch.options(warps, pdl, OPTIONS),
            )  # fmt: skip
    return out_tokens, out_parents, out_depths, ancestors, out_paths
