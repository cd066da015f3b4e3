"""The Medusa heads and their top-k against PyTorch's products, top-k and log-softmax.

    python -m benchmarks.bench_heads_topk --budget 200

Four heads of a model with hidden size 4096: own, trimmed and shared projections, also in 8 and 4 bits. Bytes: the
weights that are read once (with `gather`, the rows of the shared projection that the token map names), their scales and
biases. PyTorch has no product of quantised weights with the same meaning, so its peer there has the same weights in
bf16, and its bytes. Our op is also timed with a root, noise and a temperature, next to itself without.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, log_softmax, silu

from benchmarks import suite
from benchmarks.stored_weights import quantised, restored, row_bytes
from medusa_kernels import heads_topk

OP = "heads_topk"
K, HIDDEN, BEST = 4, 4096, 10
# Logits near 4.5 are rounded to bf16, in a spacing of 2^-5, after sums in another order: two spacings at most.
TOLERANCE = {torch.bfloat16: 7e-2, torch.float16: 1e-2, torch.float32: 1e-3}
ROOTED = "medusa_kernels, root and noise"


@dataclass(frozen=True)
class Case(suite.Case):
    """One form of the heads.

    Attributes:
        form: "own" (a projection a head), "shared" (one for all), or "gather" (shared, rows named by a token map).
        rows: rows that are scored a head.
        vocabulary: the model's; more than `rows` where the heads are trimmed.
        weights: "full" (the dtype of the run), or one of `stored_weights.FORMS`.
        batch: rows of hidden states.
    """

    form: str
    rows: int
    vocabulary: int
    weights: str
    batch: int
    heads: int = K
    hidden: int = HIDDEN
    k: int = BEST

    def bytes(self, element: int, weights: str | None = None) -> int:
        """Count the weights that are read, their scales and the biases once."""
        projections = self.heads if self.form == "own" else 1
        projection = projections * self.rows * row_bytes(weights or self.weights, self.hidden, element)
        return projection + self.heads * (self.hidden + 1) * self.hidden * element


def cases() -> Iterator[Case]:
    """All cases, the most telling first."""
    forms = [
        ("own", 32000, 32000, "full"),
        ("own", 32768, 128256, "full"),
        ("shared", 128256, 128256, "full"),
        ("own", 32000, 32000, "int8"),
        ("own", 32000, 32000, "fp8"),
        ("own", 32000, 32000, "int4 g128"),
        ("shared", 128256, 128256, "int4 g128"),
        ("gather", 32768, 128256, "full"),
        ("own", 128256, 128256, "full"),
        ("own", 8192, 128256, "full"),
        ("gather", 8192, 128256, "full"),
        ("shared", 32000, 32000, "full"),
    ]
    for batch in (1, 4):
        for form in forms:
            yield Case(*form, batch=batch)


def prepare(case: Case, run: suite.Run) -> suite.Copy:
    """Draw hidden states of unit size, and weights that keep it."""
    make = functools.partial(torch.empty, dtype=run.dtype, device=run.device)
    spread, square = case.hidden**-0.5, (case.heads, case.hidden, case.hidden)
    shape: tuple[int, ...] = (case.heads, case.rows, case.hidden)
    if case.form != "own":
        shape = (case.vocabulary if case.form == "gather" else case.rows, case.hidden)
    w2, suffix = make(shape).normal_(std=spread), ""
    plain, options = w2, {}  # the projection as PyTorch takes it: not quantised, rows gathered
    if case.weights != "full":
        w2, scale, codes = quantised(w2, case.weights)
        plain, options = restored(w2, scale, codes, run.dtype), {"w2_scale": scale, "codes": codes}
        suffix = f", {str(run.dtype).removeprefix('torch.')} weights"
    tokens = None
    if case.rows < case.vocabulary:
        tokens = torch.randperm(case.vocabulary, device=run.device)[: case.rows].sort().values
        options["token_map"] = tokens
    if case.form == "gather":
        # PyTorch has no product over named rows: its peer keeps a copy of them.
        plain, options["gather"] = w2[tokens], True
    hidden, w1 = make(case.batch, case.hidden).normal_(), make(square).normal_(std=spread)
    b1 = make(case.heads, case.hidden).normal_(std=0.1)
    sampling = {
        "root": make(case.batch, case.hidden).normal_(),
        "w_root": make(square).normal_(std=spread),
        "noise": -make(case.batch, case.heads, case.vocabulary, dtype=torch.float32).exponential_().log(),
        "temperature": 0.8,
    }

    def states() -> Tensor:
        """Return the heads' states `[B, K, H]`; all heads read one input, so their weights are one matrix."""
        inner = linear(hidden, w1.view(-1, case.hidden), b1.view(-1)).view(-1, case.heads, case.hidden)
        return hidden[:, None] + silu(inner)

    def top(logits: Tensor) -> tuple[Tensor, Tensor]:
        best, found = logits.topk(case.k, dim=-1)
        logprobs = log_softmax(logits, -1, dtype=torch.float32).gather(-1, found)
        return logprobs, found if tokens is None else tokens[found]

    def batched() -> tuple[Tensor, Tensor]:
        """Return one batched product for all heads (one plain product if they share the projection)."""
        if case.form != "own":
            return top(linear(states(), plain))
        return top(torch.bmm(states().transpose(0, 1), plain.transpose(1, 2)).transpose(0, 1))

    def one_each() -> tuple[Tensor, Tensor]:
        of_heads = states()
        return top(torch.stack([linear(of_heads[:, j], plain[j]) for j in range(case.heads)], dim=1))

    ours = functools.partial(heads_topk, hidden, w1, b1, w2, case.k, **options)
    ways: dict[str, suite.Way] = {suite.OURS: ours, f"torch batched{suffix}": batched}
    if case.form == "own":
        ways[f"torch a head{suffix}"] = one_each

    def difference(one: suite.Way, other: suite.Way) -> float:
        return float((one()[0] - other()[0]).abs().max())

    return suite.Copy(ways, difference, {ROOTED: functools.partial(ours, **sampling)})


def measure(case: Case, run: suite.Run) -> None:
    """Measure our op, then PyTorch's ways."""
    read, plain = (case.bytes(run.dtype.itemsize, weights) for weights in (None, "full"))
    copies = run.copies(prepare, case, read)
    timing = run.compare(case, copies, TOLERANCE[run.dtype], bytes=read, peer_bytes=plain)
    run.time(
        case,
        ROOTED,
        lambda i: copies[i].others[ROOTED],
        len(copies),
        bytes=read + case.heads * (case.hidden**2 * run.dtype.itemsize + case.batch * case.rows * 4),
        ours_us=round(timing.median_us, 2),
        **suite.served(OP, run.device),
    )


SMALL = Case("own", 1000, 1000, "full", batch=1, heads=2, hidden=256)


if __name__ == "__main__":
    suite.main(__doc__, OP, cases(), measure, budget=200)
