"""Prefill: the prompt through the model, its keys and values cached, the first root chosen. Prefill is not a step."""

from __future__ import annotations

import torch

from medusa_decoding.attention import DecodeContext
from medusa_decoding.decode.accept import accept
from medusa_decoding.decode.arrange import TreeOnDevice
from medusa_decoding.decode.state import DecodeState, Rules
from medusa_decoding.decode.verify import Nodes, verify
from medusa_decoding.tree import Tree
from medusa_decoding.trunk import Trunk


def prefill(trunk: Trunk, prompts: list[torch.Tensor], state: DecodeState, rules: Rules) -> None:
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
    last = hidden[torch.arange(batch, device=device), filled.long() - 1][:, None]
    root_only = TreeOnDevice.make(Tree([]), device)
    root = verify(Nodes(last, tokens[:, :1], root_only), trunk.lm_head, state, rules)
    # The last token of the prompt stands as a root that has just been accepted: its row follows the ones before it.
    state.cache.lengths.copy_(filled - 1)
    accept(tokens[:, :1], root, last, root_only, state, rules)
