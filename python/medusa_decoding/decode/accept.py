"""Accept: the longest path whose tokens the model itself would have chosen (Medusa paper, section 2.3.1, greedy)."""

from __future__ import annotations

import torch

from medusa_decoding.decode.limits import Limits
from medusa_decoding.decode.state import DecodeState
from medusa_decoding.decode.tree_tensors import TreeShape
from medusa_kernels import tree_accept


def accept(
    tokens: torch.Tensor,
    next_tokens: torch.Tensor,
    states: torch.Tensor,
    shape: TreeShape,
    state: DecodeState,
    limits: Limits,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find and commit each row's longest path whose tokens are the model's own next token at their parents.

    Args:
        tokens: int64 [B, N], the nodes' tokens; the root is always right.
        next_tokens: int64 [B, N], the model's own next token at every node.
        states: [B, N, (1 + F) H], what heads read of the nodes, see `Backbone.forward`.
        shape: the tree's.
        state: changed in place, except keys and values.
        limits: when rows end.

    Returns:
        path: int32 [B, depth + 1], the accepted nodes from the root on, padded with the last one.
        accept_lens: int32 [B], accepted nodes below the root; -1 for a row that had ended.
        cache_lens: int32 [B], cached tokens before the step.
    """
    accepted = tree_accept(
        tokens, next_tokens, states, shape.depths, shape.paths, limits.eos_tensor,
        limits.budgets_tensor, state.step,
        lengths=state.cache.lengths, root=state.root, state_hidden=state.hidden, output=state.output,
        count=state.count, finished=state.finished, log=state.log,
        check=state.check, report=state.report,
    )  # fmt: skip
    # Not in the op, because every row of it reads the step.
    state.step += 1
    return accepted
