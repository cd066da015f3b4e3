"""How a model makes logits of its hidden states: by its lm_head, whose product some families divide or cap."""

from __future__ import annotations

import torch
from torch import nn

from medusa_decoding.linears.reading import is_hooked, projection
from medusa_kernels import Projection, decode_linear
from medusa_kernels.reference import scaled_logits


class ScaledLogits(nn.Module):
    """Logits of an lm_head, divided by a number and capped: softcap * tanh(logits / softcap), as transformers does it.

    Args:
        lm_head: from hidden states [.., H] to [.., V].
        divisor: of the logits, 1 for none.
        softcap: the number that they approach, or None.
    """

    def __init__(self, lm_head: nn.Module, divisor: float = 1.0, softcap: float | None = None) -> None:
        super().__init__()
        self.lm_head = lm_head
        self.out_features = getattr(lm_head, "out_features", None)
        self.divisor, self.softcap = divisor, softcap

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Project hidden states [.., H] to logits [.., V]."""
        logits = self.lm_head(hidden)
        # `scaled_logits` may write to them, and a hook may have kept them.
        return scaled_logits(logits.clone() if is_hooked(self.lm_head) else logits, self.divisor, self.softcap)


def logits_of(lm_head: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Project hidden states [B, N, H] of nodes to logits [B, N, V].

    On a CPU by an op in which a row's sums do not depend on the rows beside it, if it can read the weights: then a node
    of a tree has the logits, to the last bit, of the same text in plain decoding.
    """
    projected, divisor, softcap = logits_projection(lm_head)
    if projected is None or hidden.device.type != "cpu":
        return lm_head(hidden)
    scales, zeros = (None if held is None else [held] for held in (projected.scale, projected.zero))
    logits = decode_linear(hidden, [projected.weight], scales=scales, zeros=zeros, codes=projected.codes)
    return scaled_logits(logits, divisor, softcap)


def logits_projection(lm_head: nn.Module | None) -> tuple[Projection | None, float, float | None]:
    """Return what ops make logits with: the projection, or None (call the module), the divisor and the softcap."""
    if isinstance(lm_head, ScaledLogits):
        return projection(lm_head.lm_head), lm_head.divisor, lm_head.softcap
    return projection(lm_head), 1.0, None
