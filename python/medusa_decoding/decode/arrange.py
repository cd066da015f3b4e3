"""Arrange: root, draft tokens and copied tokens in the order of the tree's nodes (Medusa paper, section 2.1.2).

A dynamic tree keeps the likeliest candidate nodes of each step, so every step and every row has its own shape.
"""

from __future__ import annotations

import torch

from medusa_decoding.decode.lookup import look_up
from medusa_decoding.decode.state import DecodeState
from medusa_decoding.decode.tree_tensors import TreeShape, TreeTensors
from medusa_decoding.heads import Children, DraftTokens
from medusa_kernels import tree_select

ALMOST_CERTAIN = -1e-30
"""A log-probability below 0, though the probability is 1 in any precision."""


def arrange(
    state: DecodeState, drafts: DraftTokens | Children | None, tree: TreeTensors
) -> tuple[torch.Tensor, TreeShape]:
    """Lay tokens out in node order: the root, the heads' drafts, what is copied from the text.

    Returns:
        tokens int64 [B, N] and the shape they have: the tree's, or this step's own.
    """
    dynamic = tree.tree.keep is not None
    tokens = [state.root[:, None]]
    logprobs: list[torch.Tensor] = []
    if isinstance(drafts, Children):
        found, logprobs = _depth_by_depth(drafts, tree, dynamic)
        tokens += found
    elif drafts is not None:
        tokens.append(drafts.tokens.flatten(1)[:, tree.slots])
        logprobs = [drafts.logprobs.flatten(1)[:, tree.slots]] if dynamic else []
    if tree.tree.lookup:
        assert state.text is not None, "the loop gives a state its text where a tree copies from it"
        tokens.append(look_up(state.text, state.output, state.count, tree.tree.lookup))
    laid_out = torch.cat(tokens, dim=1)
    if not dynamic:
        return laid_out, tree
    # The root is certain, and so is what is copied: always kept, since no guess quite is.
    certain = state.check.new_zeros(len(laid_out), 1)
    copied = certain.expand(-1, tree.tree.lookup)
    if tree.tree.lookup:
        logprobs = [probable.clamp(max=ALMOST_CERTAIN) for probable in logprobs]
    kept, parents, depths, ancestors, paths = tree_select(
        laid_out, torch.cat([certain, *logprobs, copied], dim=1), tree.depths, tree.paths, tree.tree.num_nodes
    )
    return kept, TreeShape(parents, depths, ancestors, paths, tree.depth)


def _depth_by_depth(
    drafts: Children, tree: TreeTensors, weighed: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tokens of each depth, [B, n]: the child of rank r is the r-th best behind its parent's candidate.

    If weighed, the log-probabilities that they have there as well, fp32 [B, n].
    """
    tokens, logprobs, order = [], [], drafts.order.flatten(2)
    probable = drafts.of_children().flatten(2) if weighed else None
    places = torch.zeros_like(drafts.tokens[:, 0, :1])  # the root, whose row is the first (they are all equal)
    for depth, (parents, ranks) in enumerate(tree.levels):
        slots = places[:, parents] * tree.top_k + ranks
        places = order[:, depth].gather(1, slots)
        tokens.append(drafts.tokens[:, depth].gather(1, places))
        if probable is not None:
            logprobs.append(probable[:, depth].gather(1, slots))
    return tokens, logprobs
