"""The decode loop: prefill, then steps until every row has ended.

`decode_step` is the paper's step, one line a stage. The loop does not know how a node's token is accepted, how the
cache is laid out, or whether the step it calls is run eagerly or compiled.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from medusa_decoding.attention import DecodeContext
from medusa_decoding.decode.accept import accept
from medusa_decoding.decode.arrange import TreeOnDevice, arrange
from medusa_decoding.decode.compact import compact
from medusa_decoding.decode.prefill import prefill
from medusa_decoding.decode.propose import propose
from medusa_decoding.decode.state import DecodeState, StopRules, commit
from medusa_decoding.decode.verify import verify
from medusa_decoding.heads import MedusaHeads
from medusa_decoding.trunk import Trunk

Step = Callable[[DecodeState, StopRules], None]


def decode_step(trunk: Trunk, heads: MedusaHeads, shape: TreeOnDevice, state: DecodeState, rules: StopRules) -> None:
    """One step of Medusa decoding; changes `state` in place and reads nothing back to the host."""
    _, guesses = propose(state, heads, trunk.lm_head, shape.top_k)
    tokens = arrange(state.root, guesses, shape)
    hidden = trunk.forward(tokens, DecodeContext(state.cache, shape.depths, shape.ancestors))
    next_tokens = verify(hidden, tokens, shape.depths, shape.parents, trunk.lm_head, state, rules)
    path, accepted, last = accept(tokens, next_tokens, shape)
    compact(state.cache, path, accepted, state.finished)
    rows = torch.arange(len(last), device=last.device)
    state.root.copy_(next_tokens[rows, last])
    state.hidden.copy_(hidden[rows, last])
    commit(state, rules, next_tokens.gather(1, path), accepted)


def plain_step(trunk: Trunk, shape: TreeOnDevice, state: DecodeState, rules: StopRules) -> None:
    """The same step for the tree that is only a root: plain decoding, with nothing to propose, accept or move."""
    hidden = trunk.forward(state.root[:, None], DecodeContext(state.cache, shape.depths, shape.ancestors))
    next_tokens = verify(hidden, state.root[:, None], shape.depths, shape.parents, trunk.lm_head, state, rules)
    state.cache.lengths += (~state.finished).to(torch.int32)
    state.root.copy_(next_tokens[:, 0])
    commit(state, rules, next_tokens, torch.zeros_like(state.count))


def run(
    trunk: Trunk,
    prompts: list[torch.Tensor],
    rules: StopRules,
    spare_rows: int,
    step: Step,
    on_progress: Callable[[DecodeState], None] | None = None,
) -> DecodeState:
    """Generate until every row has ended.

    Args:
        trunk: the swapped model.
        prompts: one int64 [T_b] a row.
        rules: when rows end.
        spare_rows: see `prefill`.
        step: one decode step, in place.
        on_progress: called after the prefill and after each step; it may read the state (a streamer).
    """
    state = prefill(trunk, prompts, rules, spare_rows)
    if on_progress:
        on_progress(state)
    while not bool(state.finished.all()):
        step(state, rules)
        if on_progress:
            on_progress(state)
    return state
