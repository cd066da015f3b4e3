"""The language model's own loss, and Medusa-2's sum of both losses (Medusa paper, section 2.2.2, equation 2)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from medusa_decoding.training.data.targets import IGNORE, check_range, check_vector, shifted_labels
from medusa_decoding.training.loss.chunked import Criterion, CrossEntropy, Loss, chunked_loss
from medusa_decoding.training.loss.projections import Projection, lm_head_projection, sum_type


def language_loss(
    hidden: Tensor,
    lm_head: nn.Module | Tensor,
    labels: Tensor,
    *,
    segments: Tensor | None = None,
    normaliser: Tensor | None = None,
    chunk: int | None = None,
    top: int = 1,
    repeatable: bool = False,
) -> Loss:
    """Next-token cross-entropy of the model itself, L_LM of equation 2, without all logits in memory.

    Args:
        hidden: [T, H] states after the final norm; the gradient goes through them.
        lm_head: module or weight [V, H]; its parameters get a gradient if they require one.
        labels: int64 [T], the token id at each position or IGNORE.
        segments: int64 [T], see `shifted_labels`.
        normaliser: [1], divides the sum; the number of targets without it.
        chunk: positions whose logits are in memory at a time; as many as make 128 MiB without it.
        top: accuracies are counted for the top 1 to `top` candidates; 0 for none.
        repeatable: allow more than one backward pass; costs a copy of every gradient.

    Returns:
        A `Loss` with one entry.

    Raises:
        ValueError: shapes or dtypes that do not fit, or a label that is neither IGNORE nor in the vocabulary.
    """
    return next_token_loss(
        hidden,
        lm_head_projection(lm_head, hidden, trains=True),
        lambda targets, positions: CrossEntropy(targets, top, sum_type(hidden.dtype)),
        labels,
        segments,
        normaliser=normaliser,
        chunk=chunk,
        repeatable=repeatable,
    )


def next_token_loss(
    hidden: Tensor,
    projection: Projection,
    criterion: Callable[[Tensor, Tensor], Criterion],
    labels: Tensor,
    segments: Tensor | None,
    **options: Any,
) -> Loss:
    """Return the mean loss of the positions that have a next token to learn; see `language_loss` and `chunked_loss`.

    `criterion` makes a criterion from the targets [1, R] and their positions [R].
    """
    check_vector("labels", labels, len(hidden))
    check_range("labels", labels, projection.size)
    targets = shifted_labels(labels, [1], segments=segments)
    positions = (targets[0] != IGNORE).nonzero().squeeze(1)
    targets = targets.index_select(1, positions)
    states, counts = hidden.index_select(0, positions)[None], (targets != IGNORE).sum(1)
    return chunked_loss(projection, criterion(targets, positions), states, counts, **options)


def combined_loss(lm_loss: Tensor, medusa: Tensor, lambda_0: float) -> Tensor:
    """Return Medusa-2's loss, L_LM (or its distilled form) + lambda_0 * L_Medusa-1 (equation 2)."""
    if not 0 <= lambda_0 < math.inf:
        raise ValueError(f"lambda_0: expected a finite number from 0, got {lambda_0}")
    return lm_loss + lambda_0 * medusa
