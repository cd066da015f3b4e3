"""Count how often heads are right about the text that the model itself writes (Medusa paper, section 2.3.3).

At position t of a text, head k (0-based) predicts the token k + 2 places later from the final hidden state of token t,
the last accepted one. Decoding has that state for the prompt's last token and for every later token, so these positions
count, each once, although steps start at some of them only. Draft tokens are made as in decoding, by the same calls of
`MedusaHeads`; for a sampled text with the random numbers that it was drawn with. Their root input is the embedding of
token t + 1. If they depend on their parent token, it is the text's actual token. A parent that the previous head did
not name cannot be in a tree, and its children are ranked without that term.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from medusa_decoding.backbone.layer_states import layer_states
from medusa_decoding.decode.selection.sampling import draw_temperature
from medusa_decoding.generation.request import row_seed
from medusa_decoding.heads import MedusaHeads
from medusa_decoding.model import MedusaModel
from medusa_decoding.training.data.targets import IGNORE, shifted_labels
from medusa_decoding.training.loop.accuracy import HeadAccuracy
from medusa_kernels import gumbel_noise

RANKS = 10
ROWS = 256
"""Positions per call, which bounds the memory of their logits."""
MOST_NOISE = 2**25
"""Random numbers at once, 128 MiB of them; there is one for each position, head and token."""


def accuracy_of_texts(model: MedusaModel, texts: Iterable[tuple[Sequence[int], int]]) -> HeadAccuracy:
    """Add up `own_text_accuracy` over texts, at least one, each given with the number of its prompt's tokens."""
    first, *others = (own_text_accuracy(model, tokens, prompt) for tokens, prompt in texts)
    for one in others:
        first.add(one.hits, one.total)
    return first


def own_text_accuracy(model: MedusaModel, tokens: Sequence[int], prompt: int) -> HeadAccuracy:
    """Count how often the actual next token is among the top 1 to 10 candidates of each head.

    A head has no target at positions for which the text ends less than k + 2 tokens later. The text is greedy.
    Arguments are as of `own_text_ranks`.
    """
    found = own_text_ranks(model, tokens, prompt)
    hits = torch.stack([((found >= 0) & (found <= n)).sum(0) for n in range(RANKS)], dim=1)
    return HeadAccuracy(hits, (found != IGNORE).sum(0))


@torch.no_grad()
def own_text_ranks(
    model: MedusaModel, tokens: Sequence[int], prompt: int, *, temperature: float = 1.0, seed: int | None = None
) -> torch.Tensor:
    """Find the rank of the actual next token among the top 10 candidates of each head.

    The first `prompt` of the `tokens`, at least one, are the prompt; the model wrote the others after it, at
    `temperature`. `seed` is what `generate` was given for this text, in a batch of 1: candidates are then ranked with
    the same random numbers. None for a greedy text.

    Returns int64 [P, K] on the CPU, one row per position that has a target: the rank, from 0; -1 if it is not among the
    candidates; IGNORE if the text has ended.
    """
    heads, backbone = model.heads, model.backbone
    if heads is None:
        raise ValueError("model: expected one with heads, got one without")
    if not 1 <= prompt <= len(tokens):
        raise ValueError(f"prompt: expected 1 to {len(tokens)} tokens, got {prompt}")
    ids = torch.tensor(tokens, dtype=torch.int64, device=backbone.device)
    text = ids[prompt - 1 :]
    count = len(text) - 2  # positions with a target
    if count < 1:
        return torch.empty(0, heads.num_heads, dtype=torch.int64)
    # Entry k of a row: the token k + 1 places later; the first is the root, head k's target is entry k + 1.
    later = shifted_labels(text, range(1, heads.num_heads + 2)).T[:count]
    states = layer_states(backbone.decoder, heads.feature_layers, input_ids=ids[None], use_cache=False)
    hidden = states[0, prompt - 1 :][:count].to(heads.w1.dtype)
    ranks = min(RANKS, heads.num_candidates)
    found = []
    rows, drawn = ROWS, {}
    if seed is not None:
        rows = max(1, min(ROWS, MOST_NOISE // (heads.num_heads * heads.vocab_size)))
        seeds = torch.full((count,), row_seed(seed), device=hidden.device)
        # At a text's first position, the prompt's last token, one new token is known: the root.
        places = torch.arange(1, count + 1, dtype=torch.int32, device=hidden.device)
    for first in range(0, count, rows):
        part = slice(first, first + rows)
        states, tokens_later = hidden[part], later[part]
        if seed is not None:
            noise = gumbel_noise(seeds[part], places[part], heads.num_heads, heads.vocab_size)
            drawn = {"temperature": draw_temperature(temperature), "noise": noise}
        root = backbone.embed_tokens(tokens_later[:, 0]) if heads.root_rank else None
        drafts = _draft_tokens(
            heads, states, tokens_later[:, :-1], ranks, backbone.lm_head, root_embedding=root, **drawn
        )
        hits = drafts == tokens_later[:, 1:, None]
        place = hits.int().argmax(-1).where(hits.any(-1), -1)
        found.append(place.where(tokens_later[:, 1:] != IGNORE, IGNORE).cpu())
    return torch.cat(found)


def _draft_tokens(
    heads: MedusaHeads, states: torch.Tensor, parents: torch.Tensor, ranks: int, lm_head: torch.nn.Module, **inputs: Any
) -> torch.Tensor:
    """Return each head's top tokens, int64 [R, K, ranks], after `parents` int64 [R, K] (IGNORE beyond the end).

    `inputs` are those that `MedusaHeads.propose` takes by name.
    """
    if not heads.parent_rank:
        return heads.propose(states, ranks, lm_head, **inputs)[1]
    children = heads.propose_children(states, parents[:, 0], ranks, lm_head, **inputs)
    before = torch.cat([parents[:, :1, None].expand(-1, 1, children.tokens.shape[2]), children.tokens[:, :-1]], dim=1)
    named = before == parents[:, :, None]
    place = named.int().argmax(-1)
    order = children.order.take_along_dim(place[:, :, None, None], dim=2).squeeze(2)
    order = order.where(named.any(-1, keepdim=True), torch.arange(ranks, device=order.device))
    return children.tokens.gather(-1, order)
