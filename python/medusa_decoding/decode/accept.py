"""Accept: the longest path whose tokens the model itself would have chosen (Medusa paper, section 2.3.1, greedy).

What a row carries to its next step is settled here too. Acceptance knows tokens and the tree; it does not know models,
and of caches only how long they are.
"""

from __future__ import annotations

import torch

from medusa_decoding.decode.arrange import Shape
from medusa_decoding.decode.state import DecodeState, Rules
from medusa_kernels import tree_accept


def accept(
    tokens: torch.Tensor,
    next_tokens: torch.Tensor,
    hidden: torch.Tensor,
    shape: Shape,
    state: DecodeState,
    rules: Rules,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find each row's longest path on which every node's token is the model's choice at its parent, and commit it.

    Args:
        tokens: int64 [B, N], the nodes' tokens; the root is always right.
        next_tokens: int64 [B, N], the model's own next token at every node.
        hidden: [B, N, H], the nodes' final hidden states.
        shape: the tree's.
        state: changed in place: all of it but keys and values.
        rules: when rows end.

    Returns:
        path: int32 [B, depth + 1], the accepted nodes from the root on, padded with the last one.
        kept: int32 [B], accepted nodes below the root; -1 for a row that had ended.
        lengths: int32 [B], cached tokens before the step.
    """
    found = tree_accept(
        tokens, next_tokens, hidden, shape.depths, shape.paths, rules.eos, rules.max_new, state.step,
        lengths=state.cache.lengths, root=state.root, state_hidden=state.hidden, output=state.output,
        count=state.count, finished=state.finished, log=state.log,
    )  # fmt: skip
    # Not in the op, where every row reads it.
    state.step += 1
    return found
