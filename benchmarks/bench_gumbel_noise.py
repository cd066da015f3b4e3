"""A step's Gumbel noise against PyTorch's own operations.

    python -m benchmarks.bench_gumbel_noise --budget 20

Five places (four heads and the root) of each row. The peer is the op's reference, hundreds of operations on int64,
captured like ours. Bytes: the noise written; nothing is read.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks import gpu, suite
from medusa_kernels import gumbel_noise, reference

OP = "gumbel_noise"


@dataclass(frozen=True)
class Case(suite.Case):
    """One step's noise."""

    vocabulary: int
    batch: int = 1
    rows: int = 5

    def bytes(self) -> int:
        """Count what is written."""
        return 4 * self.batch * self.rows * self.vocabulary


def cases() -> Iterator[Case]:
    """All cases, the most telling first."""
    for vocabulary in (128256, 32000):
        for batch in (1, 16):
            yield Case(vocabulary, batch)


@dataclass
class Inputs:
    """The texts' seeds and places."""

    seeds: Tensor
    first: Tensor


def inputs(case: Case, run: suite.Run) -> Inputs:
    """Draw seeds, and places of an answer."""
    seeds = torch.randint(2**62, (case.batch,), device=run.device)
    return Inputs(seeds, torch.randint(1000, (case.batch,), dtype=torch.int32, device=run.device))


def ours(case: Case, x: Inputs) -> Tensor:
    """Our op."""
    return gumbel_noise(x.seeds, x.first, case.rows, case.vocabulary)


def plain(case: Case, x: Inputs) -> Tensor:
    """PyTorch, operation by operation."""
    return reference.gumbel_noise(x.seeds, x.first, case.rows, case.vocabulary)


TOLERANCE = 1e-5


def measure(case: Case, run: suite.Run) -> None:
    """Measure our op, then PyTorch's operations."""
    sets = [inputs(case, run) for _ in range(max(2, gpu.sets_needed(case.bytes(), run.device)))]

    def error(x: Inputs, way: Any) -> float:
        return float((ours(case, x) - way(x)).abs().max())

    peers = {"torch operations": functools.partial(plain, case)}
    run.compare(case, sets, functools.partial(ours, case), peers, error, TOLERANCE, bytes=case.bytes())


SMALL = Case(32000)


if __name__ == "__main__":
    suite.main(__doc__, OP, cases(), measure, budget=20)
