"""Medusa-1's loss: the heads' cross-entropies (Medusa paper, section 2.2.1, equation 1).

    L = sum over heads k of lambda_k * L_k,   L_k = mean over positions t of -log p_k(t)[token at t + k + 1]

with the paper's heads from 1 and lambda_k = 0.8^k. In the code heads are numbered from 0.

The paper writes the loss of one position. Here each head's cross-entropy is averaged over the positions that have a
target for this head: with one denominator for all heads, later heads would count less than lambda_k says, because they
have fewer targets. `normaliser` divides the sums by counts over all micro-batches and processes.

Beyond the paper, heads can learn the backbone's own distributions (`teacher_lm_head`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from medusa_decoding.heads import MedusaHeads
from medusa_decoding.training.data.targets import IGNORE, draft_labels, send, shifted_labels
from medusa_decoding.training.loss.chunked import TOP, Criterion, CrossEntropy, Loss, chunked_loss
from medusa_decoding.training.loss.language import Divergence
from medusa_decoding.training.loss.projections import (
    Matrix,
    Parents,
    Projection,
    compute_type,
    lm_head_projection,
    sum_type,
)


def head_weights(num_heads: int, decay: float = 0.8) -> Tensor:
    """Return lambda_k of each head: decay, decay^2, ..., decay^K; fp64 [K]."""
    return decay ** torch.arange(1, num_heads + 1, dtype=torch.float64)


def medusa_loss(
    hidden: Tensor,
    heads: MedusaHeads,
    labels: Tensor,
    *,
    tokens: Tensor | None = None,
    embed_tokens: nn.Module | None = None,
    segments: Tensor | None = None,
    token_map: Tensor | None = None,
    lm_head: nn.Module | Tensor | None = None,
    teacher_lm_head: nn.Module | Tensor | None = None,
    weights: Tensor | None = None,
    normaliser: Tensor | None = None,
    through_backbone: bool = False,
    chunk: int | None = None,
    top: int = TOP,
) -> Loss:
    """Medusa-1's loss: the sum over heads of lambda_k times the mean cross-entropy of head k (equation 1).

    Heads learn from positions whose next token is labelled too (`draft_labels`): it is the root that they draft after.
    Labels, tokens and segments can be on the CPU, so that nothing is read back from the device.

    `hidden` [T, (1 + F) H], of any floating type, are states after the model's final norm, followed by those of the
    heads' feature layers. `labels` int64 [T] is the token id at each position or IGNORE, `segments` is as in
    `shifted_labels`. `tokens` int64 [T], labelled or not, are needed exactly if the heads have a parent_rank or a
    root_rank, and `embed_tokens` (int64 [P] -> [P, H], without gradient) if they have a root_rank. `token_map` is the
    heads' own on the device of the labels; without it, it is copied there.

    `lm_head`, the module or its weight [V, H], is needed exactly if the heads share it. With `teacher_lm_head` heads
    learn the backbone's distributions as it is in this very step: head k at position t minimises KL(p || q) from p, the
    backbone's at position t + k + 1, if the text's own token is a target too; in a trimmed vocabulary p is renormalised
    over the tokens there. The teacher gets no gradient. Hits and counts stay those of the text's tokens.

    `weights` [K] are lambda_k, by default 0.8^(k + 1) for k from 0, and `normaliser` [K] divides each head's sum, by
    default its count of targets. With `through_backbone` the gradient reaches `hidden` and a shared lm_head (Medusa-2).
    The logits of `chunk` positions are in memory at a time, by default as many as `CHUNK_ELEMENTS` allows. Accuracies
    are counted for the top 1 to `top` candidates, with 0 for none. Returns a `Loss` with K entries.
    """
    if token_map is None and heads.token_map is not None:
        token_map = heads.token_map.to(labels.device)
    found = draft_labels(labels, heads.num_heads, segments=segments, token_map=token_map)
    outside, index = (found == -1).sum(1), found.masked_fill(found == -1, IGNORE)
    counts = (index != IGNORE).sum(1)

    positions = (index != IGNORE).any(0).nonzero().squeeze(1)
    index = send(index.index_select(1, positions), hidden.device)
    parents = None
    if tokens is not None:
        # The parent of a target is in the same conversation. Positions without a target may have any.
        parents = shifted_labels(tokens, range(1, heads.num_heads + 1)).clamp(min=0)
        parents = send(parents.index_select(1, positions), hidden.device)
    positions = send(positions, hidden.device)
    hidden = hidden if through_backbone else hidden.detach()
    root = None
    if heads.root_rank:
        assert embed_tokens is not None
        assert parents is not None
        with torch.no_grad():
            root = embed_tokens(parents[0])  # the parent of head 0's target
    states = heads.residual(hidden.index_select(0, positions).to(heads.w1.dtype), root).transpose(0, 1)
    projection: Projection
    if heads.w2 is not None:
        projection = Matrix(heads.w2, compute_type(states))
    else:
        assert lm_head is not None
        projection = lm_head_projection(lm_head, states, trains=through_backbone, heads=heads)
    if heads.parent_rank:
        assert parents is not None
        projection = Parents(projection, heads, parents)
    hard = CrossEntropy(index, min(top, heads.num_candidates), sum_type(states.dtype))
    criterion: Criterion = hard
    if teacher_lm_head is not None:
        teacher = lm_head_projection(teacher_lm_head, states, trains=False, heads=heads)
        later = positions + torch.arange(1, heads.num_heads + 1, device=positions.device)[:, None]
        criterion = Divergence(
            teacher,
            hidden[:, : heads.hidden_size],
            later.masked_fill(index == IGNORE, IGNORE),
            sum_type(states.dtype),
            hard=hard if top else None,
        )
    return chunked_loss(
        projection,
        criterion,
        states,
        send(counts, hidden.device),
        outside=send(outside, hidden.device),
        weights=head_weights(heads.num_heads) if weights is None else weights,
        normaliser=normaliser,
        chunk=chunk,
    )
