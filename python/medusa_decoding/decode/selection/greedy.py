"""Greedy selection: the argmax of the model's logits."""

from __future__ import annotations

import torch
from torch import nn

from medusa_decoding.decode.limits import Limits
from medusa_decoding.decode.state import DecodeState
from medusa_decoding.decode.verify import Nodes, TokenSelector, allowed_logits
from medusa_decoding.heads import projection
from medusa_kernels import tree_verify


class Greedy(TokenSelector):
    """The argmax. With plain weights the op `tree_verify` fuses projection and argmax, and no logits are stored."""

    key = "greedy"
    makes_logits = False

    def __call__(self, nodes: Nodes, lm_head: nn.Module, state: DecodeState, limits: Limits) -> torch.Tensor:
        """Return the argmax at every node, [B, N]."""
        projected = projection(lm_head)
        if projected is None or limits.min_new_tensor is not None:
            return allowed_logits(nodes, lm_head, state, limits).argmax(-1)
        torch.sum(nodes.hidden, (1, 2), dtype=torch.float32, out=state.check)
        weight, scale = projected
        return tree_verify(
            nodes.hidden, weight, nodes.tokens, nodes.shape.parents, want_stats=False, weight_scale=scale
        )[0]
