"""The decode loop: prefill, then steps until every row has ended.

`decode_step` is the paper's step, one line a stage. The loop does not know how a node's token is accepted, how the
cache is laid out, which tree is best, or whether the step it calls is run eagerly, compiled or captured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from medusa_decoding.backbone.attention_swap import DecodeContext
from medusa_decoding.backbone.backbone import Backbone
from medusa_decoding.backbone.tensor_parallel import Peers
from medusa_decoding.decode.accept import accept
from medusa_decoding.decode.adaptive.policy import Policy
from medusa_decoding.decode.arrange import TreeOnDevice, arrange
from medusa_decoding.decode.compact import compact
from medusa_decoding.decode.prefill import prefill
from medusa_decoding.decode.propose import propose
from medusa_decoding.decode.runtime.progress import Progress, Watch
from medusa_decoding.decode.runtime.state_pool import StatePool
from medusa_decoding.decode.runtime.streaming import Follow
from medusa_decoding.decode.state import DecodeState, Rules
from medusa_decoding.decode.verify import Greedy, Nodes, verify
from medusa_decoding.heads import MedusaHeads
from medusa_decoding.trees.tree import Tree

Step = Callable[[DecodeState, Rules], bool | None]
"""Runs one step in place; returns whether it was made (compiled, captured) first, so that its duration says nothing."""


def decode_step(
    backbone: Backbone, heads: MedusaHeads | None, tree: TreeOnDevice, state: DecodeState, rules: Rules
) -> None:
    """One step of Medusa decoding; changes `state` in place and reads nothing back to the host."""
    drafts = propose(state, heads, backbone.lm_head, tree)
    tokens, shape = arrange(state, drafts, tree)
    hidden = backbone.forward(tokens, DecodeContext(state.cache, shape.depths, shape.ancestors))
    next_tokens = verify(Nodes(hidden, tokens, shape), backbone.lm_head, state, rules)
    path, kept, lengths = accept(tokens, next_tokens, hidden, shape, state, rules)
    compact(state.cache, path, kept, lengths)


def plain_step(backbone: Backbone, shape: TreeOnDevice, state: DecodeState, rules: Rules) -> None:
    """The same step for the tree that is only a root: plain decoding, with nothing to propose or move."""
    tokens = state.root[:, None]
    hidden = backbone.forward(tokens, DecodeContext(state.cache, shape.depths, shape.ancestors))
    next_tokens = verify(Nodes(hidden, tokens, shape), backbone.lm_head, state, rules)
    accept(tokens, next_tokens, hidden, shape, state, rules)


@dataclass
class Run:
    """What a generation left behind.

    Attributes:
        state: its last state; whoever holds it gives it back to the pool.
        reused: tokens of each prompt that were in the cache before.
        trees: the tree of each step launched (on a GPU one step more than was needed).
        seconds: of the prefill and of each step read back, if asked for.
    """

    state: DecodeState
    reused: int
    trees: list[Tree]
    seconds: list[float]


@dataclass
class Hooks:
    """What a generation is told to do besides writing tokens.

    Attributes:
        draws: returns the uniform numbers of sampling, fp64 [B, the largest budget], or None if nothing is drawn;
            called once there is memory for the generation.
        observer: is shown each token, and may end rows.
        timed: measure the prefill and each step.
        earlier: the state of a generation whose text the prompts begin with, and how many of its tokens they share.
    """

    draws: Callable[[], torch.Tensor | None] = lambda: None
    observer: Follow | None = None
    timed: bool = False
    earlier: tuple[DecodeState | None, int] = (None, 0)


def run(
    backbone: Backbone,
    prompts: list[torch.Tensor],
    rules: Rules,
    policy: Policy,
    step_of: Callable[[Tree], Step],
    pool: StatePool,
    hooks: Hooks | None = None,
) -> Run:
    """Generate until every row has ended.

    Args:
        backbone: the swapped model.
        prompts: one int64 [T_b] a row.
        rules: how tokens are chosen, when rows end.
        policy: the tree of each step.
        step_of: a tree to its decode step, in place.
        pool: lends the state.
        hooks: what else is wanted.

    Raises:
        FloatingPointError: the model's output was not finite; names the step (0 is the prefill) and the row.
        MemoryError: the cache does not fit.
    """
    hooks = hooks or Hooks()
    lengths = [len(prompt) for prompt in prompts]
    # A step writes a row a node, and may accept a whole path past the budget before it is cut.
    spare = max(tree.num_nodes + tree.depth for tree in policy.trees)
    nodes, logits = max(tree.num_nodes for tree in policy.trees), not isinstance(rules.choice, Greedy)
    memory = nodes, logits, any(tree.keep is not None for tree in policy.trees)
    rows = pool.first_capacity(lengths, rules.longest, spare, HEADROOM, *memory, held=hooks.earlier[0])
    earlier, hooks.earlier = hooks.earlier, (None, 0)
    state, reused = _first_state(pool, earlier, lengths, rows, rules.longest, *memory)
    del earlier  # its cache may be replaced, and shall not live on beside the new one
    try:
        if any(tree.lookup for tree in policy.trees):
            state.hold_text(prompts)
        draws = hooks.draws()
        if draws is not None:
            state.draws[:, : draws.shape[1]].copy_(draws)
        watch = Watch(state, tokens=hooks.observer is not None, timed=hooks.timed or policy.timed)
        reader = _Reader(watch, policy, backbone.peers)
        prefill(backbone, prompts, state, rules, reuse=reused)
        reader.record(state)
        # A policy that goes by the clock is told what the prefill took before it chooses anything.
        done = reader.catch_up(state, hooks.observer, all_of_it=policy.timed)
        policy.begin(sum(reader.seconds), batch=len(prompts), rows=state.cache.capacity)
        while not done:
            tree = policy.choose()
            counts = zip(lengths, reader.counts, strict=True)
            reached = max(length + min(count + reader.ahead, rules.longest) for length, count in counts)
            if reached + spare > state.cache.capacity:
                wanted = min(reached + HEADROOM, max(lengths) + rules.longest)
                state = _grown(state, pool, lengths, wanted + spare, rules, *memory)
                policy.grown(state.cache.capacity)
            made = step_of(tree)(state, rules)
            reader.record(state, tree, made=bool(made))
            done = reader.catch_up(state, hooks.observer)
        return Run(state, reused, reader.trees, reader.seconds)
    except BaseException:
        # Whatever stopped it (a streamer, an interrupt): what was lent can serve the next generation.
        pool.release(state)
        raise


HEADROOM = 1024
"""Cache rows beyond the prompt that a generation starts with, and that each growth adds at least."""


class _Reader:
    """Reads records in order, and tells policy and observer of them."""

    def __init__(self, watch: Watch, policy: Policy, peers: Peers) -> None:
        self.watch, self.policy, self.peers = watch, policy, peers
        self.trees: list[Tree] = []
        self.unseen: deque[tuple[Tree, bool]] = deque()  # and whether the step was made in this call
        self.seconds: list[float] = []
        self.counts: list[int] = []
        self._ended: list[bool] = []
        self._cut: dict[int, int] = {}
        self._read = 0

    @property
    def ahead(self) -> int:
        """Tokens that a row may have got in what is not read yet: a whole path a step, one in the prefill."""
        return sum(tree.depth + 1 for tree, _ in self.unseen) + (self._read == 0)

    def record(self, state: DecodeState, tree: Tree | None = None, made: bool = False) -> None:
        """Have what was just launched recorded: a step, or the prefill."""
        self.watch.record(state)
        if tree is None:
            self.counts = [0] * len(state.root)
            self._ended = [False] * len(state.root)
        else:
            self.trees.append(tree)
            self.unseen.append((tree, made))

    def catch_up(self, state: DecodeState, observer: Follow | None, all_of_it: bool = False) -> bool:
        """Read all records but those the device may still be at; return whether every row has ended."""
        while self.watch.pending > (0 if all_of_it else self.watch.late):
            progress = self.watch.read()
            self._refuse_broken(progress)
            before, live = self.counts, [not ended for ended in self._ended]
            self.counts = [self._cut.get(row, count) for row, count in enumerate(progress.counts)]
            self._ended = [row in self._cut or ended for row, ended in enumerate(progress.finished)]
            seconds = progress.seconds
            if seconds is not None:
                # Processes that share the model choose alike only if they see alike.
                seconds = self.peers.agree(seconds) if self.policy.timed else seconds
                self.seconds.append(seconds)
            if self._read > 0:
                committed = [now - was for now, was, alive in zip(self.counts, before, live, strict=True) if alive]
                tree, made = self.unseen.popleft()
                self.policy.observe(tree, None if made else seconds, committed)
            self._read += 1
            for row, count in observer(progress) if observer else ():
                state.cut(row, count)
                self._cut[row] = self.counts[row] = count
                self._ended[row] = True
            if all(self._ended):
                return True
        return False

    def _refuse_broken(self, progress: Progress) -> None:
        for row, (broken, ended) in enumerate(zip(progress.broken, self._ended, strict=True)):
            if broken and not ended:
                raise FloatingPointError(
                    f"model: expected finite logits, got NaN or infinity at step {self._read} (0 is the prefill) in "
                    f"row {row}"
                )


def _first_state(
    pool: StatePool, earlier: tuple[DecodeState | None, int], lengths: list[int], rows: int, budget: int, *memory: Any
) -> tuple[DecodeState, int]:
    """Return the state to begin with, and how many tokens of the prompts stand in its cache."""
    state, common = earlier
    if state is None:
        return pool.acquire(lengths, rows, budget, *memory), 0
    state, cached = pool.enlarge(state, lengths, rows, budget, *memory)
    return state, min(common, cached)


def _grown(
    state: DecodeState, pool: StatePool, lengths: list[int], rows: int, rules: Rules, *memory: Any
) -> DecodeState:
    """Move a generation to a larger cache."""
    # A session's state may have room for more tokens than this call needs; the larger one takes over all of it.
    budget = max(rules.longest, state.output.shape[1] - 1)
    larger = pool.acquire(lengths, rows, budget, *memory)
    larger.continue_from(state)
    pool.release(state)
    return larger
