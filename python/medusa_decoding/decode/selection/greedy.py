"""Greedy selection: the argmax of the model's logits."""

from __future__ import annotations

import torch
from torch import nn

from medusa_decoding.decode.limits import Limits
from medusa_decoding.decode.state import DecodeState
from medusa_decoding.decode.verify import Nodes, TokenSelector, allowed_logits, fused_tokens


class Greedy(TokenSelector):
    """The argmax. With plain weights the op `tree_verify` fuses projection and argmax, and no logits are stored."""

    key = "greedy"
    makes_logits = False

    def __call__(self, nodes: Nodes, lm_head: nn.Module, state: DecodeState, limits: Limits) -> torch.Tensor:
        """Return the argmax at every node, [B, N]."""
        found = fused_tokens(nodes, lm_head, state, limits)
        return allowed_logits(nodes, lm_head, state, limits).argmax(-1) if found is None else found
