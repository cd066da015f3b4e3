"""Verification of all tree nodes against PyTorch's projection, argmax, log-softmax, entropy and gather.

    python -m benchmarks.bench_tree_verify --budget 120

Greedy verification with and without the statistics, hidden size 4096. Bytes: the projection and the hidden states once;
PyTorch's logits, which it writes and reads again, are not counted for either. The peer of quantised weights has them in
the dtype of the states.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, log_softmax

from benchmarks import gpu, suite
from benchmarks.bench_tree_attention import tree
from benchmarks.stored_weights import quantised, restored, row_bytes
from medusa_kernels import tree_verify

OP = "tree_verify"
HIDDEN = 4096
# Logits near 4.5 are rounded to bf16 by both, in a spacing of 2^-5, after sums in another order: the chosen tokens'
# exact logits may differ by two spacings where they tie after rounding. Statistics average over many logits.
TOLERANCE = {torch.bfloat16: 7e-2, torch.float16: 1e-2, torch.float32: 1e-3}
Result = tuple[Tensor, ...]


@dataclass(frozen=True)
class Case(suite.Case):
    """One verification."""

    vocabulary: int
    nodes: int
    stats: bool
    batch: int
    hidden: int = HIDDEN
    weights: str = "full"

    def bytes(self, element: int, weights: str | None = None) -> int:
        """Count weight and hidden states, and what is written."""
        rows = self.batch * self.nodes
        written = rows * (8 + (12 if self.stats else 0))
        weight = self.vocabulary * row_bytes(weights or self.weights, self.hidden, element)
        return weight + element * self.hidden * rows + written

    def flop(self) -> int:
        """Count the projection."""
        return 2 * self.batch * self.nodes * self.vocabulary * self.hidden


def cases() -> Iterator[Case]:
    """All cases, the most telling first; those of quantised weights last."""
    axes = {
        "batch": (1, 4),
        "stats": (False, True),
        "nodes": (64, 1, 16, 256),
        "vocabulary": (128256, 32000),
    }
    for chosen in suite.by_rank(axes):
        yield Case(**chosen)
    for weights in ("int4 g128", "int8", "nf4 g64"):
        for nodes in (16, 64, 1):
            yield Case(128256, nodes, False, 1, weights=weights)
    yield Case(128256, 16, True, 1, weights="int4 g128")


@dataclass
class Inputs:
    """One copy of a case's inputs."""

    hidden: Tensor
    weight: Tensor
    candidates: Tensor
    parents: Tensor
    plain: Tensor
    stored: dict[str, Any]


def inputs(case: Case, run: suite.Run) -> Inputs:
    """Draw one copy: logits of unit size."""
    make = functools.partial(torch.empty, dtype=run.dtype, device=run.device)
    weight, stored = make(case.vocabulary, case.hidden).normal_(std=case.hidden**-0.5), {}
    plain = weight
    if case.weights != "full":
        weight, scale, codes = quantised(weight, case.weights)
        plain, stored = restored(weight, scale, codes, run.dtype), {"weight_scale": scale, "codes": codes}
    return Inputs(
        make(case.batch, case.nodes, case.hidden).normal_(),
        weight,
        torch.randint(case.vocabulary, (case.batch, case.nodes), device=run.device),
        tree(case.nodes).parents.to(run.device),
        plain,
        stored,
    )


def ours(case: Case, x: Inputs) -> Result:
    """Our op."""
    return tree_verify(x.hidden, x.weight, x.candidates, x.parents, want_stats=case.stats, **x.stored)


def torch_verify(case: Case, x: Inputs) -> Result:
    """PyTorch with all logits in memory."""
    logits = linear(x.hidden, x.plain)
    tokens = logits.argmax(-1)
    if not case.stats:
        return (tokens,)
    logprobs = log_softmax(logits, -1, dtype=torch.float32)
    logsumexp = logits[..., 0].float() - logprobs[..., 0]
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    parents = x.parents.long()
    at_parent = logprobs[:, parents.clamp(min=0)]
    of_child = at_parent.gather(-1, x.candidates[..., None])[..., 0]
    return tokens, logsumexp, entropy, torch.where(parents < 0, 0.0, of_child)


def difference(case: Case, x: Inputs, one: Result, other: Result) -> float:
    """Return the largest difference of the chosen tokens' exact logits and of the statistics.

    The tokens themselves may differ where rounded logits tie.
    """
    logits = [torch.einsum("bnh,bnh->bn", x.hidden.float(), x.plain[tokens].float()) for tokens, *_ in (one, other)]
    parts = [(logits[0] - logits[1]).abs().max()]
    if case.stats:
        parts += [(a - b).abs().max() for a, b in zip(one[1:], other[1:], strict=True)]
    return float(torch.stack(parts).max())


def measure(case: Case, run: suite.Run) -> None:
    """Measure our op, then PyTorch."""
    read = case.bytes(run.dtype.itemsize)
    copies = [inputs(case, run) for _ in range(gpu.sets_needed(read, run.device))]

    def error(x: Inputs, way: Callable[[Inputs], Result]) -> float:
        return difference(case, x, ours(case, x), way(x))

    peers = {"torch": functools.partial(torch_verify, case)}
    plain = case.bytes(run.dtype.itemsize, "full")
    tolerance, mine = TOLERANCE[run.dtype], functools.partial(ours, case)
    run.compare(case, copies, mine, peers, error, tolerance, bytes=read, peer_bytes=plain, flop=case.flop())


SMALL = Case(vocabulary=1000, nodes=5, stats=True, batch=1, hidden=256)


if __name__ == "__main__":
    suite.main(__doc__, OP, cases(), measure, budget=120)
