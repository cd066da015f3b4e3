"""Rotary embedding and both cache writes against transformers' `apply_rotary_pos_emb` and `index_copy_`.

    python -m benchmarks.bench_rope_append --budget 60

One layer's work. For the peer, the rows of cosines and sines are looked up outside the timing, once for all layers as
transformers does; our op looks them up itself. Bytes: q, k and v read, q, k and v written, the table rows. These are a
few hundred kilobytes, so the time is that of launches.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from benchmarks import suite
from benchmarks.bench_tree_attention import HEADS, tree
from medusa_kernels import rope_append

OP = "rope_append"
# The two are specified to be bit-equal; a GPU's fused multiply-add may round once less: one spacing of bf16 at 4.
TOLERANCE = {torch.bfloat16: 3.2e-2, torch.float16: 4e-3, torch.float32: 1e-5}
PREFIX = 128


@dataclass(frozen=True)
class Case(suite.Case):
    """One shape; `models` are those that have these heads."""

    models: tuple[str, ...]
    heads: int
    kv_heads: int
    head_dim: int
    nodes: int
    prefix: int
    batch: int

    def bytes(self, element: int) -> int:
        """Count what is read and written, and the two table rows of each node."""
        moved = 2 * (self.heads + 2 * self.kv_heads) + 2
        return element * self.batch * self.nodes * moved * self.head_dim


def cases() -> Iterator[Case]:
    """All cases, the most telling first."""
    for chosen in suite.by_rank({"nodes": (64, 1, 16, 256), "batch": (1, 16), "model": tuple(HEADS)[:2]}):
        name = chosen.pop("model")
        yield Case(tuple(name.split(", ")), *HEADS[name], prefix=PREFIX, **chosen)


def prepare(case: Case, run: suite.Run) -> suite.Copy:
    """Draw one copy of the inputs; the cache holds the tree's rows after the prefix."""
    make = functools.partial(torch.empty, dtype=run.dtype, device=run.device)
    depths = tree(case.nodes).depths.to(run.device)
    positions = torch.arange(case.prefix + case.nodes, device=run.device)
    frequencies = 10000.0 ** (-torch.arange(0, case.head_dim, 2, device=run.device) / case.head_dim)
    angles = torch.outer(positions.float(), frequencies).repeat(1, 2)
    cos, sin = angles.cos().to(run.dtype), angles.sin().to(run.dtype)
    at, rows = (case.prefix + depths).long(), positions[case.prefix :]
    caches = make(2, case.batch, case.kv_heads, case.prefix + case.nodes, case.head_dim).normal_()
    q, k, v = (
        make(case.batch, case.nodes, heads, case.head_dim).normal_()
        for heads in (case.heads, case.kv_heads, case.kv_heads)
    )
    lens = torch.full((case.batch,), case.prefix, dtype=torch.int32, device=run.device)
    at_cos, at_sin = cos[at][None], sin[at][None]

    def transformers_way() -> Tensor:
        """Rotate as transformers does, then copy the rows into the cache as its static cache does."""
        rotated, keys = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), at_cos, at_sin)
        caches[0].index_copy_(2, rows, keys)
        caches[1].index_copy_(2, rows, v.transpose(1, 2))
        return rotated.transpose(1, 2)

    def written(way: suite.Way) -> suite.Way:
        """Return a call that gives the queries and the written rows, which are poisoned before."""

        def call() -> tuple[Tensor, ...]:
            caches[..., case.prefix :, :].fill_(torch.nan)
            return way().clone(), caches[..., case.prefix :, :].clone()

        return call

    ours = functools.partial(rope_append, q, k, v, cos, sin, *caches, lens, depths)
    return suite.Copy(
        {suite.OURS: ours, "transformers": transformers_way},
        lambda one, other: suite.largest_difference(written(one), written(other)),
    )


def measure(case: Case, run: suite.Run) -> None:
    """Measure our op, then transformers' way."""
    moved = case.bytes(run.dtype.itemsize)
    run.compare(case, run.copies(prepare, case, moved), TOLERANCE[run.dtype], bytes=moved)


SMALL = Case(("small",), heads=4, kv_heads=2, head_dim=64, nodes=16, prefix=500, batch=1)


if __name__ == "__main__":
    suite.main(__doc__, OP, cases(), measure, budget=60)
