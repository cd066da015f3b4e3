"""The model's own loss (Medusa paper, 2.2.2, equation 2), or its divergence from itself without the adapter (2.3.2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from medusa_decoding.training.data.targets import IGNORE, send, shifted_labels
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
) -> Loss:
    """Next-token cross-entropy of the model itself, L_LM of equation 2, without all logits in memory.

    `hidden` [T, H] are states after the final norm, `lm_head` is the module or its weight [V, H]; both get a gradient.
    Labels, segments, `chunk` and `top` are as in `medusa_loss`; `normaliser` [1] divides the sum. Returns a `Loss` with
    one entry.
    """
    projection = lm_head_projection(lm_head, hidden, trains=True)
    positions, targets = _next_tokens(hidden, labels, segments)
    criterion = CrossEntropy(targets, top, sum_type(hidden.dtype))
    return _one_head(projection, criterion, hidden, positions, normaliser, chunk)


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

    The student's arguments are those of `language_loss`. `teacher_hidden` [T, H] are states of the same model with its
    adapter off, and `teacher_lm_head` is its lm_head without the adapter (see `without_adapter`); neither gets a
    gradient. Returns a `Loss` with one entry, in nats, without hits.
    """
    student = lm_head_projection(lm_head, hidden, trains=True)
    teacher = lm_head_projection(teacher_lm_head, teacher_hidden, trains=False)
    positions, _ = _next_tokens(hidden, labels, segments)
    criterion = Divergence(teacher, teacher_hidden, positions[None], sum_type(hidden.dtype))
    return _one_head(student, criterion, hidden, positions, normaliser, chunk)


def _next_tokens(hidden: Tensor, labels: Tensor, segments: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the positions that have a next token to learn, int64 [R], and these tokens, int64 [1, R]."""
    targets = shifted_labels(labels, [1], segments=segments)
    positions = (targets[0] != IGNORE).nonzero().squeeze(1)
    return send(positions, hidden.device), send(targets.index_select(1, positions), hidden.device)


def _one_head(
    projection: Projection,
    criterion: Criterion,
    hidden: Tensor,
    positions: Tensor,
    normaliser: Tensor | None,
    chunk: int | None,
) -> Loss:
    counts = positions.new_tensor([len(positions)])
    states = hidden.index_select(0, positions)[None]
    return chunked_loss(projection, criterion, states, counts, normaliser=normaliser, chunk=chunk)


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
        self._hard, self.width = hard, teacher.width

    def __call__(self, head: int, rows: slice, logits: Tensor, dtype: torch.dtype | None) -> Tensor | None:
        """See `Criterion`."""
        places = self._places[head, rows]
        teacher = self._teacher.logits(head, rows, self._states[places.clamp(min=0)], wants_gradient=False)
        if self._hard is not None:
            self._hard(head, rows, logits, None)
        p, q = teacher.softmax(1), logits.softmax(1)
        torch.log_softmax(teacher, 1, out=teacher)
        torch.log_softmax(logits, 1, out=logits)
        # A token that the teacher rules out (probability 0, logarithm -inf) adds nothing.
        losses = teacher.sub_(logits).masked_fill_(p == 0, 0.0).mul_(p).sum(1)
        self.sums[head] += losses.masked_fill(places == IGNORE, 0.0).sum()
        if dtype is None:
            return None
        return torch.sub(q, p, out=logits).masked_fill_((places == IGNORE)[:, None], 0.0)


def without_adapter(lm_head: nn.Module) -> nn.Module:
    """Return the layer under an adapter of peft, or the module itself if there is none."""
    base = getattr(lm_head, "get_base_layer", None)
    return lm_head if base is None else base()
