"""The decode loop: prefill, then steps until every row has ended.

`decode_step` is the paper's step, one line per stage. The loop does not know how a token is picked, which tree is best,
or how a runtime finds memory, launches steps and reads their results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from medusa_decoding.backbone.attention_swap import DecodeContext
from medusa_decoding.backbone.backbone import Backbone
from medusa_decoding.decode.accept import accept
from medusa_decoding.decode.arrange import arrange
from medusa_decoding.decode.compact import compact
from medusa_decoding.decode.limits import Limits
from medusa_decoding.decode.policy import Policy, StepResult
from medusa_decoding.decode.prefill import prefill
from medusa_decoding.decode.propose import places, propose
from medusa_decoding.decode.state import DecodeState
from medusa_decoding.decode.tree_tensors import TreeTensors
from medusa_decoding.decode.verify import Nodes, TokenSelector
from medusa_decoding.heads import MedusaHeads
from medusa_decoding.trees.tree import Tree

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
    """Run one step of Medusa decoding: changes `state` in place and reads nothing back to the host."""
    noise = selector.noise(state, places(heads, tree), backbone.vocab_size)
    drafts = propose(state, heads, backbone.lm_head, tree, selector.draw_temperature, noise, backbone.embed_tokens)
    tokens, shape = arrange(state, drafts, tree)
    hidden, states = backbone.forward(tokens, DecodeContext(state.cache, shape.depths, shape.ancestors))
    next_tokens = selector(Nodes(hidden, tokens, shape, noise), backbone.lm_head, state, limits)  # verify
    path, accept_lens, cache_lens = accept(tokens, next_tokens, states, shape, state, limits)
    compact(state.cache, path, accept_lens, cache_lens)


def plain_step(
    backbone: Backbone, shape: TreeTensors, state: DecodeState, selector: TokenSelector, limits: Limits
) -> None:
    """Run the same step for a tree that is only a root: plain decoding, with nothing to propose or move."""
    tokens = state.root[:, None]
    noise = selector.noise(state, 1, backbone.vocab_size)
    hidden, states = backbone.forward(tokens, DecodeContext(state.cache, shape.depths, shape.ancestors))
    next_tokens = selector(Nodes(hidden, tokens, shape, noise), backbone.lm_head, state, limits)
    accept(tokens, next_tokens, states, shape, state, limits)


class Runtime(Protocol):
    """What one generation runs on: memory for its state, launched steps, and their results as the host gets them.

    Attributes:
        ended: whether every row is known to have ended.
        work: seconds that the device has worked so far, if they are measured.
    """

    ended: bool
    work: float

    def begin(self) -> tuple[DecodeState, int]:
        """Return a cleared state, and how many tokens of every prompt are in its cache already."""

    def matched(self) -> list[int]:
        """Return how many tokens of each running row's end stand earlier in its text, if the host follows it."""

    def make_room(self) -> DecodeState:
        """Return the state with room for one more step: the same one, or its continuation in a larger cache."""

    def step(self, tree: Tree) -> Step:
        """Return the step for a tree."""

    def made(self, tree: Tree) -> bool:
        """Return whether the tree's step can run as it is, or has to be compiled or captured first."""

    def read(self, tree: Tree | None = None, made: bool = False, wait: bool = False) -> list[StepResult]:
        """Record what was just launched and return the steps whose results have become known.

        Args:
            tree: of the step launched; None for the prefill.
            made: what the step returned.
            wait: for the results of everything launched.
        """


def decode_loop(
    backbone: Backbone,
    prompts: list[torch.Tensor],
    selector: TokenSelector,
    limits: Limits,
    policy: Policy,
    runtime: Runtime,
) -> DecodeState:
    """Generate until every row has ended; return the last state.

    Args:
        backbone: the swapped model.
        prompts: one int64 [T_b] per row.
        selector: how tokens are picked.
        limits: when rows end.
        policy: chooses the tree of each step.
        runtime: of this generation alone.

    Raises:
        FloatingPointError: the model's output was not finite; names the step (0 is the prefill) and the row.
        MemoryError: the cache does not fit.
    """
    state, reused = runtime.begin()
    prefill(backbone, prompts, state, selector, limits, reuse=reused)
    # A policy that uses durations gets the prefill's before it chooses anything.
    runtime.read(wait=policy.timed)
    policy.begin(runtime.work, batch=len(prompts), rows=state.cache.capacity)
    while not runtime.ended:
        tree = policy.choose(runtime.made, runtime.matched())
        rows, state = state.cache.capacity, runtime.make_room()
        if state.cache.capacity != rows:
            policy.grown(state.cache.capacity)
        made = runtime.step(tree)(state, selector, limits)
        for result in runtime.read(tree, bool(made)):
            policy.observe(result)
    return state
