"""Prefill: the prompt through the model, its keys and values cached, the first root chosen. Prefill is not a step.

A long prompt runs in chunks, so that its activations do not grow with it. On a CPU the last layer runs only for the
last token of each row: of the others it appends keys and values, and nothing reads its output. A chunk as small as a
tree runs as a step does there (see `Backbone.prefill_nodes`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from medusa_decoding.backbone.attention_swap import DecodeContext
from medusa_decoding.backbone.backbone import Backbone
from medusa_decoding.backbone.prefill_attention import chain_words
from medusa_decoding.decode.accept import accept
from medusa_decoding.decode.limits import Limits
from medusa_decoding.decode.state import DecodeState
from medusa_decoding.decode.tree_tensors import TreeTensors
from medusa_decoding.decode.verify import Nodes, TokenSelector
from medusa_decoding.trees.tree import Tree

PREFILL_CHUNK = 2048
"""Tokens that run through the model at once, counted over all rows of a batch.

Enough that a projection is bound by arithmetic on any GPU, few enough that a chunk's activations stay small: 0.2 GiB
for Llama-3-8B in 16 bits.
"""


def prefill(
    backbone: Backbone,
    prompts: list[torch.Tensor],
    state: DecodeState,
    selector: TokenSelector,
    limits: Limits,
    *,
    reuse: int = 0,
    chunk: int = PREFILL_CHUNK,
) -> None:
    """Run a batch of prompts and leave `state` as the first step needs it; see `prefill_chunks`."""
    for _ in prefill_chunks(backbone, prompts, state, selector, limits, reuse=reuse, chunk=chunk):
        pass


def prefill_chunks(
    backbone: Backbone,
    prompts: list[torch.Tensor],
    state: DecodeState,
    selector: TokenSelector,
    limits: Limits,
    *,
    reuse: int = 0,
    chunk: int | Callable[[], int] = PREFILL_CHUNK,
    observe: Callable[[int, torch.Tensor], None] | None = None,
) -> Iterator[int]:
    """Run a batch of prompts chunk by chunk, so that steps of other rows may run between two chunks.

    The prompts, int64 [T_b] without padding, run in chunks of at most `chunk` tokens in all (a function is called
    before each), all rows from the same position on, each over the keys and values of those before it. The first
    `reuse` tokens of every prompt, fewer than the shortest one has, are in the cache already (see
    `StatePool.enlarge`). `state` is a cleared one. `observe` is called after each chunk with the position of its first
    token and the hidden states after the final norm, [B, N, H]; the last layer then runs for all tokens.

    Yields:
        After each chunk but the last: the cached tokens of each row. When it ends, `state` is as the first step needs
        it.
    """
    device = backbone.device
    batch, lengths = len(prompts), [len(prompt) for prompt in prompts]
    width = max(lengths)
    if not 0 <= reuse < min(lengths):
        raise ValueError(f"reuse: expected 0 to {min(lengths) - 1} (the shortest prompt less one token), got {reuse}")
    if isinstance(chunk, int) and chunk < 1:
        raise ValueError(f"chunk: expected at least 1, got {chunk}")
    # Padding comes after a row's tokens: nothing before it can see it, and the row's new tokens overwrite it.
    tokens = torch.zeros(batch, width, dtype=torch.int64, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    can_hold = observe is None and backbone.can_hold_last
    last = torch.empty(batch, 1, backbone.states_size, dtype=state.hidden.dtype, device=device)
    first, held = reuse, False
    while first < width:
        at_once = max(1, (chunk if isinstance(chunk, int) else chunk()) // batch)
        nodes = backbone.prefill_nodes(batch, min(at_once, width - first))
        piece = tokens[:, first : first + (nodes or at_once)]
        count = piece.shape[1]
        end = first + count
        ends = [row for row, length in enumerate(lengths) if first < length <= end]
        # The last layer's input is of use if no row's last token, or every row's, is in this chunk.
        held = can_hold and not nodes and len(ends) in (0, batch)
        state.cache.lengths.fill_(first)
        depths = torch.arange(count, dtype=torch.int32, device=device)
        ancestors = chain_words(count, device) if nodes else None
        context = DecodeContext(state.cache, depths, ancestors, offset=first, hold_last=held)
        hidden, states = backbone.forward(piece, context)
        if ends:
            last[ends, 0] = states[ends, [lengths[row] - 1 - first for row in ends]]
        if observe is not None:
            observe(first, hidden)
        del hidden, states, context  # not kept in memory next to the following chunk's activations
        first = end
        if end < width:
            # Steps that meanwhile run with this row as one that has ended write after its last cached token.
            state.cache.lengths.fill_(end)
            yield end
    filled = torch.tensor(lengths, dtype=torch.int32, device=device)
    root_only = TreeTensors.from_tree(Tree([]), device)
    # The prompt's last token is treated as a root that has just been accepted, in the cache row after the others.
    state.cache.lengths.copy_(filled - 1)
    hidden = last[..., : backbone.config.hidden_size].contiguous()
    if held:
        hidden = backbone.finish(hidden, DecodeContext(state.cache, root_only.depths, root_only.ancestors))
        last = torch.cat([hidden, last[..., hidden.shape[-1] :]], dim=-1)
    noise = selector.noise(state, 1, backbone.vocab_size)
    root = selector(Nodes(hidden, tokens[:, :1], root_only, noise), backbone.lm_head, state, limits)
    if not selector.makes_logits:
        # Such steps check hidden states alone, so the projection is checked here.
        state.check.add_(backbone.lm_head(hidden).amax((1, 2)))
    accept(tokens[:, :1], root, last, root_only, state, limits)
