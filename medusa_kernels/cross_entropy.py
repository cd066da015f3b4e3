"""The cross-entropy of rows of logits with their targets, its gradient, and the targets' ranks. Internal: no op.

It serves training, overwrites its argument and is not differentiable; the caller takes the gradient further.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medusa_kernels._registry import _choosers, served_by, triton_or


def cross_entropy(
    logits: Tensor, targets: Tensor, top: int, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return each row's -log softmax(logits)[target], the target's rank, and the gradient of the loss.

    Args:
        logits: `[M, V]`, fp32 or fp64, rows contiguous; overwritten if a gradient is wanted.
        targets: int64 `[M]`, below V; below 0 if a row has none: its loss and gradient are 0, its rank is V.
        top: ranks below it are exact, the others at least as large; 0 for no ranks.
        dtype: of the gradient, which may come in the dtype of the logits instead; None for no gradient.

    Returns:
        Losses `[M]` in the dtype of the logits; ranks, int64 `[M]` (`[0]` without `top`), how many logits come before
        the target's: greater ones, NaN, and equal ones in lower columns (all if the target's is NaN); and the gradient
        `[M, V]`, softmax(logits) - onehot(target).
    """
    if logits.dtype != torch.float32:
        return _eager(logits, targets, top, dtype)
    return served_by("cross_entropy", logits.device).function(logits, targets, top, dtype)


def _eager(
    logits: Tensor, targets: Tensor, top: int, dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    valid, index = targets >= 0, targets.clamp(min=0)[:, None]
    chosen = logits.gather(1, index)
    ranks = targets[:0]
    if top == 1:  # one pass instead of four
        ranks = ((logits.argmax(1, keepdim=True) != index) | chosen.isnan()).squeeze(1).logical_or(~valid).long()
    elif top:
        # Counts what is below, so that a NaN ranks last.
        columns = torch.arange(logits.shape[1], device=logits.device)
        below = (logits < chosen).sum(1) + ((logits == chosen) & (columns >= index)).sum(1)
        ranks = logits.shape[1] - below * valid
    # The logarithm of the largest probability gives that of the target's, however small it is: one pass of softmax,
    # several times as fast on a CPU as `logsumexp` and `exp`.
    largest = logits.amax(1, keepdim=True)
    probabilities = torch.softmax(logits, 1, out=logits if dtype is not None else None)
    losses = (largest - chosen - probabilities.amax(1, keepdim=True).log()).squeeze(1).masked_fill(~valid, 0.0)
    if dtype is None:
        return losses, ranks, None
    probabilities.scatter_(1, index, probabilities.gather(1, index) - 1)
    return losses, ranks, probabilities.mul_(valid[:, None])


for _device in ("cpu", "cuda"):
    _choosers["cross_entropy", _device] = triton_or("cross_entropy", "eager", _eager, "PyTorch, operation by operation")
