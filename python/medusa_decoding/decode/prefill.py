"""Prefill: the prompt through the model, its keys and values cached, the first root chosen. Prefill is not a step."""

from __future__ import annotations

import torch

from medusa_decoding.attention import DecodeContext
from medusa_decoding.decode.state import DecodeState, StopRules, commit
from medusa_decoding.decode.verify import verify
from medusa_decoding.trunk import Trunk


def prefill(trunk: Trunk, prompts: list[torch.Tensor], state: DecodeState, rules: StopRules) -> None:
    """Run a batch of prompts and leave `state` as the first step needs it.

    Args:
        trunk: the swapped model.
        prompts: one int64 [T_b] a row, without padding, T_b at least 1.
        state: a cleared state; changed in place.
        rules: when rows end.
    """
    device = trunk.device
    batch, lengths = len(prompts), [len(prompt) for prompt in prompts]
    width = max(lengths)
    # Padding stands behind a row's tokens: nothing before it can see it, and the row's own tokens overwrite it.
    tokens = torch.zeros(batch, width, dtype=torch.int64, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    positions = torch.arange(width, dtype=torch.int32, device=device)
    hidden = trunk.forward(tokens, DecodeContext(state.cache, positions, ancestors=None))
    filled = torch.tensor(lengths, dtype=torch.int32, device=device)
    state.hidden.copy_(hidden[torch.arange(batch, device=device), filled.long() - 1])
    state.cache.lengths.copy_(filled)
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    root = verify(state.hidden[:, None], tokens[:, :1], zero, zero - 1, trunk.lm_head, state, rules)
    state.root.copy_(root[:, 0])
    commit(state, rules, root, zero.expand(batch))
