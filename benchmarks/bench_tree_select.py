"""The choice of a step's likeliest nodes against PyTorch's own operations.

    python -m benchmarks.bench_tree_select --budget 40

Candidates of trees of 16, 64 and 256 nodes over four heads. The peer is the op's reference, dozens of operations with a
stable sort among them, captured like ours. Bytes: the candidates' tokens and log-probabilities read, the kept nodes'
tensors written; they are so few that launches decide.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import suite
from medusa_decoding import Tree
from medusa_kernels import reference, tree_select

OP = "tree_select"


@dataclass(frozen=True)
class Case(suite.Case):
    """One tree, and how many rows choose from it."""

    nodes: int
    depth: int = 4
    top_k: int = 10
    batch: int = 1

    def shapes(self) -> dict[str, Any]:
        """Return the fields, and how many candidates there are."""
        return super().shapes() | {"candidates": self.candidates}

    @property
    def candidates(self) -> int:
        """M, the root included."""
        return 1 + len(Tree.dynamic(self.nodes, self.depth, self.top_k).choices)

    def bytes(self) -> int:
        """Count what every row reads and writes; the tree itself is read once."""
        places, words = self.depth + 1, -(-self.nodes // 64)
        row = self.candidates * 12 + self.nodes * (8 + 4 + 4 + 8 * words + 8 * places)
        return self.batch * row + self.candidates * (4 + 8 * places)


def cases() -> Iterator[Case]:
    """All cases, the most telling first."""
    for nodes in (64, 16, 256):
        yield Case(nodes)
    yield Case(64, batch=16)


def prepare(case: Case, run: suite.Run) -> suite.Copy:
    """Draw tokens and log-probabilities of one step's candidates."""
    tree = Tree.dynamic(case.nodes, case.depth, case.top_k)
    depths, paths = tree.depths.to(run.device), tree.paths.long().to(run.device)
    tokens = torch.randint(32_000, (case.batch, len(depths)), device=run.device)
    logprobs = -torch.empty(tokens.shape, device=run.device).exponential_()
    ways = {suite.OURS: tree_select, "torch operations": reference.tree_select}
    given = tokens, logprobs, depths, paths, case.nodes
    return suite.Copy({name: functools.partial(way, *given) for name, way in ways.items()})


def measure(case: Case, run: suite.Run) -> None:
    """Measure our op, then PyTorch's operations."""
    run.compare(case, run.copies(prepare, case, case.bytes(), least=2), 0.0, bytes=case.bytes())


SMALL = Case(nodes=16)


if __name__ == "__main__":
    suite.main(__doc__, OP, cases(), measure, budget=40)
