"""The papers' training losses: heads, language model, both together, and distillation from the model itself.

Medusa-1 (section 2.2.1, equation 1): the sum over heads of lambda_k times the cross-entropy of head k. Medusa-2
(section 2.2.2, equation 2): the language model's own loss plus lambda_0 times that. Self-distillation (section 2.3.2):
the language model's loss is KL(original model || model). All of them walk over the vocabulary in chunks (`chunked.py`).
Heads are numbered from 0 here, from 1 in the paper: the weight of head k is lambda_k = 0.8^(k + 1).

**Which mean.** The paper writes its losses for one position. Here each head's cross-entropy is averaged over the
positions that have a target for this head, before lambda_k is applied: the ends of short conversations take more
targets from later heads, and with one common denominator those heads would count less than lambda_k says. Over several
micro-batches or processes a mean of means would depend on how the text was divided; with `normaliser`, the sums are
divided by counts that the caller has added up over all of them (`targets.target_counts`).

A target that a trimmed vocabulary lacks is left out of the loss, counted as `outside`, and a miss in the accuracies.
Heads whose drafts depend on their parent token (`parent_rank`) learn with the text's own token in its place.
This module does not know models, tokenizers or optimisers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from medusa_decoding.heads import MedusaHeads, plain_weight
from medusa_decoding.training.data.targets import (
    IGNORE,
    Targets,
    check_ids,
    check_range,
    check_vector,
    head_targets,
    shifted_labels,
)
from medusa_decoding.training.loss.chunked import (
    CHUNK_ELEMENTS,
    Called,
    CrossEntropy,
    Divergence,
    Matrix,
    Projection,
    Walk,
    compute_type,
    sum_type,
)
from medusa_decoding.training.loss.parents import Parents

HEAD_DECAY = 0.8
TOP = 10


@dataclass(frozen=True)
class Loss:
    """A loss and what can be said of it, by head.

    Attributes:
        loss: scalar with gradient, fp32 (fp64 for fp64 inputs).
        sums: [K], the summed losses of the positions that count, without gradient.
        counts: int64 [K], how many positions count.
        outside: int64 [K], targets that the trimmed vocabulary lacks.
        hits: int64 [K, top], targets among the head's n likeliest candidates, n from 1 to top.
    """

    loss: Tensor
    sums: Tensor
    counts: Tensor
    outside: Tensor
    hits: Tensor

    @property
    def means(self) -> Tensor:
        """Mean loss of each head over its own positions, [K]; 0 where there are none."""
        return self.sums / self.counts.clamp(min=1)

    @property
    def accuracy(self) -> Tensor:
        """Share of all labelled targets among the n likeliest candidates, fp32 [K, top]; those outside are misses."""
        return self.hits.float() / (self.counts + self.outside).clamp(min=1)[:, None]


def head_weights(num_heads: int, decay: float = HEAD_DECAY) -> Tensor:
    """Return lambda_k of each head: the paper's powers of a constant, from its first power on; fp64 [K]."""
    if not 0 < decay <= 1:
        raise ValueError(f"decay: expected a number above 0 and at most 1, got {decay}")
    return decay ** torch.arange(1, num_heads + 1, dtype=torch.float64)


