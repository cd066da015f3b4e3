"""`tree_accept` as one Triton launch: a program finds its row's path and writes all that the row carries on.

Nodes are checked in tiles of some places of all paths; the rest is a few numbers a row.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from medusa_kernels._triton import launch


@dataclass(frozen=True)
class Config:
    """How a row is worked through.

    Attributes:
        block_n: nodes, at least as many as there are.
        block_p: places of a path, at least as many as there are.
        places: of all paths, looked at in one go.
        block_h: elements of a hidden state copied in one go.
        num_warps: warps a program.
        num_stages: depth of software pipelining.
    """

    block_n: int
    block_p: int
    places: int
    block_h: int
    num_warps: int = 4
    num_stages: int = 1


BLOCK_E = 8
"""EOS tokens compared in one go."""


def configuration(device: launch.Device, dtype: torch.dtype, nodes: int, places: int, size: int) -> Config:
    """Return the launch configuration for a tree of so many nodes and places a path, and hidden states of a size."""
    block_n = max(16, triton.next_power_of_2(nodes))
    return Config(
        block_n=block_n,
        block_p=max(8, triton.next_power_of_2(places)),
        places=8 if block_n <= 128 else 4,
        block_h=min(4096, max(16, triton.next_power_of_2(size))),
    )


@triton.jit(do_not_specialize=["nodes", "places", "ends", "width", "log_width", "stride_d_b", "stride_p_b"])
def _tree_accept_kernel(
    tokens, next_tokens, hidden, depths, paths, eos, max_new, step,
    lengths, root, state_hidden, output, count, finished, log, path, kept, old_lengths,
    nodes, places, ends, size, width, log_width, stride_d_b, stride_p_b,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, PLACES: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    i_b = tl.program_id(0).to(tl.int64)
    length, emitted = tl.load(lengths + i_b), tl.load(count + i_b)
    had_ended, room = tl.load(finished + i_b) != 0, tl.load(max_new + i_b) - emitted
    column = tl.load(step)
    # What other threads write below must not be what a late one reads here.
    tl.debug_barrier()

    tokens += i_b * nodes
    next_tokens += i_b * nodes
    # The tree may be the row's own.
    depths += i_b * stride_d_b
    paths += i_b * stride_p_b
    o_n = tl.arange(0, BLOCK_N)
    m_n = o_n < nodes
    b_depth = tl.load(depths + o_n, mask=m_n, other=0)
    b_right = m_n.to(tl.int32)
    for first in range(1, places, PLACES):
        # [BLOCK_N, PLACES]; what is masked is node 0 behind node 0, a repetition as in the padding of a path.
        o_p = first + tl.arange(0, PLACES)
        m_place = m_n[:, None] & (o_p < places)[None, :]
        p_place = paths + o_n[:, None] * places + o_p[None, :]
        b_node = tl.load(p_place, mask=m_place, other=0)
        b_parent = tl.load(p_place - 1, mask=m_place, other=0)
        b_token = tl.load(tokens + b_node, mask=m_place, other=0)
        b_wanted = tl.load(next_tokens + b_parent, mask=m_place, other=0)
        b_right &= tl.min(((b_token == b_wanted) | (b_node == b_parent)).to(tl.int32), 1)
    # The deepest right node, the lowest among equals.
    key = tl.max(tl.where(b_right != 0, b_depth * BLOCK_N + (BLOCK_N - 1 - o_n), -1), 0)
    accepted, last = key // BLOCK_N, BLOCK_N - 1 - key % BLOCK_N

    o_p = tl.arange(0, BLOCK_P)
    m_p = o_p < places
    b_path = tl.load(paths + last * places + o_p, mask=m_p, other=0)
    b_emitted = tl.load(next_tokens + b_path, mask=m_p, other=0)
    b_end = tl.zeros((BLOCK_P,), tl.int32)
    for first in range(0, ends, BLOCK_E):
        o_e = first + tl.arange(0, BLOCK_E)
        m_e = o_e < ends
        b_eos = tl.load(eos + o_e, mask=m_e, other=0)
        b_end |= tl.max(((b_emitted[:, None] == b_eos[None, :]) & m_e[None, :]).to(tl.int32), 1)
    first_end = tl.min(tl.where((b_end != 0) & (o_p <= accepted), o_p, BLOCK_P), 0)
    found = tl.minimum(accepted, first_end) + 1
    ends_here = ((first_end < found) & (found <= room)) | (found >= room)
    found = tl.where(had_ended, 0, tl.minimum(found, room))

    number = tl.where(had_ended, -1, accepted)
    tl.store(path + i_b * places + o_p, b_path.to(tl.int32), mask=m_p)
    tl.store(kept + i_b, number)
    tl.store(old_lengths + i_b, length)
    tl.store(lengths + i_b, length + number + 1)
    tl.store(output + i_b * width + emitted + o_p, b_emitted, mask=(o_p < found) & (emitted + o_p < width))
    tl.store(count + i_b, emitted + found)
    tl.store(finished + i_b, (had_ended | ends_here).to(tl.int8))
    tl.store(log + i_b * log_width + column, found, mask=column < log_width)
    tl.store(root + i_b, tl.load(next_tokens + last))
    p_hidden = hidden + (i_b * nodes + last) * size
    for first in range(0, size, BLOCK_H):
        o_h = first + tl.arange(0, BLOCK_H)
        m_h = o_h < size
        tl.store(state_hidden + i_b * size + o_h, tl.load(p_hidden + o_h, mask=m_h), mask=m_h)


def tree_accept(
    tokens: Tensor,
    next_tokens: Tensor,
    hidden: Tensor,
    depths: Tensor,
    paths: Tensor,
    eos: Tensor,
    max_new: Tensor,
    step: Tensor,
    *,
    lengths: Tensor,
    root: Tensor,
    state_hidden: Tensor,
    output: Tensor,
    count: Tensor,
    finished: Tensor,
    log: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernel, a program a row; see the public `tree_accept`."""
    (batch, nodes, size), places = hidden.shape, paths.shape[-1]
    path, kept, old_lengths = depths.new_empty(batch, places), depths.new_empty(batch), depths.new_empty(batch)
    if batch:
        config = configuration(launch.describe(tokens.device), hidden.dtype, nodes, places, size)
        with launch.on_device(tokens):
            _tree_accept_kernel[(batch,)](
                *(t.contiguous() for t in (tokens, next_tokens, hidden, depths, paths, eos, max_new)), step,
                lengths, root, state_hidden, output, count, finished.view(torch.int8), log, path, kept, old_lengths,
                nodes, places, eos.numel(), size, output.shape[1], log.shape[1],
                nodes if depths.dim() == 2 else 0, nodes * places if paths.dim() == 3 else 0,
                BLOCK_N=config.block_n, BLOCK_P=config.block_p, PLACES=config.places, BLOCK_E=BLOCK_E,
                BLOCK_H=config.block_h, num_warps=config.num_warps, num_stages=config.num_stages, **launch.OPTIONS,
            )  # fmt: skip
    return path, kept, old_lengths


