"""`tree_accept` as one Triton launch: a program finds the path of its row and updates the state of the row.

Nodes are checked in tiles of a few places of all paths; the rest is a few numbers per row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from medusa_kernels._triton import launch

WARPS = launch.Warps(num_warps=4, num_stages=1)


def blocks(nodes: int, path_len: int, size: int) -> dict[str, int]:
    """Return the kernel's constants for `nodes` nodes, paths of `path_len` places and hidden states of `size`.

    BLOCK_N and BLOCK_P hold all nodes and all places of a path. PLACES places of all paths, BLOCK_E EOS tokens and
    BLOCK_H elements of a hidden state are handled at once.
    """
    block_n = max(16, triton.next_power_of_2(nodes))
    return {
        "BLOCK_N": block_n,
        "BLOCK_P": max(8, triton.next_power_of_2(path_len)),
        "PLACES": 8 if block_n <= 128 else 4,
        "BLOCK_E": 8,
        "BLOCK_H": min(4096, max(16, triton.next_power_of_2(size))),
    }


@triton.jit(
    do_not_specialize=[
        "nodes", "path_len", "ends", "width", "log_width", "report_width", "stride_depths_b", "stride_paths_b"
    ]
)  # fmt: skip
def _tree_accept_kernel(
    tokens, next_tokens, hidden, depths, paths, eos, max_new, step,
    lengths, root, state_hidden, output, count, finished, log, path, accept_lens, old_lengths, check, report,
    nodes, path_len, ends, size, width, log_width, report_width, stride_depths_b, stride_paths_b,
    HAS_REPORT: tl.constexpr, PDL: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, PLACES: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Accept the deepest node whose path has tokens[node] == next_tokens[parent] throughout, for one row.

    tokens, next_tokens [B, N], hidden [B, N, H], depths [B or 1, N] and paths [B or 1, N, P] as in the public function.
    The path [B, P], accept_lens [B] and old_lengths [B] are results, everything from lengths to log is updated in
    place. The report [B, R] gets count, finished, the bits of check [B] and the tokens of the path. There is no
    arithmetic on floats; hidden states are copied.
    """
    i_b = tl.program_id(0).to(tl.int64)
    if PDL:
        tl.extra.cuda.gdc_wait()
    length, emitted = tl.load(lengths + i_b), tl.load(count + i_b)
    had_ended, room = tl.load(finished + i_b) != 0, tl.load(max_new + i_b) - emitted
    column = tl.load(step)
    # A slow thread must not read here what a faster one writes below.
    tl.debug_barrier()

    tokens += i_b * nodes
    next_tokens += i_b * nodes
    # Each row may have its own tree.
    depths += i_b * stride_depths_b
    paths += i_b * stride_paths_b
    o_n = tl.arange(0, BLOCK_N)
    m_n = o_n < nodes
    # [BLOCK_N]
    b_depth = tl.load(depths + o_n, mask=m_n, other=0)
    b_right = m_n.to(tl.int32)
    for first in range(1, path_len, PLACES):
        # [BLOCK_N, PLACES]; a masked place is node 0 after node 0, a repetition as in the padding of a path.
        o_p = first + tl.arange(0, PLACES)
        m_place = m_n[:, None] & (o_p < path_len)[None, :]
        p_place = paths + o_n[:, None] * path_len + o_p[None, :]
        b_node = tl.load(p_place, mask=m_place, other=0)
        b_parent = tl.load(p_place - 1, mask=m_place, other=0)
        b_token = tl.load(tokens + b_node, mask=m_place, other=0)
        b_wanted = tl.load(next_tokens + b_parent, mask=m_place, other=0)
        b_right &= tl.min(((b_token == b_wanted) | (b_node == b_parent)).to(tl.int32), 1)
    # The deepest right node, of equally deep ones the lowest.
    key = tl.max(tl.where(b_right != 0, b_depth * BLOCK_N + (BLOCK_N - 1 - o_n), -1), 0)
    accepted, last = key // BLOCK_N, BLOCK_N - 1 - key % BLOCK_N

    o_p = tl.arange(0, BLOCK_P)
    m_p = o_p < path_len
    # [BLOCK_P]
    b_path = tl.load(paths + last * path_len + o_p, mask=m_p, other=0)
    b_emitted = tl.load(next_tokens + b_path, mask=m_p, other=0)
    b_end = tl.zeros((BLOCK_P,), tl.int32)
    for first in range(0, ends, BLOCK_E):
        o_e = first + tl.arange(0, BLOCK_E)
        m_e = o_e < ends
        # [BLOCK_E]
        b_eos = tl.load(eos + o_e, mask=m_e, other=0)
        b_end |= tl.max(((b_emitted[:, None] == b_eos[None, :]) & m_e[None, :]).to(tl.int32), 1)
    first_end = tl.min(tl.where((b_end != 0) & (o_p <= accepted), o_p, BLOCK_P), 0)
    found = tl.minimum(accepted, first_end) + 1
    ends_here = ((first_end < found) & (found <= room)) | (found >= room)
    found = tl.where(had_ended, 0, tl.minimum(found, room))

    accept_len = tl.where(had_ended, -1, accepted)
    tl.store(path + i_b * path_len + o_p, b_path.to(tl.int32), mask=m_p)
    tl.store(accept_lens + i_b, accept_len)
    tl.store(old_lengths + i_b, length)
    tl.store(lengths + i_b, length + accept_len + 1)
    tl.store(output + i_b * width + emitted + o_p, b_emitted, mask=(o_p < found) & (emitted + o_p < width))
    tl.store(count + i_b, emitted + found)
    tl.store(finished + i_b, (had_ended | ends_here).to(tl.int8))
    tl.store(log + i_b * log_width + column, found, mask=column < log_width)
    tl.store(root + i_b, tl.load(next_tokens + last))
    if HAS_REPORT:
        report += i_b * report_width
        tl.store(report, emitted + found)
        tl.store(report + 1, (had_ended | ends_here).to(tl.int32))
        tl.store(report + 2, tl.load(check + i_b))
        tl.store(report + 3 + o_p, b_emitted.to(tl.int32), mask=m_p)
    p_hidden = hidden + (i_b * nodes + last) * size
    for first in range(0, size, BLOCK_H):
        o_h = first + tl.arange(0, BLOCK_H)
        m_h = o_h < size
        # [BLOCK_H]
        tl.store(state_hidden + i_b * size + o_h, tl.load(p_hidden + o_h, mask=m_h), mask=m_h)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


