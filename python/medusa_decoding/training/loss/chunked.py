"""A loss over a vocabulary, and its gradient, for a chunk of positions at a time: never the logits of all positions.

The gradient of a chunk's logits is known as soon as the logits are, so the forward pass takes it to the states and the
weights at once. Backward only scales these gradients. Softmax, loss and sums are fp32 (fp64 for fp64 inputs).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from medusa_decoding.training.data.targets import IGNORE, send
from medusa_decoding.training.loss.projections import Projection

CHUNK_ELEMENTS = 2**25
"""Logits of a chunk by default: 128 MiB of fp32."""
TOP = 10
"""Accuracies are counted for the top 1 to 10 candidates by default."""


@dataclass(frozen=True)
class Loss:
    """A loss and the counts that it is made of, per head.

    Attributes:
        loss: scalar with gradient, fp32 (fp64 for fp64 inputs).
        sums: [K], the summed losses, without gradient.
        counts: int64 [K], how many positions they are of.
        outside: int64 [K], targets that are missing from a trimmed vocabulary.
        hits: int64 [K, top], targets among the head's top n candidates, n from 1 to top.
    """

    loss: Tensor
    sums: Tensor
    counts: Tensor
    outside: Tensor
    hits: Tensor


class Criterion(Protocol):
    """The loss of a chunk's logits, with the `sums` and `hits` so far; see `Loss`."""

    sums: Tensor
    hits: Tensor

    def __call__(self, head: int, rows: slice, logits: Tensor, wants_gradient: bool) -> Tensor:
        """Return the summed loss of a chunk; if a gradient is wanted, overwrite the logits with theirs."""


def chunked_loss(
    projection: Projection,
    criterion: Criterion,
    states: Tensor,
    counts: Tensor,
    *,
    outside: Tensor | None = None,
    weights: Tensor | None = None,
    normaliser: Tensor | None = None,
    chunk: int | None = None,
) -> Loss:
    """Return the sum over heads of weights[k] / normaliser[k] times the summed loss of head k.

    `projection` makes logits of states [K, T, H], `criterion` losses of logits. By default the weights [K] are ones and
    the normaliser [K] is `counts`. For `counts` and `outside` (zeros by default) see `Loss`, for `chunk` `medusa_loss`.
    Only one backward pass is possible.
    """
    weights = torch.ones(len(counts)) if weights is None else weights
    normaliser = counts if normaliser is None else normaliser
    scales = send(weights.to(criterion.sums.dtype), criterion.sums.device) / normaliser.to(criterion.sums).clamp(min=1)
    wants_gradient = torch.is_grad_enabled() and any(
        tensor.requires_grad for tensor in (states, *projection.parameters)
    )
    chunk = max(1, CHUNK_ELEMENTS // projection.size) if chunk is None else chunk
    total = _Chunked.apply(projection, criterion, scales, chunk, wants_gradient, states, *projection.parameters)
    outside = torch.zeros_like(counts) if outside is None else outside
    return Loss(total, criterion.sums, counts, outside, criterion.hits)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        projection: Projection,
        criterion: Criterion,
        scales: Tensor,
        chunk: int,
        wants_gradient: bool,
        states: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        heads, positions, _ = states.shape
        total = states.new_zeros((), dtype=scales.dtype)
        # fp16 would lose small gradients before a loss scaler has multiplied them.
        kind = torch.float32 if states.dtype == torch.float16 else states.dtype
        gradient = torch.zeros_like(states, dtype=kind) if wants_gradient else None
        for head in range(heads):
            for start in range(0, positions, chunk):
                rows = slice(start, start + chunk)
                logits = projection.logits(head, rows, states[head, rows], wants_gradient)
                total += criterion(head, rows, logits, wants_gradient) * scales[head]
                if gradient is not None:
                    gradient[head, rows] = projection.backward(head, rows, logits, scales[head])
                del logits
            projection.end_head(head)
        if gradient is not None:
            ctx.dtypes = (states.dtype, *(p.dtype for p in parameters))
            ctx.gradients = [gradient, *projection.gradients()]
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        found, ctx.gradients = ctx.gradients, ()  # handed on, not copied: a second pass finds none
        scaled = [None if g is None else g.mul_(upstream).to(kind) for g, kind in zip(found, ctx.dtypes, strict=True)]
        return *[None] * 5, *scaled


class CrossEntropy:
    """The cross-entropy of each head with its targets, -log softmax(logits)[target], and the heads' accuracies.

    A `Criterion` for targets int64 [K, T], rows of the projection or IGNORE. Hits are counted for the top 1 to `top`
    candidates (0: none). Of equal logits the lower row goes first.
    """

    def __init__(self, targets: Tensor, top: int, dtype: torch.dtype) -> None:
        self.sums = torch.zeros(len(targets), dtype=dtype, device=targets.device)
        self.hits = torch.zeros(len(targets), top, dtype=torch.int64, device=targets.device)
        self.targets, self._top = targets, top
        self._ranks = torch.arange(top, device=targets.device)

    def __call__(self, head: int, rows: slice, logits: Tensor, wants_gradient: bool) -> Tensor:
        """See `Criterion`."""
        targets = self.targets[head, rows]
        valid = targets != IGNORE
        index = targets.clamp(min=0)[:, None]
        chosen = logits.gather(1, index)
        if self._top:
            rank = _rank(logits, chosen, index) if self._top > 1 else _first_or_not(logits, chosen, index)
            self.hits[head] += ((rank[:, None] <= self._ranks) & valid[:, None]).sum(0)
        # The logarithm of the largest probability gives that of the target's, however small it is: one pass of softmax,
        # several times as fast on a CPU as `logsumexp` and `exp`.
        largest = logits.amax(1, keepdim=True)
        probabilities = torch.softmax(logits, 1, out=logits if wants_gradient else None)
        loss = largest - chosen - probabilities.amax(1, keepdim=True).log()
        loss = loss.squeeze(1).masked_fill(~valid, 0.0).sum()
        self.sums[head] += loss
        if wants_gradient:
            probabilities.scatter_(1, index, probabilities.gather(1, index) - 1)
            probabilities.mul_(valid[:, None])
        return loss


def _first_or_not(logits: Tensor, chosen: Tensor, index: Tensor) -> Tensor:
    # 0 for the first of the largest logits, else 1: one pass instead of the rank's four.
    return ((logits.argmax(1, keepdim=True) != index) | chosen.isnan()).long().squeeze(1)


def _rank(logits: Tensor, chosen: Tensor, index: Tensor) -> Tensor:
    # Counts what is below, so that a NaN ranks last.
    columns = torch.arange(logits.shape[1], device=logits.device)
    below = (logits < chosen).sum(1) + ((logits == chosen) & (columns >= index)).sum(1)
    return logits.shape[1] - below
