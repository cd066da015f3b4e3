"""Prefill: the prompt through the model, its keys and values cached, the first root chosen. Prefill is not a step."""

from __future__ import annotations

import torch

from medusa_decoding.attention import DecodeContext
from medusa_decoding.cache import bucket
from medusa_decoding.decode.state import DecodeState, StopRules, commit
from medusa_decoding.decode.verify import verify
from medusa_decoding.trunk import Trunk


def prefill(trunk: Trunk, prompts: list[torch.Tensor], rules: StopRules, spare_rows: int) -> DecodeState:
    """Run a batch of prompts and return the state the first step starts from.

    Args:
        trunk: the swapped model.
        prompts: one int64 [T_b] a row, without padding, T_b at least 1.
        rules: when rows end.
        spare_rows: cache rows behind the last token of the budget: N for a tree's own rows and its depth, because the
            last step may accept a whole path past the budget before it is cut.
    """
    device = trunk.device
    batch, lengths = len(prompts), [len(prompt) for prompt in prompts]
    width, budget = max(lengths), int(rules.max_new.max())
    cache = trunk.new_cache(lengths, width + budget + spare_rows)
    # Padding stands behind a row's tokens: nothing before it can see it, and the row's own tokens overwrite it.
    tokens = torch.zeros(batch, width, dtype=torch.int64, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    positions = torch.arange(width, dtype=torch.int32, device=device)
    hidden = trunk.forward(tokens, DecodeContext(cache, positions, ancestors=None))
    filled = torch.tensor(lengths, dtype=torch.int32, device=device)
    hidden = hidden[torch.arange(batch, device=device), filled.long() - 1]
    cache.lengths.copy_(filled)
    state = DecodeState(
        cache=cache,
        root=torch.zeros(batch, dtype=torch.int64, device=device),
        hidden=hidden,
        output=torch.zeros(batch, bucket(budget + 1), dtype=torch.int64, device=device),
        count=torch.zeros(batch, dtype=torch.int32, device=device),
        finished=torch.zeros(batch, dtype=torch.bool, device=device),
        log=torch.zeros(batch, bucket(budget + 1), dtype=torch.int32, device=device),
        step=torch.zeros(1, dtype=torch.int64, device=device),
    )
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    root = verify(hidden[:, None], tokens[:, :1], zero, zero - 1, trunk.lm_head, state, rules)
    state.root.copy_(root[:, 0])
    commit(state, rules, root, zero.expand(batch))
    return state