def tree_accept(
    tokens, next_tokens, hidden, depths, paths, eos, max_new, step,
    *, lengths, root, state_hidden, output, count, finished, log, check=None, report=None,
):  # fmt: skip
    """Launch the kernel, one program per row; see the public `tree_accept`."""
    (batch, nodes, size), path_len = hidden.shape, paths.shape[-1]
    path, accept_lens, old_lengths = (depths.new_empty(batch, *rest) for rest in ((path_len,), (), ()))
    if batch:
        pdl = launch.programmatic(tokens.device)
        with launch.on_device(tokens):
            _tree_accept_kernel[(batch,)](
                *(t.contiguous() for t in (tokens, next_tokens, hidden, depths, paths, eos, max_new)), step,
                lengths, root, state_hidden, output, count, finished.view(torch.int8), log,
                path, accept_lens, old_lengths,
                *((count, count) if report is None else (check.contiguous().view(torch.int32), report)),
                nodes, path_len, eos.numel(), size, output.shape[1], log.shape[1],
                0 if report is None else report.shape[1],
                nodes if depths.dim() == 2 else 0, nodes * path_len if paths.dim() == 3 else 0,
                HAS_REPORT=report is not None, PDL=pdl, **blocks(nodes, path_len, size), **launch.options(WARPS, pdl),
            )  # fmt: skip
    return path, accept_lens, old_lengths
