"""The paper's step, one line per stage. It does not know how a token is picked or how steps are launched."""

from __future__ import annotations

from collections.abc import Callable

from medusa_decoding.backbone.attention_swap import DecodeContext
from medusa_decoding.backbone.backbone import Backbone
from medusa_decoding.decode.accept import accept
from medusa_decoding.decode.arrange import arrange
from medusa_decoding.decode.compact import compact
from medusa_decoding.decode.limits import Limits
from medusa_decoding.decode.propose import propose
from medusa_decoding.decode.state import DecodeState
from medusa_decoding.decode.tree_tensors import TreeTensors
from medusa_decoding.decode.verify import Nodes, TokenSelector
from medusa_decoding.heads import MedusaHeads

Step = Callable[[DecodeState, TokenSelector, Limits], bool | None]
"""Runs one step in place. Returns whether it was compiled or captured first, so that its duration says nothing."""


def decode_step(
    backbone: Backbone,
    heads: MedusaHeads | None,
    tree: TreeTensors,
    state: DecodeState,
    selector: TokenSelector,
    limits: Limits,
) -> None:
    """Run one step of Medusa decoding: changes `state` in place and reads nothing back to the host.

    A tree that is only a root is plain decoding: there is nothing to propose or move.
    """
    drafts = propose(state, heads, backbone.lm_head, tree)
    tokens, shape = arrange(state, drafts, tree)
    hidden = backbone.forward(tokens, DecodeContext(state.cache, shape.depths, shape.ancestors))
    next_tokens = selector(Nodes(hidden, tokens, shape), backbone.lm_head, state, limits)  # verify
    path, accept_lens, cache_lens = accept(tokens, next_tokens, hidden, shape, state, limits)
    if tree.tree.num_nodes > 1:
        compact(state.cache, path, accept_lens, cache_lens)
