"""The parents' term in training: A[parent] M_k C[candidate], added to a chunk of logits, and its gradient.

For heads with a `parent_rank`; decoding adds the same score to log-probabilities (`MedusaHeads.propose_children`). Like
there, the term is computed in the type of the logits, fp32 (fp64 for fp64 inputs); its low rank makes that cheap. This
module does not know where parents come from.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medusa_decoding.heads import MedusaHeads
from medusa_decoding.training.loss.projections import Projection


class Parents:
    """Another projection's logits plus, for each row, the score of its parent with every candidate.

    Args:
        inner: the projection of the states.
        heads: with a parent_rank.
        parents: int64 [K, R], the parent of each head's target in each row.
    """

    def __init__(self, inner: Projection, heads: MedusaHeads, parents: Tensor) -> None:
        self._inner, self._parents, self._own = inner, parents, heads.parent_term
        self.size = inner.size
        self.parameters: tuple[Tensor, ...] = (*inner.parameters, *self._own)
        self._wide: list[Tensor] = []
        self._sums: list[Tensor] = []

    def logits(self, head: int, rows: slice, states: Tensor, wants_gradient: bool) -> Tensor:
        """Add the term; see `Projection`."""
        logits = self._inner.logits(head, rows, states, wants_gradient)
        if not self._wide:
            self._wide = [tensor.detach().to(logits.dtype) for tensor in self._own]
        tokens, mix, candidates = self._wide
        with torch.autocast(logits.device.type, enabled=False):
            return logits.addmm_(tokens[self._parents[head, rows]] @ mix[head], candidates.t())

    def backward(self, head: int, rows: slice, gradient: Tensor, scale: Tensor) -> Tensor:
        """Add to the gradients of A, M and C, then ask the inner projection; see `Projection`."""
        if not self._sums:
            self._sums = [torch.zeros_like(tensor) for tensor in self._wide]
        tokens, mix, candidates = self._wide
        of_tokens, of_mix, of_candidates = self._sums
        chosen = self._parents[head, rows]
        with torch.autocast(gradient.device.type, enabled=False):
            parents, factor = tokens[chosen], scale.to(gradient.dtype)
            of_candidates.addmm_(gradient.t(), (parents @ mix[head]).mul_(factor))
            of_mixed = (gradient @ candidates).mul_(factor)
            of_mix[head] += parents.t() @ of_mixed
            of_tokens.index_add_(0, chosen, of_mixed @ mix[head].t())
        return self._inner.backward(head, rows, gradient, scale)

    def end_head(self, head: int) -> None:
        """Tell the inner projection; see `Projection`."""
        self._inner.end_head(head)

    def gradients(self) -> list[Tensor | None]:
        """Return the inner projection's gradients, then those of A, M and C; see `Projection`."""
        sums = self._sums or [torch.zeros_like(tensor) for tensor in self._own]
        own = [
            total.to(tensor.dtype) if tensor.requires_grad else None
            for total, tensor in zip(sums, self._own, strict=True)
        ]
        return [*self._inner.gradients(), *own]
