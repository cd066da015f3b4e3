"""A step's Gumbel noise against PyTorch's own operations.

    python -m benchmarks.bench_gumbel_noise --budget 20

Five places (four heads and the root) of each row. The peer is the op's reference, hundreds of operations on int64,
captured like ours. Bytes: the noise written; nothing is read.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks import suite
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


def prepare(case: Case, run: suite.Run) -> suite.Copy:
    """Draw seeds, and places of an answer."""
    seeds = torch.randint(2**62, (case.batch,), device=run.device)
    given = seeds, torch.randint(1000, (case.batch,), dtype=torch.int32, device=run.device), case.rows, case.vocabulary
    ways = {suite.OURS: gumbel_noise, "torch operations": reference.gumbel_noise}
    return suite.Copy({name: functools.partial(way, *given) for name, way in ways.items()})


def measure(case: Case, run: suite.Run) -> None:
    """Measure our op, then PyTorch's operations."""
    run.compare(case, run.copies(prepare, case, case.bytes(), least=2), 1e-5, bytes=case.bytes())


SMALL = Case(32000)


if __name__ == "__main__":
    suite.main(__doc__, OP, cases(), measure, budget=20)
