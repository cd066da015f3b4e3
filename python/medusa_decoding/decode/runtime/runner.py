"""Runner: one generation's state, steps and progress; implements `loop.Runtime`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch

from medusa_decoding.decode.limits import Limits
from medusa_decoding.decode.lookup import Repeats
from medusa_decoding.decode.loop import Step
from medusa_decoding.decode.policy import Policy, StepResult
from medusa_decoding.decode.propose import places
from medusa_decoding.decode.runtime.memory import Sizes
from medusa_decoding.decode.runtime.progress import RowReader, Watch, hold_copies, matched
from medusa_decoding.decode.runtime.steps import Backend, Steps, is_made
from medusa_decoding.decode.runtime.streaming import Observer
from medusa_decoding.decode.state import DecodeState
from medusa_decoding.decode.verify import TokenSelector, refuse_broken
from medusa_decoding.linears.logits import logits_projection
from medusa_decoding.trees.tree import Tree

HEADROOM = 1024
"""Cache rows beyond the prompt that a generation starts with, and that each growth adds at least."""


class Runner:
    """Runs one generation.

    Args:
        prompts: one int64 [T_b] per row.
        take_earlier: returns the state of a generation whose text the prompts begin with, if any, and how many tokens
            they share; called once.
        seeds: int64 [B], keys of the random numbers of sampling; None if nothing is drawn.
        observer: is shown each token, and may end rows.
        timed: measure the prefill and each step, also if the policy does not need it.

    Attributes:
        state: the current state. Its user releases it to the pool.
        rows: as far as they are read.
        reused: tokens of each prompt that were in the cache before.
        trees: the tree of each step launched (on a GPU one step more than was needed).
        seconds: of the prefill and of each step read back, if measured.
        work: seconds that the device has worked, if measured; see `progress.Progress`.
        ended: whether every row is known to have ended.
    """

    def __init__(
        self,
        steps: Steps,
        backend: Backend,
        prompts: list[torch.Tensor],
        selector: TokenSelector,
        limits: Limits,
        policy: Policy,
        *,
        take_earlier: Callable[[], tuple[DecodeState | None, int]] = lambda: (None, 0),
        seeds: torch.Tensor | None = None,
        observer: Observer | None = None,
        timed: bool = False,
    ) -> None:
        self._step = steps.prepare(backend)
        self.pool, self.prompts, self.policy = steps.pool, prompts, policy
        drawn = 0 if selector.draw_temperature is None else max(places(steps.heads, tree) for tree in policy.trees)
        lengths, budget = [len(prompt) for prompt in prompts], max(limits.budgets)
        # Some requests and models have no fused form, and make all logits after all.
        fused = limits.min_new_tensor is None and logits_projection(steps.backbone.lm_head)[0] is not None
        drafted = 0 if steps.heads is None else steps.heads.stored_logits(steps.backbone.lm_head)
        self.sizes = Sizes.for_trees(lengths, budget, policy.trees, selector.makes_logits or not fused, drawn, drafted)
        self.state: DecodeState | None = None
        self.reused = 0
        self.trees: list[Tree] = []
        self.seconds: list[float] = []
        self.work = 0.0
        self.ended = False
        self._agree = steps.backbone.peers.agree
        self._selector, self._limits = selector, limits
        self._take_earlier, self._seeds, self._observer = take_earlier, seeds, observer
        self._timed = timed or policy.timed
        self._unread: deque[tuple[Tree, bool]] = deque()  # and whether the step was made in this call
        self.rows = [RowReader() for _ in prompts]
        self._reads = 0

    def begin(self) -> tuple[DecodeState, int]:
        """See `loop.Runtime`. Raises `MemoryError` if the generation does not fit."""
        earlier, common = self._take_earlier()
        rows = self.pool.first_capacity(self.sizes, HEADROOM, held=earlier)
        if earlier is None:
            self.state = self.pool.acquire(self.sizes, rows)
        else:
            self.state, cached = self.pool.enlarge(earlier, self.sizes, rows)
            self.reused = min(common, cached)
        if self._seeds is not None:
            self.state.seeds.copy_(self._seeds)
        self._watch = Watch(self.state, timed=self._timed)
        if any(tree.lookup for tree in self.policy.trees):
            if self._watch.late:
                self.state.hold_text(self.prompts)
            else:
                for row, prompt in zip(self.rows, self.prompts, strict=True):
                    row.repeats = Repeats(prompt.tolist())
        return self.state, self.reused

    def matched(self) -> list[int]:
        """See `loop.Runtime`."""
        return matched(self.rows)

    def step(self, tree: Tree) -> Step:
        """See `loop.Runtime`."""
        assert self.state is not None
        hold_copies(self.state, self.rows, tree.lookup)
        return self._step(tree)

    def make_room(self) -> DecodeState:
        """See `loop.Runtime`. The cache grows before it could overflow, though results are read late."""
        assert self.state is not None
        lengths, budget, spare = self.sizes.prompt_lengths, self.sizes.budget, self.sizes.spare
        # Tokens that a row may have got in what is not read yet: a whole path per step, one in the prefill.
        ahead = sum(tree.depth + 1 for tree, _ in self._unread) + (self._reads == 0)
        reached = max(length + min(row.count + ahead, budget) for length, row in zip(lengths, self.rows, strict=True))
        if reached + spare > self.state.cache.capacity:
            rows = min(reached + HEADROOM, max(lengths) + budget) + spare
            # A session's state may have room for more tokens than this call needs; the larger one takes over all of it.
            sizes = replace(self.sizes, budget=max(budget, self.state.output.shape[1] - 1))
            larger = self.pool.acquire(sizes, rows)
            larger.continue_from(self.state)
            smaller, self.state = self.state, larger
            self.pool.release(smaller)
        return self.state

    def made(self, tree: Tree) -> bool:
        """See `loop.Runtime`."""
        assert self.state is not None
        return is_made(self._step(tree), self.state, self._selector, self._limits)

    def read(self, tree: Tree | None = None, made: bool = False, wait: bool = False) -> list[StepResult]:
        """See `loop.Runtime`."""
        assert self.state is not None
        self._watch.record(self.state)
        if tree is not None:
            self.trees.append(tree)
            self._unread.append((tree, made))
        results = []
        while not self.ended and self._watch.pending > (0 if wait else self._watch.late):
            progress = self._watch.read()
            refuse_broken(progress.broken, [row.ended for row in self.rows], self._reads)
            read = [row for place, row in enumerate(self.rows) if row.read(progress, place)]
            committed, copied = [len(row.new) for row in read], [row.copied for row in read if row.copied is not None]
            work = progress.work
            if progress.seconds is not None and work is not None:
                # Processes that share the model choose the same trees only if they see the same durations.
                work = self._agree(work) if self.policy.timed else work
                self.seconds.append(progress.seconds)
                self.work += work
            if self._reads > 0:
                tree, made = self._unread.popleft()
                results.append(StepResult(tree, work, committed, made, copied))
            self._reads += 1
            for place in self._observer(self.rows) if self._observer else ():
                self.state.cut(place, self.rows[place].count)
            self.ended = all(row.ended for row in self.rows)
        return results

    def release(self) -> None:
        """Give the state back to the pool: the next generation can use it, whatever stopped this one."""
        if self.state is not None:
            self.pool.release(self.state)
