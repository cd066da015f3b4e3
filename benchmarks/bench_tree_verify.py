"""Verification of all tree nodes against PyTorch's projection, argmax, log-softmax, entropy and gather.

    python -m benchmarks.bench_tree_verify --budget 120

Greedy verification with and without the statistics, hidden size 4096. Bytes: the projection and the hidden states once;
PyTorch's logits, which it writes and reads again, are not counted for either. The peer of quantised weights has them in
the dtype of the states.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, log_softmax

from benchmarks import suite
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


def prepare(case: Case, run: suite.Run) -> suite.Copy:
    """Draw one copy: logits of unit size."""
    make = functools.partial(torch.empty, dtype=run.dtype, device=run.device)
    weight, stored = make(case.vocabulary, case.hidden).normal_(std=case.hidden**-0.5), {}
    plain = weight
    if case.weights != "full":
        weight, scale, codes = quantised(weight, case.weights)
        plain, stored = restored(weight, scale, codes, run.dtype), {"weight_scale": scale, "codes": codes}
    hidden = make(case.batch, case.nodes, case.hidden).normal_()
    candidates = torch.randint(case.vocabulary, (case.batch, case.nodes), device=run.device)
    parents = tree(case.nodes).parents.to(run.device)

    def torch_verify() -> Result:
        """Verify with all logits in memory."""
        logits = linear(hidden, plain)
        tokens = logits.argmax(-1)
        if not case.stats:
            return (tokens,)
        logprobs = log_softmax(logits, -1, dtype=torch.float32)
        logsumexp = logits[..., 0].float() - logprobs[..., 0]
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        at_parent = logprobs[:, parents.long().clamp(min=0)]
        of_child = at_parent.gather(-1, candidates[..., None])[..., 0]
        return tokens, logsumexp, entropy, torch.where(parents < 0, 0.0, of_child)

    def difference(one: suite.Way, other: suite.Way) -> float:
        """Compare the chosen tokens' exact logits and the statistics; tokens differ where rounded logits tie."""
        results = [(torch.einsum("bnh,bnh->bn", hidden.float(), plain[x[0]].float()), *x[1:]) for x in (one(), other())]
        count = 4 if case.stats else 1
        return suite.largest_difference(*(functools.partial(tuple, result[:count]) for result in results))

    ours = functools.partial(tree_verify, hidden, weight, candidates, parents, want_stats=case.stats, **stored)
    return suite.Copy({suite.OURS: ours, "torch": torch_verify}, difference)


def measure(case: Case, run: suite.Run) -> None:
    """Measure our op, then PyTorch."""
    read, plain = (case.bytes(run.dtype.itemsize, weights) for weights in (None, "full"))
    copies = run.copies(prepare, case, read)
    run.compare(case, copies, TOLERANCE[run.dtype], bytes=read, peer_bytes=plain, flop=case.flop())


SMALL = Case(vocabulary=1000, nodes=5, stats=True, batch=1, hidden=256)


if __name__ == "__main__":
    suite.main(__doc__, OP, cases(), measure, budget=120)
