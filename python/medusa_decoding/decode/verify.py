"""Verify: the model's own next token at every node (Medusa paper, section 2.1.3).

With plain weights the op `tree_verify` fuses projection and argmax. Logits are made only where something must change
or see them: an lm_head that is not a plain Linear, or EOS tokens that may not be chosen yet.
"""

from __future__ import annotations

import torch
from torch import nn

from medusa_decoding.decode.state import DecodeState, StopRules
from medusa_decoding.heads import plain_weight
from medusa_kernels import tree_verify


def verify(
    hidden: torch.Tensor,
    tokens: torch.Tensor,
    depths: torch.Tensor,
    parents: torch.Tensor,
    lm_head: nn.Module,
    state: DecodeState,
    rules: StopRules,
) -> torch.Tensor:
    """Return the model's greedy next token at every node.

    Args:
        hidden: [B, N, H] after the final norm.
        tokens: int64 [B, N], the nodes' tokens.
        depths: int32 [N].
        parents: int32 [N].
        lm_head: the base model's.
        state: for the tokens emitted so far.
        rules: for EOS and `min_new`.

    Returns:
        int64 [B, N].
    """
    weight = plain_weight(lm_head)
    if weight is not None and rules.min_new is None:
        return tree_verify(hidden, weight, tokens, parents, want_stats=False)[0]
    logits = lm_head(hidden)
    if rules.min_new is not None:
        too_early = state.count[:, None] + depths < rules.min_new
        ends = torch.isin(torch.arange(logits.shape[-1], device=logits.device), rules.eos)
        logits = logits.masked_fill(too_early[..., None] & ends, float("-inf"))
    return logits.argmax(-1)
