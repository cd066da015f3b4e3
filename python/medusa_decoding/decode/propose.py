"""Propose: the heads' best guesses at the last accepted token (Medusa paper, section 2.1.1)."""

from __future__ import annotations

import torch
from torch import nn

from medusa_decoding.decode.state import DecodeState
from medusa_decoding.heads import MedusaHeads


def propose(
    state: DecodeState, heads: MedusaHeads, lm_head: nn.Module, top_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the heads on one row a sequence, never on the tree's nodes: logprobs and tokens, each [B, K, top_k]."""
    return heads.propose(state.hidden, top_k, lm_head)
