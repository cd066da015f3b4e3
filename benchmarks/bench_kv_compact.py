"""Compaction of the cache against `index_select` and copies, a layer at a time and over the whole block.

    python -m benchmarks.bench_kv_compact --budget 60

32 layers, 4,096 rows; a path of five nodes, four of them accepted below the root, and a path that lies in place
already. A cache is far larger than what a call touches, so the calls go through positions in the cache, and through
several caches where the rows of one are too few for a cold L2. Bytes: moved rows read and written. The peers know the
position on the host (our op reads it on the device), except the one with `index_copy_`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks import gpu, suite
from medusa_kernels import kv_compact

OP = "kv_compact"
WINDOW = 64
SCATTERED, IN_PLACE = (0, 3, 11, 27, 50), (0, 1, 2, 3, 4)


@dataclass(frozen=True)
class Case(suite.Case):
    """One cache and one path, all of whose nodes are accepted."""

    kv_heads: int
    path: tuple[int, ...]
    batch: int = 1
    layers: int = 32
    rows: int = 4096
    head_dim: int = 128

    def row_bytes(self, element: int) -> int:
        """Bytes of one cache row in all layers, keys and values."""
        return self.layers * 2 * self.batch * self.kv_heads * self.head_dim * element

    def bytes(self, element: int) -> int:
        """Count moved rows twice, read and written."""
        return 2 * self.row_bytes(element) * sum(node != i for i, node in enumerate(self.path))


def cases() -> Iterator[Case]:
    """All cases, the most telling first."""
    for kv_heads in (32, 8):
        for path in (SCATTERED, IN_PLACE):
            yield Case(kv_heads, path)
    yield Case(8, SCATTERED, batch=4)
    yield Case(8, SCATTERED, batch=16)


@dataclass
class Inputs:
    """A position in a cache."""

    kv: Tensor
    cache_lens: Tensor
    path: Tensor
    accept_lens: Tensor
    source: Tensor
    target: Tensor
    first: int
    steps: int


def inputs(case: Case, run: suite.Run, sets: int) -> list[Inputs]:
    """Draw as many caches as `sets` positions need, and lay the positions over them."""
    a_cache = case.rows // WINDOW - 1
    shape = (case.layers, 2, case.batch, case.kv_heads, case.rows, case.head_dim)
    caches = [torch.empty(shape, dtype=run.dtype, device=run.device).normal_() for _ in range(-(-sets // a_cache))]
    path = torch.tensor(case.path, dtype=torch.int32, device=run.device)
    steps = len(case.path)
    found = []
    for i in range(sets):
        # An odd offset: a prefix's length is any number.
        first = WINDOW * (i % a_cache) + 13
        found.append(
            Inputs(
                caches[i // a_cache],
                torch.full((case.batch,), first, dtype=torch.int32, device=run.device),
                path.expand(case.batch, -1).contiguous(),
                torch.full((case.batch,), steps - 1, dtype=torch.int32, device=run.device),
                path.long() + first,
                torch.arange(first, first + steps, device=run.device),
                first,
                steps,
            )
        )
    return found


def ours(x: Inputs) -> None:
    """Our op."""
    kv_compact(x.kv, x.cache_lens, x.path, x.accept_lens)


def block_copy(x: Inputs) -> None:
    """One gather over the whole block and one copy to where it belongs."""
    x.kv[..., x.first : x.first + x.steps, :].copy_(x.kv.index_select(4, x.source))


def block_index_copy(x: Inputs) -> None:
    """One gather and one scatter over the whole block, with the position on the device."""
    x.kv.index_copy_(4, x.target, x.kv.index_select(4, x.source))


def layer_copy(x: Inputs) -> None:
    """A gather and a copy for the keys and the values of each layer."""
    for of_layer in x.kv:
        for part in of_layer:
            part[..., x.first : x.first + x.steps, :].copy_(part.index_select(2, x.source))


PEERS: dict[str, Callable[[Inputs], None]] = {
    "torch block copy_": block_copy,
    "torch block index_copy_": block_index_copy,
    "torch copy_ a layer": layer_copy,
}


def difference(x: Inputs, way: Callable[[Inputs], None]) -> float:
    """Return the largest difference between our result and a peer's, from the same cache rows; both are undone."""
    window = x.kv[..., x.first : x.first + WINDOW, :]
    before = window.clone()
    results = []
    for move in (ours, way):
        move(x)
        results.append(window.clone())
        window.copy_(before)
    return float((results[0].float() - results[1].float()).abs().max())


def measure(case: Case, run: suite.Run) -> None:
    """Measure our op, then the peers."""
    element = run.dtype.itemsize
    touched = case.bytes(element) or case.row_bytes(element)
    positions = inputs(case, run, max(2, gpu.sets_needed(touched, run.device)))
    run.compare(case, positions, ours, PEERS, difference, 0.0, bytes=case.bytes(element))


SMALL = Case(kv_heads=2, path=SCATTERED, layers=4, rows=256, head_dim=64)


if __name__ == "__main__":
    suite.main(__doc__, OP, cases(), measure, budget=60)
