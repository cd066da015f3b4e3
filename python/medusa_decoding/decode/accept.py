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

    Tensors are `tree_accept`'s; `states` [B, N, (1 + F) H] are what heads read of the nodes, see `Backbone.forward`.
    All of `state` but keys and values is changed in place. Returns path, accept_lens and cache_lens, for `compact`.
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