def specialisations(device: launch.Device) -> Iterator[launch.Specialisation]:
    """Yield plain decoding, the usual trees, the largest, and what else changes the code."""
    for nodes, places in ((1, 1), (64, 5), (128, 6), (256, 9), (256, 256)):
        yield _form(device, torch.bfloat16, nodes, places)
    yield _form(device, torch.bfloat16, 64, 5, size=8192)
    yield _form(device, torch.bfloat16, 64, 5, size=4095)
    yield _form(device, torch.float32, 64, 5)


def _form(
    device: launch.Device, dtype: torch.dtype, nodes: int, places: int, size: int = 4096
) -> launch.Specialisation:
    config = configuration(device, dtype, nodes, places, size)
    kinds = {"hidden": f"*{launch.TRITON_TYPES[dtype]}", "state_hidden": f"*{launch.TRITON_TYPES[dtype]}"}
    for kind, names in (
        ("*i64", ("tokens", "next_tokens", "paths", "eos", "step", "root", "output")),
        ("*i32", ("depths", "max_new", "lengths", "count", "log", "path", "kept", "old_lengths")),
        ("*i8", ("finished",)),
        ("i32", ("nodes", "places", "ends", "size", "width", "log_width", "stride_d_b", "stride_p_b")),
    ):
        kinds |= dict.fromkeys(names, kind)
    aligned = size % 16 == 0
    return launch.Specialisation(
        name=f"tree_accept {launch.TRITON_TYPES[dtype]} N{config.block_n} P{config.block_p} H{size}"
        + (" unit1" if not aligned else ""),
        kernel=_tree_accept_kernel,
        signature={name: kinds[name] for name in _tree_accept_kernel.arg_names if name in kinds},
        constants={"BLOCK_N": config.block_n, "BLOCK_P": config.block_p, "PLACES": config.places, "BLOCK_E": BLOCK_E,
                   "BLOCK_H": config.block_h},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        aligned=("size",) if aligned else (),
    )  # fmt: skip
