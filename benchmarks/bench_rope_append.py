"""Rotary embedding and both cache writes against transformers' `apply_rotary_pos_emb` and `index_copy_`.

    python -m benchmarks.bench_rope_append --budget 60

One layer's work. For the peer, the rows of cosines and sines are looked up outside the timing, once for all layers as
transformers does; our op looks them up itself. Bytes: q, k and v read, q, k and v written, the table rows. These are a
few hundred kilobytes, so the time is that of launches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from benchmarks import gpu, suite
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


@dataclass
class Inputs:
    """One copy of a case's inputs."""

    q: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor
    sin: Tensor
    k_cache: Tensor
    v_cache: Tensor
    cache_lens: Tensor
    depths: Tensor
    at_cos: Tensor
    at_sin: Tensor
    rows: Tensor


def inputs(case: Case, run: suite.Run) -> Inputs:
    """Draw one copy; the cache holds the tree's rows after the prefix."""
    make = functools.partial(torch.empty, dtype=run.dtype, device=run.device)
    depths = tree(case.nodes).depths.to(run.device)
    positions = torch.arange(case.prefix + case.nodes, device=run.device)
    frequencies = 10000.0 ** (-torch.arange(0, case.head_dim, 2, device=run.device) / case.head_dim)
    angles = torch.outer(positions.float(), frequencies).repeat(1, 2)
    cos, sin = angles.cos().to(run.dtype), angles.sin().to(run.dtype)
    at = (case.prefix + depths).long()
    cache = make(2, case.batch, case.kv_heads, case.prefix + case.nodes, case.head_dim).normal_()
    return Inputs(
        make(case.batch, case.nodes, case.heads, case.head_dim).normal_(),
        make(case.batch, case.nodes, case.kv_heads, case.head_dim).normal_(),
        make(case.batch, case.nodes, case.kv_heads, case.head_dim).normal_(),
        cos,
        sin,
        cache[0],
        cache[1],
        torch.full((case.batch,), case.prefix, dtype=torch.int32, device=run.device),
        depths,
        cos[at][None],
        sin[at][None],
        torch.arange(case.prefix, case.prefix + case.nodes, device=run.device),
    )


def ours(x: Inputs) -> Tensor:
    """Our op."""
    return rope_append(x.q, x.k, x.v, x.cos, x.sin, x.k_cache, x.v_cache, x.cache_lens, x.depths)


def transformers_way(x: Inputs) -> Tensor:
    """Rotate as transformers does, then copy the rows into the cache as its static cache does."""
    q, k = apply_rotary_pos_emb(x.q.transpose(1, 2), x.k.transpose(1, 2), x.at_cos, x.at_sin)
    x.k_cache.index_copy_(2, x.rows, k)
    x.v_cache.index_copy_(2, x.rows, x.v.transpose(1, 2))
    return q.transpose(1, 2)


def difference(x: Inputs, way: Callable[[Inputs], Tensor]) -> float:
    """Return the largest difference of the queries and of the written rows; the rows are poisoned in between."""
    results = []
    for one in (ours, way):
        written = [cache[:, :, x.rows[0] :] for cache in (x.k_cache, x.v_cache)]
        for rows in written:
            rows.fill_(torch.nan)
        results.append([one(x).clone(), *(rows.clone() for rows in written)])
    return float(torch.stack([(a.float() - b.float()).abs().max() for a, b in zip(*results, strict=True)]).max())


def measure(case: Case, run: suite.Run) -> None:
    """Measure our op, then transformers' way."""
    moved = case.bytes(run.dtype.itemsize)
    copies = [inputs(case, run) for _ in range(gpu.sets_needed(moved, run.device))]
    peers = {"transformers": transformers_way}
    run.compare(case, copies, ours, peers, difference, TOLERANCE[run.dtype], bytes=moved)


SMALL = Case(("small",), heads=4, kv_heads=2, head_dim=64, nodes=16, prefix=500, batch=1)


if __name__ == "__main__":
    suite.main(__doc__, OP, cases(), measure, budget=60)
