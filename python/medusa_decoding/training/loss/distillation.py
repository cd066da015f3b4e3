"""Self-distillation: the divergence of the model from itself without its adapter (Medusa paper, section 2.3.2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from medusa_decoding.training.loss.chunked import Loss
from medusa_decoding.training.loss.language import next_token_loss
from medusa_decoding.training.loss.projections import Projection, lm_head_projection, sum_type


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
    repeatable: bool = False,
) -> Loss:
    """KL(teacher || student) of the next token's distribution, the mean over the positions of `language_loss` (2.3.2).

    KL(p || q) = sum over tokens x of p(x) * (log p(x) - log q(x)).

    Args:
        hidden: [T, H] the student's states; the gradient goes through them.
        lm_head: the student's; its parameters get a gradient if they require one.
        teacher_hidden: [T, H] states of the same model with its adapter off.
        teacher_lm_head: the model's lm_head without the adapter; see `without_adapter`.
        labels: int64 [T] or IGNORE; only their positions matter.
        segments: int64 [T], as in `language_loss`.
        normaliser: [1], as in `language_loss`.
        chunk: as in `language_loss`.
        repeatable: as in `language_loss`.

    Returns:
        A `Loss` with one entry, in nats, without hits.

    Raises:
        ValueError: as in `language_loss`.
    """
    if teacher_hidden.shape != hidden.shape:
        raise ValueError(f"teacher_hidden: expected shape {list(hidden.shape)}, got {list(teacher_hidden.shape)}")
    student = lm_head_projection(lm_head, hidden, trains=True)
    teacher = lm_head_projection(teacher_lm_head, teacher_hidden, trains=False)
    if student.size != teacher.size:
        raise ValueError(f"teacher_lm_head: expected a vocabulary of {student.size}, got {teacher.size}")

    def criterion(targets: Tensor, positions: Tensor) -> Divergence:
        return Divergence(teacher, teacher_hidden.index_select(0, positions), sum_type(hidden.dtype))

    return next_token_loss(
        hidden, student, criterion, labels, segments, normaliser=normaliser, chunk=chunk, repeatable=repeatable
    )


class Divergence:
    """KL(teacher || student) between the distributions of two projections at the same positions.

    Args:
        teacher: the teacher's projection; gets no gradient.
        states: [T, H] of the teacher.
        dtype: of the sums.

    Attributes:
        sums: [1] the summed divergence in nats.
        hits: int64 [1, 0].
    """

    def __init__(self, teacher: Projection, states: Tensor, dtype: torch.dtype) -> None:
        self.sums = torch.zeros(1, dtype=dtype, device=states.device)
        self.hits = torch.zeros(1, 0, dtype=torch.int64, device=states.device)
        self._teacher, self._states = teacher, states.detach()

    def __call__(self, head: int, rows: slice, logits: Tensor, wants_gradient: bool) -> Tensor:
        """See `Criterion`."""
        teacher = self._teacher.logits(head, rows, self._states[rows], wants_gradient=False)
        teacher.sub_(teacher.logsumexp(1, keepdim=True))
        logits.sub_(logits.logsumexp(1, keepdim=True))
        weights = teacher.exp()
        # A token that the teacher rules out (probability 0, logarithm -inf) adds nothing.
        ratio = teacher.sub_(logits).masked_fill_(weights == 0, 0.0)
        loss = (weights * ratio).sum()
        self.sums += loss
        if wants_gradient:
            logits.exp_().sub_(weights)
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
    layer: nn.Module = base()
    return layer
