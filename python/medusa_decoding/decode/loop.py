"""The decode loop: prefill, then steps until every row has ended.

`decode_step` is the paper's step, one line a stage. The loop does not know how a node's token is accepted, how the
cache is laid out, or whether the step it calls is run eagerly, compiled or captured.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from medusa_decoding.attention import DecodeContext
from medusa_decoding.decode.accept import accept
from medusa_decoding.decode.arena import Arena
from medusa_decoding.decode.arrange import TreeOnDevice, arrange
from medusa_decoding.decode.compact import compact
from medusa_decoding.decode.prefill import prefill
from medusa_decoding.decode.propose import propose
from medusa_decoding.decode.state import DecodeState, StopRules
from medusa_decoding.decode.verify import verify
from medusa_decoding.decode.watch import Progress, Watch
from medusa_decoding.heads import MedusaHeads
from medusa_decoding.tree import Tree
from medusa_decoding.trunk import Trunk

Step = Callable[[DecodeState, StopRules], None]


def decode_step(trunk: Trunk, heads: MedusaHeads, shape: TreeOnDevice, state: DecodeState, rules: StopRules) -> None:
    """One step of Medusa decoding; changes `state` in place and reads nothing back to the host."""
    _, guesses = propose(state, heads, trunk.lm_head, shape.top_k)
    tokens = arrange(state.root, guesses, shape)
    hidden = trunk.forward(tokens, DecodeContext(state.cache, shape.depths, shape.ancestors))
    next_tokens = verify(hidden, tokens, shape.depths, shape.parents, trunk.lm_head, state, rules)
    path, kept, lengths = accept(tokens, next_tokens, hidden, shape, state, rules)
    compact(state.cache, path, kept, lengths)


def plain_step(trunk: Trunk, shape: TreeOnDevice, state: DecodeState, rules: StopRules) -> None:
    """The same step for the tree that is only a root: plain decoding, with nothing to propose or move."""
    tokens = state.root[:, None]
    hidden = trunk.forward(tokens, DecodeContext(state.cache, shape.depths, shape.ancestors))
    next_tokens = verify(hidden, tokens, shape.depths, shape.parents, trunk.lm_head, state, rules)
    accept(tokens, next_tokens, hidden, shape, state, rules)


def run(
    trunk: Trunk,
    prompts: list[torch.Tensor],
    rules: StopRules,
    tree: Tree,
    step: Step,
    arena: Arena,
    on_progress: Callable[[Progress], None] | None = None,
) -> DecodeState:
    """Generate until every row has ended.

    Args:
        trunk: the swapped model.
        prompts: one int64 [T_b] a row.
        rules: when rows end.
        tree: what each step verifies.
        step: one decode step, in place.
        arena: lends the state; the caller gives it back.
        on_progress: told what has been reached behind the prefill and behind each step (a streamer).
    """
    lengths = [len(prompt) for prompt in prompts]
    # A step writes a row a node, and may accept a whole path past the budget before it is cut.
    spare = tree.num_nodes + tree.depth
    state = arena.lend(lengths, max(lengths) + min(rules.longest, HEADROOM) + spare, rules.longest)
    try:
        prefill(trunk, prompts, state, rules)
        watch = Watch(state, tokens=on_progress is not None)
        watch.record(state)
        counts = [0] * len(prompts)
        while True:
            while watch.pending > watch.late:
                progress = watch.read()
                counts = progress.counts
                if on_progress:
                    on_progress(progress)
                if progress.done:
                    return state
            # Steps not seen yet may each have committed a whole path, up to the budget.
            ahead = watch.pending * (tree.depth + 1)
            rows = zip(lengths, counts, strict=True)
            reached = max(length + min(count + ahead, rules.longest) for length, count in rows)
            if reached + spare > state.cache.capacity:
                wanted = min(reached + HEADROOM, max(lengths) + rules.longest)
                state = _grown(state, arena, lengths, wanted + spare, rules)
            step(state, rules)
            watch.record(state)
    except BaseException:
        # Whatever stopped it (a streamer, an interrupt): what was lent can serve the next generation.
        arena.give_back(state)
        raise


HEADROOM = 1024
"""Cache rows beyond the prompt that a generation starts with, and that each growth adds at least."""


def _grown(state: DecodeState, arena: Arena, lengths: list[int], rows: int, rules: StopRules) -> DecodeState:
    """Move a generation to a larger cache."""
    larger = arena.lend(lengths, rows, rules.longest)
    larger.continue_from(state)
    arena.give_back(state)
    return larger
