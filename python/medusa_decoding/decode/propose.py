"""Propose: the heads' top draft tokens at the last accepted token (Medusa paper, section 2.1.1)."""

from __future__ import annotations

from torch import nn

from medusa_decoding.decode.state import DecodeState
from medusa_decoding.decode.tree_tensors import TreeTensors
from medusa_decoding.heads import Children, DraftTokens, MedusaHeads


def propose(
    state: DecodeState, heads: MedusaHeads | None, lm_head: nn.Module, tree: TreeTensors
) -> DraftTokens | Children | None:
    """Run the heads on one hidden state per sequence, never on the tree's nodes: tokens [B, K, top_k], best first.

    Heads whose drafts depend on their parent return the best tokens after each of their candidates. Returns None if the
    tree has no draft tokens.
    """
    if not tree.tree.choices:
        return None
    assert heads is not None, "trees are checked against the heads before steps are made"
    if heads.parent_rank:
        return heads.propose_children(state.hidden, state.root, tree.top_k, lm_head)
    return heads.propose(state.hidden, tree.top_k, lm_head)