def medusa_loss(
    hidden: Tensor,
    heads: MedusaHeads,
    labels: Tensor | Targets,
    *,
    tokens: Tensor | None = None,
    segments: Tensor | None = None,
    lm_head: nn.Module | Tensor | None = None,
    weights: Tensor | None = None,
    normaliser: Tensor | None = None,
    through_backbone: bool = False,
    chunk: int | None = None,
    top: int = TOP,
    condition: Callable[[Projection, Tensor], Projection] | None = None,
    repeatable: bool = False,
) -> Loss:
    """Medusa-1's loss: the sum over heads of lambda_k times the mean cross-entropy of head k (equation 1).

    Only positions that some head has a target for are computed. Reads the number of those back from the device.

    Args:
        hidden: [T, H] states after the model's final norm; any floating type (cast to that of the heads).
        heads: K heads; their parameters get a gradient where they require one. Projections stored in 8 bits cannot
            be trained, only measured, under `torch.no_grad()`.
        labels: int64 [T], the token id at each position or IGNORE; or the `Targets` of positions picked from several
            sequences, with their parents where the heads have a parent_rank.
        tokens: int64 [T], the text's token ids, labelled or not; needed exactly when the heads have a parent_rank and
            labels are not Targets. The parent of head k's target at position t is the token at t + k + 1.
        segments: int64 [T], see `shifted_labels`; not with Targets.
        lm_head: the model's own, needed exactly when the heads share it: its weight [V, H], or the module. One that is
            not a plain Linear without bias (LoRA around it, quantised) is called as it is.
        weights: [K] of lambda_k; 0.8^(k + 1) without it.
        normaliser: [K], what each head's sum is divided by; its own count of targets without it.
        through_backbone: let the gradient reach `hidden` and a shared lm_head (Medusa-2). Without it both are detached
            and get none at all (Medusa-1).
        chunk: positions whose logits are held at a time; as many as make 128 MiB without it.
        top: accuracies are counted for the 1 to `top` likeliest candidates; 0 for none.
        condition: wraps the projection to logits in another, told the positions [R] that rows stand for: the place for
            further terms; see `Projection`.
        repeatable: allow more than one backward pass; costs a copy of every gradient.

    Returns:
        A `Loss` with K entries.

    Raises:
        ValueError: shapes, dtypes or counts that do not fit, a label that is neither IGNORE nor in the vocabulary, a
            missing or superfluous lm_head, missing or superfluous tokens or parents, 8-bit projections to be trained.
    """
    _check_hidden(hidden, heads)
    if heads.storage != "float" and torch.is_grad_enabled():
        raise ValueError(
            "heads: expected projections in floats to be trained (others are measured, under torch.no_grad()), "
            f"got {heads.storage}"
        )
    if (lm_head is not None) != heads.shared_projection:
        wanted = (
            "the model's lm_head (the heads share it)" if heads.shared_projection else "None (the heads own theirs)"
        )
        raise ValueError(f"lm_head: expected {wanted}, got {type(lm_head).__name__}")
    _check_parents(heads, labels, tokens)
    if isinstance(labels, Targets):
        for name, tensor in (("segments", segments), ("tokens", tokens)):
            if tensor is not None:
                raise ValueError(f"{name}: expected None with Targets, got a tensor")
        if labels.index.shape != (heads.num_heads, len(hidden)):
            got = list(labels.index.shape)
            raise ValueError(f"labels: expected targets [{heads.num_heads}, {len(hidden)}], got {got}")
        check_range("labels", labels.index, heads.num_candidates)
        wanted_targets = labels
    else:
        check_vector("labels", labels, len(hidden))
        check_range("labels", labels, heads.vocab_size)
        wanted_targets = head_targets(labels, heads, segments, tokens)
    counts = wanted_targets.counts
    divisor = counts if normaliser is None else normaliser
    weights = head_weights(heads.num_heads) if weights is None else weights
    for name, tensor in (("weights", weights), ("normaliser", divisor)):
        if tensor.shape != (heads.num_heads,):
            raise ValueError(f"{name}: expected shape [{heads.num_heads}], got {list(tensor.shape)}")

    kept = (wanted_targets.index != IGNORE).any(0).nonzero().squeeze(1)
    hidden = hidden if through_backbone else hidden.detach()
    states = heads.residual(hidden.index_select(0, kept).to(heads.w1.dtype)).transpose(0, 1)
    projection: Projection = _heads_projection(heads, lm_head, states, through_backbone)
    if wanted_targets.parents is not None:
        projection = Parents(projection, heads, wanted_targets.parents.index_select(1, kept))
    if condition is not None:
        projection = condition(projection, kept)
    sums_in = sum_type(states.dtype)
    criterion = CrossEntropy(wanted_targets.index.index_select(1, kept), min(top, heads.num_candidates), sums_in)
    scales = weights.to(states.device, sums_in) / divisor.to(states.device).clamp(min=1)
    walk = Walk(projection, criterion, scales, _chunk(chunk, heads.num_candidates), repeatable)
    return Loss(walk.total(states), criterion.sums, counts, wanted_targets.outside, criterion.hits)


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
        lm_head: module or weight [V, H]; its parameters get a gradient where they require one.
        labels: int64 [T] or IGNORE, as in `medusa_loss`.
        segments: int64 [T], as in `medusa_loss`.
        normaliser: [1], what the sum is divided by; the number of targets without it.
        chunk: positions at a time, as in `medusa_loss`.
        top: accuracies counted, as in `medusa_loss`.
        repeatable: as in `medusa_loss`.

    Returns:
        A `Loss` with one entry.

    Raises:
        ValueError: as in `medusa_loss`.
    """
    projection, vocabulary, index, kept = _next_token(hidden, lm_head, labels, segments)
    criterion = CrossEntropy(index, top, sum_type(hidden.dtype))
    counts = (index != IGNORE).sum(1)
    scales = 1.0 / _divisor(normaliser, counts, criterion.sums)
    walk = Walk(projection, criterion, scales, _chunk(chunk, vocabulary), repeatable)
    total = walk.total(hidden.index_select(0, kept)[None])
    return Loss(total, criterion.sums, counts, torch.zeros_like(counts), criterion.hits)


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

    Args:
        hidden: [T, H] the student's states; the gradient goes through them.
        lm_head: the student's; its parameters get a gradient where they require one.
        teacher_hidden: [T, H] states of the same model with its adapter off.
        teacher_lm_head: the model's lm_head without the adapter; see `without_adapter`.
        labels: int64 [T] or IGNORE; only where they stand matters.
        segments: int64 [T], as in `medusa_loss`.
        normaliser: [1], as in `language_loss`.
        chunk: positions at a time, as in `medusa_loss`.
        repeatable: as in `medusa_loss`.

    Returns:
        A `Loss` with one entry, in nats, without hits.

    Raises:
        ValueError: as in `medusa_loss`.
    """
    projection, vocabulary, index, kept = _next_token(hidden, lm_head, labels, segments)
    if teacher_hidden.shape != hidden.shape:
        raise ValueError(f"teacher_hidden: expected shape {list(hidden.shape)}, got {list(teacher_hidden.shape)}")
    teacher, teacher_vocabulary = _model_projection(teacher_lm_head, teacher_hidden, trains=False)
    if vocabulary != teacher_vocabulary:
        raise ValueError(f"teacher_lm_head: expected a vocabulary of {vocabulary}, got {teacher_vocabulary}")
    criterion = Divergence(teacher, teacher_hidden.index_select(0, kept), sum_type(hidden.dtype))
    counts = (index != IGNORE).sum(1)
    scales = 1.0 / _divisor(normaliser, counts, criterion.sums)
    walk = Walk(projection, criterion, scales, _chunk(chunk, vocabulary), repeatable)
    total = walk.total(hidden.index_select(0, kept)[None])
    return Loss(total, criterion.sums, counts, torch.zeros_like(counts), counts.new_zeros(1, 0))


