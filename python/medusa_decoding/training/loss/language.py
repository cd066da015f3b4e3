"""The model's own loss (Medusa paper, 2.2.2, equation 2), or its divergence from itself without the adapter (2.3.2)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from medusa_decoding.training.data.targets import IGNORE, check_range, check_vector, send, shifted_labels
from medusa_decoding.training.loss.chunked import CrossEntropy, Loss, chunked_loss
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

    Returns:
        A `Loss` with one entry.

    Raises:
        ValueError: shapes or dtypes that do not fit, or a label that is neither IGNORE nor in the vocabulary.
    """
    projection = lm_head_projection(lm_head, hidden, trains=True)
    positions, targets = (
        send(tensor, hidden.device) for tensor in next_tokens(labels, len(hidden), projection.size, segments)
    )
    criterion = CrossEntropy(targets, top, sum_type(hidden.dtype))
    states, counts = hidden.index_select(0, positions)[None], (targets != IGNORE).sum(1)
    return chunked_loss(projection, criterion, states, counts, normaliser=normaliser, chunk=chunk)


def next_tokens(labels: Tensor, length: int, size: int, segments: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the positions that have a next token to learn, int64 [R], and these tokens, int64 [1, R].

    Raises:
        ValueError: labels that are not int64 [length], or neither IGNORE nor in the vocabulary of this size.
    """
    check_vector("labels", labels, length)
    check_range("labels", labels, size)
    targets = shifted_labels(labels, [1], segments=segments)
    positions = (targets[0] != IGNORE).nonzero().squeeze(1)
    return positions, targets.index_select(1, positions)


def distillation_loss(
    hidden: Tensor,
    lm_head: nn.Module | Tensor,
    teacher_hidden: Tensor,
    teacher_lm_head: nn.Module | Tensor,
    labels: Tensor,
    *,
    segments: Tensor | None = None,
    normaliser: Tensor | None = None,
    chunk: int | None = None,
) -> Loss:
    """KL(teacher || student) of the next token's distribution, the mean over the positions of `language_loss` (2.3.2).

    KL(p || q) = sum over tokens x of p(x) * (log p(x) - log q(x)).

    The student's arguments are those of `language_loss`; `labels` only say where the loss is taken. `teacher_hidden`
    [T, H] are states of the same model with its adapter off, and `teacher_lm_head` is its lm_head without the adapter
    (see `without_adapter`). The teacher gets no gradient.

    Returns:
        A `Loss` with one entry, in nats, without hits.

    Raises:
        ValueError: as in `language_loss`.
    """
    if teacher_hidden.shape != hidden.shape:
        raise ValueError(f"teacher_hidden: expected shape {list(hidden.shape)}, got {list(teacher_hidden.shape)}")
    student = lm_head_projection(lm_head, hidden, trains=True)
    teacher = lm_head_projection(teacher_lm_head, teacher_hidden, trains=False, name="teacher_lm_head")
    if student.size != teacher.size:
        raise ValueError(f"teacher_lm_head: expected a vocabulary of {student.size}, got {teacher.size}")
    positions, targets = (
        send(tensor, hidden.device) for tensor in next_tokens(labels, len(hidden), student.size, segments)
    )
    criterion = Divergence(teacher, teacher_hidden, positions[None], sum_type(hidden.dtype))
    states, counts = hidden.index_select(0, positions)[None], (targets != IGNORE).sum(1)
    return chunked_loss(student, criterion, states, counts, normaliser=normaliser, chunk=chunk)


class Divergence:
    """KL(p || q) in nats of each head's distribution q from a teacher's distribution p. A `Criterion`.

    Args:
        teacher: projection of the teacher's states; it gets no gradient.
        states: [T, H], the teacher's.
        places: int64 [K, R], the position of the teacher's state for each row of a head; IGNORE if nothing is learnt.
        dtype: of the sums.
        hard: cross-entropy of the same rows, which counts the hits; None for no hits.
    """

    def __init__(
        self,
        teacher: Projection,
        states: Tensor,
        places: Tensor,
        dtype: torch.dtype,
        *,
        hard: CrossEntropy | None = None,
    ) -> None:
        self.sums = torch.zeros(len(places), dtype=dtype, device=states.device)
        self.hits = places.new_zeros(len(places), 0) if hard is None else hard.hits
        self._teacher, self._states, self._places = teacher, states.detach(), places
        self._hard = hard

    def __call__(self, head: int, rows: slice, logits: Tensor, wants_gradient: bool) -> Tensor:
        """See `Criterion`."""
        places = self._places[head, rows]
        teacher = self._teacher.logits(head, rows, self._states[places.clamp(min=0)], wants_gradient=False)
        if self._hard is not None:
            self._hard(head, rows, logits, False)
        p, q = teacher.softmax(1), logits.softmax(1)
        torch.log_softmax(teacher, 1, out=teacher)
        torch.log_softmax(logits, 1, out=logits)
        # A token that the teacher rules out (probability 0, logarithm -inf) adds nothing.
        losses = teacher.sub_(logits).masked_fill_(p == 0, 0.0).mul_(p).sum(1)
        if wants_gradient:
            torch.sub(q, p, out=logits).masked_fill_((places == IGNORE)[:, None], 0.0)
        loss = losses.masked_fill(places == IGNORE, 0.0).sum()
        self.sums[head] += loss
        return loss


def without_adapter(lm_head: nn.Module) -> nn.Module:
    """Return the layer under an adapter of peft, or the module itself if there is none.

    Raises:
        ValueError: the adapter is merged into the layer, so that the original model is gone.
    """
    base = getattr(lm_head, "get_base_layer", None)
    if base is None:
        return lm_head
    if getattr(lm_head, "merged", False):
        raise ValueError("lm_head: expected an adapter that is not merged into its layer, got a merged one")
    return base()


def combined_loss(lm_loss: Tensor, medusa: Tensor, lambda_0: float) -> Tensor:
    """Return Medusa-2's loss, L_LM (or its distilled form) + lambda_0 * L_Medusa-1 (equation 2)."""
    if not 0 <= lambda_0 < math.inf:
        raise ValueError(f"lambda_0: expected a finite number from 0, got {lambda_0}")
    return lm_loss + lambda_0 * medusa
