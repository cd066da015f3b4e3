"""Propose: the heads' top draft tokens at the last accepted token (Medusa paper, section 2.1.1)."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from medusa_decoding.decode.state import DecodeState
from medusa_decoding.decode.tree_tensors import TreeTensors
from medusa_decoding.heads import Children, DraftTokens, MedusaHeads
from medusa_decoding.trees.tree import Tree


def places(heads: MedusaHeads | None, tree: Tree | TreeTensors) -> int:
    """Return for how many places of new tokens a step needs random numbers: for every depth, and for every head."""
    return max(tree.depth + 1, 0 if heads is None else heads.num_heads)


def propose(
    state: DecodeState,
    heads: MedusaHeads | None,
    lm_head: nn.Module,
    tree: TreeTensors,
    temperature: float | None = None,
    noise: torch.Tensor | None = None,
    embed_tokens: nn.Module | None = None,
) -> DraftTokens | Children | None:
    """Run the heads on one hidden state per sequence, never on the tree's nodes: tokens [B, K, top_k], best first.

    Heads whose drafts depend on their parent return the best tokens after each of their candidates. `embed_tokens`, the
    backbone's input embedding, is called for heads with a root input. Returns None if the tree has no draft tokens.

    If tokens are drawn at a temperature, candidates are ranked as the draws are made, with the same `noise` (fp32
    [B, at least K, V], see `TokenSelector.noise`): a head's best candidate is then what it would draw itself, and the
    most likely to be the model's draw (Daliri et al. 2024, arXiv:2408.07978).
    """
    if not tree.tree.choices:
        return None
    assert heads is not None, "trees are checked against the heads before steps are made"
    drawn: dict[str, Any] = {} if temperature is None else {"temperature": temperature, "noise": noise}
    root = embed_tokens(state.root) if heads.root_rank and embed_tokens is not None else None
    if heads.parent_rank:
        return heads.propose_children(state.hidden, state.root, tree.top_k, lm_head, root_embedding=root, **drawn)
    return heads.propose(state.hidden, tree.top_k, lm_head, root_embedding=root, **drawn)
