"""Prefill: the prompt through the model, its keys and values cached, the first root chosen. Prefill is not a step.

A long prompt goes through in chunks, so that what it takes besides the cache does not grow with it. The prefill does
not know how a chunk attends to those before it (see `attention`).
"""

from __future__ import annotations

import torch

from medusa_decoding.backbone.attention_swap import DecodeContext
from medusa_decoding.backbone.backbone import Backbone
from medusa_decoding.decode.accept import accept
from medusa_decoding.decode.arrange import TreeOnDevice
from medusa_decoding.decode.state import DecodeState, Rules
from medusa_decoding.decode.verify import Greedy, Nodes, verify
from medusa_decoding.trees.tree import Tree

PREFILL_CHUNK = 2048
"""Tokens that run through the model at once, the rows of a batch taken together.

Enough that a projection is bound by arithmetic on any GPU, few enough that a chunk's activations stay small: 0.2 GiB
for Llama-3-8B in 16 bits.
"""


def prefill(
    backbone: Backbone,
    prompts: list[torch.Tensor],
    state: DecodeState,
    rules: Rules,
    *,
    reuse: int = 0,
    chunk: int = PREFILL_CHUNK,
) -> None:
    """Run a batch of prompts and leave `state` as the first step needs it.

    The prompts run in chunks, all rows from the same position on, each over the keys and values of those before it.

    Args:
        backbone: the swapped model.
        prompts: one int64 [T_b] a row, without padding, T_b at least 1.
        state: a cleared state; changed in place.
        rules: when rows end.
        reuse: tokens at the start of every prompt whose keys and values stand in the cache already, fewer than the
            shortest prompt has: these do not run again (see `StatePool.enlarge`).
        chunk: tokens that run at once at most, all rows together; at least one a row.

    Raises:
        ValueError: `reuse` or `chunk` out of range; nothing has run then.
    """
    device = backbone.device
    batch, lengths = len(prompts), [len(prompt) for prompt in prompts]
    width = max(lengths)
    if not 0 <= reuse < min(lengths):
        raise ValueError(f"reuse: expected 0 to {min(lengths) - 1} (the shortest prompt less one token), got {reuse}")
    if chunk < 1:
        raise ValueError(f"chunk: expected at least 1, got {chunk}")
    # Padding stands behind a row's tokens: nothing before it can see it, and the row's own tokens overwrite it.
    tokens = torch.zeros(batch, width, dtype=torch.int64, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    at_once = max(1, chunk // batch)
    positions = torch.arange(min(at_once, width - reuse), dtype=torch.int32, device=device)
    last = torch.empty(batch, 1, backbone.config.hidden_size, dtype=state.hidden.dtype, device=device)
    for first in range(reuse, width, at_once):
        piece = tokens[:, first : first + at_once]
        state.cache.lengths.fill_(first)
        depths = positions[: piece.shape[1]]
        hidden = backbone.forward(piece, DecodeContext(state.cache, depths, ancestors=None, offset=first))
        ends = [row for row, length in enumerate(lengths) if first < length <= first + at_once]
        if ends:
            last[ends, 0] = hidden[ends, [lengths[row] - 1 - first for row in ends]]
        del hidden  # it would live on beside the next chunk's activations
    filled = torch.tensor(lengths, dtype=torch.int32, device=device)
    root_only = TreeOnDevice.make(Tree([]), device)
    root = verify(Nodes(last, tokens[:, :1], root_only), backbone.lm_head, state, rules)
    if isinstance(rules.choice, Greedy):
        # Where no logits are made, steps look at hidden states alone: whether the projection is sound is seen here.
        state.check.add_(backbone.lm_head(last).amax((1, 2)))
    # The last token of the prompt stands as a root that has just been accepted: its row follows the ones before it.
    state.cache.lengths.copy_(filled - 1)
    accept(tokens[:, :1], root, last, root_only, state, rules)
