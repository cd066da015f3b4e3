"""Arrange: root, draft tokens and copied tokens in the order of the tree's nodes (Medusa paper, section 2.1.2).

A dynamic tree keeps the most likely candidate nodes of each step, so every step and every row has its own shape.
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
    """Put tokens in node order: the root, the heads' drafts, and tokens copied from the text.

    Returns:
        tokens int64 [B, N] and their shape: the tree's, or for a dynamic tree this step's.
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
        text, length = state.text, tree.tree.lookup
        copied = state.copies if text is None else look_up(text, state.output, state.count, length)
        assert copied is not None, "states get their text, or each step's copies"
        tokens.append(copied)
    candidates = torch.cat(tokens, dim=1)
    if not dynamic:
        return candidates, tree
    # Root and copied tokens are always selected: they count as certain, which no draft quite is.
    certain = state.check.new_zeros(len(candidates), 1)
    copied = certain.expand(-1, tree.tree.lookup)
    if tree.tree.lookup:
        logprobs = [probable.clamp(max=ALMOST_CERTAIN) for probable in logprobs]
    selected, parents, depths, ancestors, paths = tree_select(
        candidates, torch.cat([certain, *logprobs, copied], dim=1), tree.depths, tree.paths, tree.tree.num_nodes
    )
    return selected, TreeShape(parents, depths, ancestors, paths, tree.depth)


def _depth_by_depth(
    drafts: Children, tree: TreeTensors, weighed: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tokens of each depth, [B, n]: the child of rank r is the r-th best after its parent's candidate.

    If weighed, also return their log-probabilities there, fp32 [B, n].
    """
    tokens, logprobs, order = [], [], drafts.order.flatten(2)
    probable = drafts.of_children().flatten(2) if weighed else None
    places = torch.zeros_like(drafts.tokens[:, 0, :1])  # the root's row is the first (all are equal)
    for depth, (parents, ranks) in enumerate(tree.levels):
        slots = places[:, parents] * tree.top_k + ranks
        places = order[:, depth].gather(1, slots)
        tokens.append(drafts.tokens[:, depth].gather(1, places))
        if probable is not None:
            logprobs.append(probable[:, depth].gather(1, slots))
    return tokens, logprobs
