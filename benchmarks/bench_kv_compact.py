"""Compaction of the cache against `index_select` and copies, a layer at a time and over the whole block.

    python -m benchmarks.bench_kv_compact --budget 60

32 layers, 4,096 rows; a path of five nodes, four of them accepted below the root, and a path that lies in place
already. A cache is far larger than what a call touches, so the calls go through positions in the cache, and through
several caches where the rows of one are too few for a cold L2. Bytes: moved rows read and written. The peers know the
position on the host (our op reads it on the device), except the one with `index_copy_`.
"""

from __future__ import annotations

from collections.abc import Iterator
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


def positions(case: Case, run: suite.Run, sets: int) -> Iterator[suite.Copy]:
    """Draw as many caches as `sets` positions need, and lay the positions over them."""
    a_cache = case.rows // WINDOW - 1
    shape = (case.layers, 2, case.batch, case.kv_heads, case.rows, case.head_dim)
    caches = [torch.empty(shape, dtype=run.dtype, device=run.device).normal_() for _ in range(-(-sets // a_cache))]
    path = torch.tensor(case.path, dtype=torch.int32, device=run.device).expand(case.batch, -1).contiguous()
    accepted = torch.full((case.batch,), len(case.path) - 1, dtype=torch.int32, device=run.device)
    for i in range(sets):
        # An odd offset: a prefix's length is any number.
        yield _position(caches[i // a_cache], WINDOW * (i % a_cache) + 13, path, accepted)


def _position(kv: Tensor, first: int, path: Tensor, accepted: Tensor) -> suite.Copy:
    source, after = path[0].long() + first, first + path.shape[1]
    target = torch.arange(first, after, device=kv.device)
    lens, window = torch.full_like(accepted, first), kv[..., first : first + WINDOW, :]

    def layer_copy() -> None:
        """Gather and copy the keys and the values of each layer."""
        for of_layer in kv:
            for part in of_layer:
                part[..., first:after, :].copy_(part.index_select(2, source))

    ways: dict[str, suite.Way] = {
        suite.OURS: lambda: kv_compact(kv, lens, path, accepted),
        # One gather over the whole block, and one copy to where it belongs; or one scatter to a position on the device.
        "torch block copy_": lambda: kv[..., first:after, :].copy_(kv.index_select(4, source)),
        "torch block index_copy_": lambda: kv.index_copy_(4, target, kv.index_select(4, source)),
        "torch copy_ a layer": layer_copy,
    }

    def moved(way: suite.Way) -> suite.Way:
        """Return a call that gives the rows of the cache afterwards, and takes them back."""

        def call() -> Tensor:
            before = window.clone()
            way()
            found = window.clone()
            window.copy_(before)
            return found

        return call

    return suite.Copy(ways, lambda one, other: suite.largest_difference(moved(one), moved(other)))


def measure(case: Case, run: suite.Run) -> None:
    """Measure our op, then the peers."""
    element = run.dtype.itemsize
    touched = case.bytes(element) or case.row_bytes(element)
    copies = list(positions(case, run, max(2, gpu.sets_needed(touched, run.device))))
    run.compare(case, copies, 0.0, bytes=case.bytes(element))


SMALL = Case(kv_heads=2, path=SCATTERED, layers=4, rows=256, head_dim=64)


if __name__ == "__main__":
    suite.main(__doc__, OP, cases(), measure, budget=60)
