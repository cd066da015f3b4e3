"""A loss over a vocabulary, and its gradient, for a chunk of positions at a time: never the logits of all positions.

The gradient of a chunk's logits is known as soon as the logits are, so the forward pass takes it to the states and the
weights at once. Backward only scales these gradients. Softmax, loss and sums are fp32 (fp64 for fp64 inputs).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from medusa_decoding.training.data.targets import send
from medusa_decoding.training.loss.projections import Projection
from medusa_kernels.cross_entropy import cross_entropy

CHUNK_ELEMENTS = {"cpu": 2**25, "cuda": 2**26}
"""Logits of a chunk by default, by the type of the device: 128 and 256 MiB of fp32."""
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
    """The loss of logits, chunk by chunk: the `sums` and `hits` so far; see `Loss`.

    `width` is that of its teacher's projection, 0 without one.
    """

    sums: Tensor
    hits: Tensor
    width: int

    def __call__(self, head: int, rows: slice, logits: Tensor, dtype: torch.dtype | None) -> Tensor | None:
        """Count a chunk; return the gradient of its logits in `dtype` or theirs, or None if that is None.

        The gradient may overwrite the logits.
        """


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
    if chunk is None:
        chunk = max(1, CHUNK_ELEMENTS[states.device.type] // max(projection.width, criterion.width))
        chunk = chunk - chunk % 128 or chunk  # whole tiles of a GPU's product
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
        # fp16 would lose small gradients before a loss scaler has multiplied them.
        kind = torch.float32 if states.dtype == torch.float16 else states.dtype
        gradient = torch.zeros_like(states, dtype=kind) if wants_gradient else None
        for head in range(heads):
            for start in range(0, positions, chunk):
                rows = slice(start, start + chunk)
                logits = projection.logits(head, rows, states[head, rows], wants_gradient)
                found = criterion(head, rows, logits, projection.dtype if wants_gradient else None)
                del logits
                if gradient is not None and found is not None:
                    gradient[head, rows] = projection.backward(head, rows, found, scales[head])
                del found
            projection.end_head(head)
        if gradient is not None:
            ctx.dtypes = (states.dtype, *(p.dtype for p in parameters))
            ctx.gradients = [gradient, *projection.gradients()]
        return (criterion.sums * scales).sum()

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

    width = 0

    def __init__(self, targets: Tensor, top: int, dtype: torch.dtype) -> None:
        self.sums = torch.zeros(len(targets), dtype=dtype, device=targets.device)
        self.hits = torch.zeros(len(targets), top, dtype=torch.int64, device=targets.device)
        self.targets = targets
        self._ranks = torch.arange(top, device=targets.device)

    def __call__(self, head: int, rows: slice, logits: Tensor, dtype: torch.dtype | None) -> Tensor | None:
        """See `Criterion`."""
        top = self.hits.shape[1]
        losses, ranks, gradient = cross_entropy(logits, self.targets[head, rows], top, dtype)
        self.sums[head] += losses.sum()
        if top:
            self.hits[head] += (ranks[:, None] <= self._ranks).sum(0)
        return gradient