def combined_loss(lm_loss: Tensor, medusa: Tensor, lambda_0: float) -> Tensor:
    """Medusa-2's loss: L_LM (or its distilled form) plus lambda_0 times the heads' loss (equation 2)."""
    if not 0 <= lambda_0 < math.inf:
        raise ValueError(f"lambda_0: expected a finite number from 0, got {lambda_0}")
    return lm_loss + lambda_0 * medusa


def without_adapter(lm_head: nn.Module) -> nn.Module:
    """Return the layer under an adapter of peft, or the module itself where there is none.

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


def _heads_projection(
    heads: MedusaHeads, lm_head: nn.Module | Tensor | None, states: Tensor, trains: bool
) -> Matrix | Called:
    if heads.w2 is not None:
        return Matrix(heads.w2, compute_type(states), scale=heads.w2_scale)
    weight = lm_head if isinstance(lm_head, Tensor) else plain_weight(lm_head)
    if weight is not None:
        if weight.shape != (heads.vocab_size, heads.hidden_size):
            wanted = [heads.vocab_size, heads.hidden_size]
            raise ValueError(f"lm_head: expected weight {wanted}, got {list(weight.shape)}")
        return Matrix(weight if trains else weight.detach(), compute_type(states), heads.token_map)
    assert isinstance(lm_head, nn.Module)
    return Called(lm_head, heads.token_map, trains)


def _model_projection(lm_head: nn.Module | Tensor, hidden: Tensor, trains: bool) -> tuple[Matrix | Called, int]:
    weight = lm_head if isinstance(lm_head, Tensor) else plain_weight(lm_head)
    if weight is not None:
        if weight.ndim != 2 or hidden.ndim != 2 or weight.shape[1] != hidden.shape[1]:
            raise ValueError(f"hidden: expected [T, H] for lm_head {list(weight.shape)}, got {list(hidden.shape)}")
        return Matrix(weight if trains else weight.detach(), compute_type(hidden)), len(weight)
    assert isinstance(lm_head, nn.Module)
    width = getattr(lm_head, "out_features", None)
    if not isinstance(width, int):
        raise ValueError(f"lm_head: expected a layer that states its out_features, got {type(lm_head).__name__}")
    return Called(lm_head, None, trains), width


def _next_token(
    hidden: Tensor, lm_head: nn.Module | Tensor, labels: Tensor, segments: Tensor | None
) -> tuple[Matrix | Called, int, Tensor, Tensor]:
    # The projection, its vocabulary, and the positions that have a next token to learn: targets [1, R], places [R].
    projection, vocabulary = _model_projection(lm_head, hidden, trains=True)
    check_vector("labels", labels, len(hidden))
    check_range("labels", labels, vocabulary)
    index = shifted_labels(labels, [1], segments=segments)
    kept = (index[0] != IGNORE).nonzero().squeeze(1)
    return projection, vocabulary, index.index_select(1, kept), kept


def _chunk(chunk: int | None, vocabulary: int) -> int:
    if chunk is None:
        return max(1, CHUNK_ELEMENTS // vocabulary)
    if chunk < 1:
        raise ValueError(f"chunk: expected at least 1, got {chunk}")
    return chunk


def _divisor(normaliser: Tensor | None, counts: Tensor, like: Tensor) -> Tensor:
    divisor = counts if normaliser is None else normaliser
    if divisor.shape != (1,):
        raise ValueError(f"normaliser: expected shape [1], got {list(divisor.shape)}")
    return divisor.to(like).clamp(min=1)


def _check_parents(heads: MedusaHeads, labels: Tensor | Targets, tokens: Tensor | None) -> None:
    if isinstance(labels, Targets):
        parents = labels.parents
        if heads.parent_rank and (parents is None or parents.shape != labels.index.shape):
            got = None if parents is None else list(parents.shape)
            raise ValueError(f"labels: expected targets with parents {list(labels.index.shape)}, got {got}")
        if heads.parent_rank and parents is not None:
            check_ids("labels.parents", parents, heads.vocab_size)
        elif parents is not None:
            raise ValueError("labels: expected targets without parents (the heads have no parent_rank), got some")
    elif heads.parent_rank and tokens is None:
        raise ValueError("tokens: expected the text's ids (the heads have a parent_rank), got None")
    elif not heads.parent_rank and tokens is not None:
        raise ValueError("tokens: expected None (the heads have no parent_rank), got a tensor")


def _check_hidden(hidden: Tensor, heads: MedusaHeads) -> None:
    if hidden.ndim != 2 or hidden.shape[1] != heads.hidden_size or not hidden.is_floating_point():
        raise ValueError(f"hidden: expected floats [T, {heads.hidden_size}], got {hidden.dtype} {list(hidden.shape)}")
