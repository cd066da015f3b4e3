"""Scheduler: what the engine's thread does in each of its rounds.

A round admits waiting rows while slots are free, runs their prompts for a limited time, the last one perhaps in part,
and then one step of every group of running rows. The step is the paper's (`decode.loop.decode_step`), over a view of
the slots.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from medusa_decoding.decode.limits import Limits
from medusa_decoding.decode.policy import FixedTree, Policy
from medusa_decoding.decode.prefill import PREFILL_CHUNK, prefill_chunks
from medusa_decoding.decode.runtime.steps import Steps
from medusa_decoding.decode.selection.processors import LogitsProcessors
from medusa_decoding.decode.state import DecodeState
from medusa_decoding.model import MedusaModel
from medusa_decoding.serving.groups import Group, Groups
from medusa_decoding.serving.rows import MOST_NODES, Kind, Row
from medusa_decoding.serving.slots import Slots
from medusa_decoding.serving.ticket import Delta, Finish
from medusa_decoding.trees.tree import Tree

logger = logging.getLogger(__name__)

SHORTEST_CHUNK = 32
LONGEST_SECONDS = 0.5
"""What prompts may take in one round, also when no row runs: until then a closing engine waits."""
KEPT_POLICIES = 64


@dataclass
class Counts:
    """What has been done so far; see `EngineStats`."""

    steps: int = 0
    new_tokens: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    accepted_histogram: Counter[int] = field(default_factory=Counter)
    tree_nodes: Counter[int] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    step_seconds: float = 0.0
    prefill_seconds: float = 0.0


@dataclass
class _Prefill:
    """A prompt that is being run, chunk by chunk."""

    row: Row
    slot: int
    chunks: Iterator[int]
    cached: int


class Scheduler:
    """Runs rows; used by one thread, except `waiting`, to which any thread may append.

    Args:
        model: of the rows.
        steps: its steps, with a pool of their own.
        slots: places of the rows.
        stall_seconds: how long each prompt may keep running rows waiting in a round, roughly.

    Attributes:
        waiting: rows in the order in which they are admitted.
        counts: what has been done so far.
    """

    def __init__(self, model: MedusaModel, steps: Steps, slots: Slots, stall_seconds: float) -> None:
        self.model, self.steps, self.slots, self.stall_seconds = model, steps, slots, stall_seconds
        self.groups = Groups(slots)
        self.waiting: deque[Row] = deque()
        self.counts = Counts()
        self._prefill: _Prefill | None = None
        self._step_for = steps.prepare(model.backend)
        self._policies: dict[tuple[Kind, Tree | Literal["auto"], bool], Policy] = {}
        self._tokens_per_second = 0.0  # of the last chunk
        self._until, self._left = 0.0, 0  # when the prompts of a round must end, and how many of their tokens may run

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        return not (self.waiting or self._prefill is not None or len(self.groups))

    @property
    def taken(self) -> int:
        """Slots that are in use."""
        return len(self.groups) + (self._prefill is not None)

    def round(self) -> None:
        """Run prompts and a step of each group; an error ends the rows that it concerns."""
        seconds = LONGEST_SECONDS
        if running := len(self.groups):
            # Slots are filled soon, as a step of a few rows takes about as long as one of many.
            prompts = min(len(self.waiting) + (self._prefill is not None), len(self.slots) - running)
            seconds = min(self.stall_seconds * prompts, LONGEST_SECONDS)
        self._until, self._left = time.perf_counter() + seconds, PREFILL_CHUNK
        while True:
            for row in [row for row in self._rows() if row.ticket.cancelled]:
                self._end(row, Delta([], "cancelled"))
            if not self._run_chunk() or self._chunk() <= SHORTEST_CHUNK:
                break
        for group in self.groups:
            try:
                self._step(group)
            except Exception as error:  # other requests go on
                logger.exception("engine: a step failed; its requests end")
                first = self.groups.first_slot(group)
                self.slots.forget(first, first + len(group.rows))
                for row in list(group.rows):
                    self._end(row, Delta([], "error", error=error))

    def end_all(self, delta: Delta) -> None:
        """Deliver a last delta to every row; nothing can run any more."""
        for row in self._rows():
            row.end(delta)

    def _end(self, row: Row, delta: Delta) -> None:
        """Take a row out, wherever it is, and deliver its last delta."""
        if self._prefill is not None and row is self._prefill.row:
            self._prefill = None
        elif row in self.groups:
            self.groups.leave(row)
        elif row in self.waiting:
            self.waiting.remove(row)
        assert delta.finish is not None
        self.counts.finished[delta.finish] += not row.ended
        row.end(delta)

    def _rows(self) -> list[Row]:
        # Other threads may append meanwhile, but not while the interpreter copies the queue.
        running = [row for group in self.groups for row in group.rows]
        return [*running, *([self._prefill.row] if self._prefill is not None else []), *self.waiting]

    # -- prompts

    def _admit(self) -> _Prefill | None:
        """Give the first waiting row a slot; None if there is none."""
        running = len(self.groups)
        if not self.waiting or running == len(self.slots):
            return None
        row = self.waiting.popleft()
        try:
            return self._placed(row, running)
        except Exception as error:
            logger.exception("engine: a prompt could not be placed; its request ends")
            self._end(row, Delta([], "error", error=error))
            return None

    def _placed(self, row: Row, running: int) -> _Prefill:
        backbone, prompt = self.model.backbone, row.ticket.prompt
        slot, reused = self.slots.place(prompt, range(running, len(self.slots)), reuse=row.scores is None)
        row.ticket.reused = reused
        self.counts.prompt_tokens += len(prompt)
        self.counts.reused_tokens += reused
        self.slots.clear(slot, row.seed, row.temperature)
        limits = Limits([row.budget], [0], sorted(row.ends), device=backbone.device)
        tokens = [torch.tensor(prompt, device=backbone.device)]
        view = self.slots.rows(slot, slot + 1)
        chunks = prefill_chunks(
            backbone, tokens, view, row.selector, limits, reuse=reused, chunk=self._chunk, observe=row.scores
        )
        return _Prefill(row, slot, chunks, reused)

    def _chunk(self) -> int:
        """Return how many tokens of a prompt may run now."""
        speed = self._tokens_per_second
        if not speed:  # the first chunk of a CPU is short, as it may be slow
            return SHORTEST_CHUNK if self.model.backbone.device.type == "cpu" else max(self._left, SHORTEST_CHUNK)
        # The number is limited as well, since a GPU still works when the host measures the time.
        return max(min(int(speed * (self._until - time.perf_counter())), self._left), SHORTEST_CHUNK)

    def _run_chunk(self) -> bool:
        """Run a chunk of the prompt whose turn it is; after the last one its row joins the steps if it goes on.

        Returns False if there is none.
        """
        self._prefill = prefill = self._prefill or self._admit()
        if prefill is None:
            return False
        view, began = self.slots.rows(prefill.slot, prefill.slot + 1), time.perf_counter()
        try:
            view.finished.fill_(False)
            view.step.zero_()  # the column of the log, which nobody reads
            cached = next(prefill.chunks, None)
            if cached is not None or self._started(prefill, view):
                view.finished.fill_(True)  # it has ended or goes on later; steps of others leave the row as it is
            else:
                self.groups.join(prefill.row, prefill.slot)
        except Exception as error:
            logger.exception("engine: a prefill failed; its request ends")
            cached = None
            self.slots.forget(prefill.slot, prefill.slot + 1)
            view.finished.fill_(True)
            self._end(prefill.row, Delta([], "error", error=error))
        seconds = time.perf_counter() - began
        self.counts.prefill_seconds += seconds
        ran = (len(prefill.row.ticket.prompt) if cached is None else cached) - prefill.cached
        if ran >= SHORTEST_CHUNK:
            self._tokens_per_second = ran / seconds
        self._left -= ran
        if cached is not None:
            prefill.cached = cached
        return True

    def _started(self, prefill: _Prefill, view: DecodeState) -> bool:
        """Take the first token of a row whose prompt has run; return whether it was the last one."""
        row = prefill.row
        error = row.selector.rows[0].error if isinstance(row.selector, LogitsProcessors) else None
        finish = self._take(row, prefill.slot, view, 0, error)
        self._prefill = None
        return finish is not None

    # -- steps

    def _step(self, group: Group) -> None:
        """Run one step of a group, and deliver what it has committed."""
        device, first = self.model.backbone.device, self.groups.first_slot(group)
        width = self.groups.width(group, captured=device.type == "cuda")
        view = self.slots.rows(first, first + width)
        selector, limits = group.prepare(width, device, self.slots.temperatures[first : first + width])
        policy = self._policy(group)
        tree = policy.choose()
        began, work_began = time.perf_counter(), time.thread_time()
        view.step.zero_()
        made = self._step_for(tree)(view, selector, limits)
        left = view if device.type == "cpu" else _OnHost(view)
        seconds = time.perf_counter() - began
        # A CPU's is its work, as in `runtime.progress`; a thread that waits for a GPU may sleep.
        work = (time.thread_time() - work_began if device.type == "cpu" else 0.0) or seconds
        self.counts.steps += 1
        self.counts.tree_nodes[tree.num_nodes] += 1
        self.counts.step_seconds += seconds
        before = [row.emitted for row in group.rows]
        ended = [
            row
            for place, (row, error) in enumerate(zip(group.rows, group.errors(), strict=True))
            if self._take(row, first + place, left, place, error) is not None
        ]
        committed = [row.emitted - was for row, was in zip(group.rows, before, strict=True)]
        for row in ended:
            self.groups.leave(row)
        policy.observe(tree, None if made else work, [count for count in committed if count])

    def _take(
        self, row: Row, slot: int, left: DecodeState | _OnHost, place: int, error: Exception | None
    ) -> Finish | None:
        """Take what a step or a prefill has left of a row; return why the row has ended, if it has."""
        check = float(left.check[place])
        if error is None and check - check != 0:  # infinite or NaN
            error = FloatingPointError(f"model: expected finite logits, got {check} after {row.emitted} new tokens")
        before = row.emitted
        tokens = left.output[place, before : int(left.count[place])].tolist()
        finish = row.take(tokens, bool(left.finished[place]), error)
        self.slots.texts[slot] = row.text if error is None else []
        self.counts.new_tokens += row.emitted - before
        if before and error is None:
            self.counts.accepted_histogram[row.ticket.accepted[-1]] += 1
        if finish is not None:
            self.counts.finished[finish] += 1
        return finish

    def _policy(self, group: Group) -> Policy:
        """Return the policy of a group, told of its rows if they have changed."""
        if group.policy is not None:
            return group.policy
        rows, samples = len(group.rows), any(row.temperature > 0 for row in group.rows)
        tree = group.kind[0]
        if tree is None:
            longest = max(len(row.text) for row in group.rows)
            tree = self.model.tree_choice(rows, longest, sample=samples).tree
            if isinstance(tree, Tree) and (tree.num_nodes > MOST_NODES or tree.lookup):
                logger.warning('tree: the tuned one for %d rows cannot be used in an engine; "auto" is', rows)
                tree = "auto"
        key = group.kind, tree, samples
        policy = self._policies.get(key)
        if policy is None:
            if len(self._policies) == KEPT_POLICIES:  # requests may name any number of trees
                self._policies.clear()
                self._step_for = self.steps.prepare(self.model.backend)
            fixed = FixedTree(tree) if isinstance(tree, Tree) else None
            policy = self._policies[key] = fixed or self.model.adaptive_policy(samples, independent=True)
            policy.begin(batch=rows, rows=self.slots.state.cache.capacity)
        policy.resized(rows)
        group.policy = policy
        return policy


class _OnHost:
    """What a step has left, copied to the host."""

    def __init__(self, view: Any) -> None:
        self.count, self.finished, self.check, self.output = (
            tensor.cpu() for tensor in (view.count, view.finished, view.check, view.output)
        )
