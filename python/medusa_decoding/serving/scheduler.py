"""Scheduler: what the engine's thread does in each of its rounds.

A round admits waiting rows while slots are free, runs their prompts for a limited time, the last one perhaps in part,
and then one step of every group of running rows. The step is the paper's (`decode.loop.decode_step`), over a view of
the slots. On a GPU its results are read one step late, as those of a single generation (`decode.runtime.progress`):
while the host delivers a step's tokens, the next one runs. So a row that has ended runs one step more, which changes
nothing; the cache has room for it, as for every step of a row that has ended. Two things are not late: the first step
after rows have joined or left waits for the one before, whose tokens decide what it needs, and steps whose tokens the
host selects (log-probabilities, penalties, grammars, other processors, minimum lengths) are read at once.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from medusa_decoding.decode.lookup import Repeats
from medusa_decoding.decode.policy import Policy, StepResult
from medusa_decoding.decode.prefill import PREFILL_CHUNK, prefill_chunks
from medusa_decoding.decode.runtime.progress import Progress, Watch, hold_copies, matched
from medusa_decoding.decode.runtime.steps import Steps, is_made
from medusa_decoding.decode.state import DecodeState
from medusa_decoding.decode.verify import HostTokenSelector
from medusa_decoding.generation.session import common_length
from medusa_decoding.model import MedusaModel
from medusa_decoding.serving.groups import Group, Groups, Launched
from medusa_decoding.serving.rows import MOST_NODES, Kind, Row, most_copied
from medusa_decoding.serving.slots import SHORTEST_REUSE, Slots
from medusa_decoding.serving.ticket import Delta, Finish
from medusa_decoding.trees.tree import Tree

logger = logging.getLogger(__name__)

SHORTEST_CHUNK = 32
LONGEST_SECONDS = 0.5
"""What prompts may take in one round, also when no row runs: until then a closing engine waits."""
KEPT_POLICIES = 64
MOST_PADDED = 1.25
"""Tokens, padding included, that prompts may take when they run together, over those that they have."""


@dataclass
class EngineStats:
    """What an engine has done so far, and does now.

    Attributes:
        steps: number of steps.
        new_tokens: tokens emitted.
        prompt_tokens: tokens of the prompts admitted.
        queried_tokens: those of them that were looked up in the cache; all but prompts with log-probabilities.
        reused_tokens: those of them that were cached already.
        accepted_histogram: steps of single rows, by accepted draft tokens.
        tree_nodes: steps by nodes of their tree.
        row_steps: steps of single rows, by nodes of their tree.
        finished: generations by the reason of their end.
        step_seconds: time in steps.
        prefill_seconds: time in prefills.
        running: rows that take part in steps, and the one whose prompt runs.
        waiting: requests in the queue.
        slots: the most rows that can run.
        queue: the most requests that can wait.
        cached: tokens of the running rows in the KV cache.
        capacity: tokens that it has room for.
    """

    steps: int = 0
    new_tokens: int = 0
    prompt_tokens: int = 0
    queried_tokens: int = 0
    reused_tokens: int = 0
    accepted_histogram: Counter[int] = field(default_factory=Counter)
    tree_nodes: Counter[int] = field(default_factory=Counter)
    row_steps: Counter[int] = field(default_factory=Counter)
    finished: Counter[str] = field(default_factory=Counter)
    step_seconds: float = 0.0
    prefill_seconds: float = 0.0
    running: int = 0
    waiting: int = 0
    slots: int = 0
    queue: int = 0
    cached: int = 0
    capacity: int = 1


@dataclass
class _Prefill:
    """Prompts that are being run together, chunk by chunk, in the slots from `slot` on; all from token `cached` on."""

    group: Group
    slot: int
    cached: int
    chunks: Iterator[int] = field(default_factory=lambda: iter(()))

    @property
    def rows(self) -> list[Row]:
        """The rows, of which some may have been cancelled."""
        return self.group.rows

    @property
    def width(self) -> int:
        """The length of the longest prompt."""
        return max(len(row.ticket.prompt) for row in self.rows)


class Scheduler:
    """Runs rows; used by one thread, except `waiting`, to which any thread may append.

    Args:
        model: of the rows.
        steps: its steps, with a pool of their own.
        slots: places of the rows.
        stall_seconds: how long each prompt may keep running rows waiting in a round, roughly.
        states: deliver with each token the hidden state from which it was predicted; for models without heads.

    Attributes:
        waiting: rows in the order in which they are admitted.
        counts: what has been done so far; `Engine.stats` adds what is going on now.
    """

    def __init__(
        self, model: MedusaModel, steps: Steps, slots: Slots, stall_seconds: float, states: bool = False
    ) -> None:
        self.states = states
        self.model, self.steps, self.slots, self.stall_seconds = model, steps, slots, stall_seconds
        self.groups = Groups(slots)
        self.waiting: deque[Row] = deque()
        self.counts = EngineStats()
        self._prefill: _Prefill | None = None
        self._step_for, self._made_for = steps.prepare(model.backend), steps.fingerprint()
        self._policies: dict[tuple[Kind, Tree | str, bool, bool], Policy] = {}
        self._watch = Watch(slots.state)  # of prefills
        self._tokens_per_second = 0.0  # of the last chunk
        self._until, self._left = 0.0, 0  # when the prompts of a round must end, and how many of their tokens may run

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        return not (self.waiting or self._prefill is not None or len(self.groups))

    @property
    def taken(self) -> int:
        """Slots that are in use."""
        prefill = self._prefill  # another thread may ask
        return len(self.groups) + (0 if prefill is None else len(prefill.rows))

    @property
    def cached(self) -> int:
        """Tokens in the KV cache of the rows that have these slots."""
        prefill = self._prefill
        begun = 0 if prefill is None else prefill.cached * len(prefill.rows)
        return begun + sum(len(row.text) for group in self.groups for row in list(group.rows))

    def round(self) -> None:
        """Run prompts and a step of each group; an error ends the rows that it concerns."""
        seconds = LONGEST_SECONDS
        if running := len(self.groups):
            # Slots are filled soon, as a step of a few rows takes about as long as one of many.
            prompts = min(len(self.waiting) + self.taken, len(self.slots)) - running
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
                for row in list(group.rows):
                    slot = self.groups.slot(row)
                    self.slots.forget(slot, slot + 1)
                    self._end(row, Delta([], "error", error=error))

    def end_all(self, delta: Delta) -> None:
        """Deliver a last delta to every row; nothing can run any more."""
        for row in self._rows():
            row.end(delta)

    def _end(self, row: Row, delta: Delta) -> None:
        """Take a row out, wherever it is, and deliver its last delta."""
        assert delta.finish is not None
        self.counts.finished[delta.finish] += not row.ended  # before it is out, for whoever waits for that
        if row in self.groups:
            self.groups.leave(row)
        elif row in self.waiting:
            self.waiting.remove(row)
        row.end(delta)
        if self._prefill is not None and all(row.ended for row in self._prefill.rows):
            self._prefill = None

    def _rows(self) -> list[Row]:
        # Other threads may append meanwhile, but not while the interpreter copies the queue.
        running = [row for group in self.groups for row in group.rows]
        begun = [] if self._prefill is None else [row for row in self._prefill.rows if not row.ended]
        return [*running, *begun, *self.waiting]

    # -- prompts

    def _admit(self) -> _Prefill | None:
        """Give the first waiting row a slot, and those after it that are best run with it; None if there is none."""
        first, prefill = len(self.groups), None
        if first == 0 and self.waiting:
            try:
                self._follow_changes()
            except Exception as error:  # it cannot be decoded as it is now
                while self.waiting:
                    self._end(self.waiting.popleft(), Delta([], "error", error=error))
        while self.waiting and first < len(self.slots):
            row = self.waiting[0]
            if prefill is not None and not self._joins(row, prefill):
                break
            self.waiting.popleft()
            row.ticket.waited = time.perf_counter() - row.ticket.submitted
            try:
                reused = self.slots.place(row.ticket.prompt, first, reuse=row.scores is None)
                self.slots.clear(first, row.seed, row.temperature)
            except Exception as error:
                logger.exception("engine: a prompt could not be placed; its request ends")
                self._end(row, Delta([], "error", error=error))
                continue
            prefill = prefill or _Prefill(Group(row.kind), first, reused)
            prefill.rows.append(row)
            prefill.cached = min(prefill.cached, reused)
            first += 1
        if prefill is not None:
            for slot, row in enumerate(prefill.rows, prefill.slot):
                self.slots.texts[slot] = row.ticket.prompt[: prefill.cached]
            prefill.chunks = self._chunks(prefill)
        return prefill

    def _follow_changes(self) -> None:
        """Forget texts and steps of the model as it was if its weights, adapters or hooks have changed."""
        if self.steps.fingerprint() != self._made_for:
            self.slots.forget(0, len(self.slots))
            self.model._check_decodable()
            self._step_for, self._made_for = self.steps.prepare(self.model.backend), self.steps.fingerprint()

    def _joins(self, row: Row, prefill: _Prefill) -> bool:
        """Return whether a waiting row's prompt is best run with others: at once, with little padding.

        One that begins as another of them does waits, so as to reuse its keys and values.
        """
        prompt, rows = row.ticket.prompt, prefill.rows
        if row.kind != prefill.group.kind or row.scores is not None or rows[0].scores is not None:
            return False
        reused, _ = self.slots.reusable(prompt, prefill.slot + len(rows))
        if any(common_length(other.ticket.prompt, prompt) >= reused + SHORTEST_REUSE for other in rows):
            return False
        lengths = [len(prompt), *(len(other.ticket.prompt) for other in rows)]
        cached = min(reused, prefill.cached)
        padded = len(lengths) * (max(lengths) - cached)
        return padded <= min(self._chunk(), MOST_PADDED * (sum(lengths) - len(lengths) * max(reused, prefill.cached)))

    def _chunks(self, prefill: _Prefill) -> Iterator[int]:
        backbone, rows, slot = self.model.backbone, prefill.rows, prefill.slot
        prompts = [row.ticket.prompt for row in rows]
        for row in rows:
            row.ticket.reused = prefill.cached
        self.counts.prompt_tokens += sum(map(len, prompts))
        self.counts.queried_tokens += sum(len(row.ticket.prompt) for row in rows if row.scores is None)
        self.counts.reused_tokens += len(rows) * prefill.cached
        last = slot + len(rows)
        selector, limits = prefill.group.prepare(len(rows), backbone.device, self.slots.temperatures[slot:last])
        tokens = [torch.tensor(prompt, device=backbone.device) for prompt in prompts]
        yield from prefill_chunks(
            backbone, tokens, self.slots.rows(slot, last), selector, limits, reuse=prefill.cached, chunk=self._chunk,
            observe=rows[0].scores,
        )  # fmt: skip

    def _chunk(self) -> int:
        """Return how many tokens of prompts may run now."""
        speed = self._tokens_per_second
        if not speed:  # the first chunk of a CPU is short, as it may be slow
            return SHORTEST_CHUNK if self.model.backbone.device.type == "cpu" else max(self._left, SHORTEST_CHUNK)
        # The number is limited as well, since a GPU still works when the host measures the time.
        return max(min(int(speed * (self._until - time.perf_counter())), self._left), SHORTEST_CHUNK)

    def _run_chunk(self) -> bool:
        """Run a chunk of the prompts whose turn it is; after the last one their rows join the steps if they go on.

        Returns False if there are none.
        """
        self._prefill = prefill = self._prefill or self._admit()
        if prefill is None:
            return False
        rows, last = prefill.rows, prefill.slot + len(prefill.rows)
        view, began = self.slots.rows(prefill.slot, last), time.perf_counter()
        try:
            view.finished.fill_(False)
            view.step.zero_()  # the column of the log, which nobody reads
            cached = next(prefill.chunks, None)
            going = []
            if cached is None:
                self._watch.record(view)
                going = self._started(prefill, self._watch.read(), self._hidden(view))
            view.finished.fill_(True)  # they have ended or go on later; steps of others leave such rows as they are
        except Exception as error:
            logger.exception("engine: a prefill failed; its requests end")
            cached, going = None, []
            self.slots.forget(prefill.slot, last)
            view.finished.fill_(True)
            for row in rows:
                self._end(row, Delta([], "error", error=error))
        if cached is None:
            self._prefill = None
        for row, slot in going:
            self.slots.state.finished[slot] = False
            self.groups.join(row, slot)
        seconds = time.perf_counter() - began
        self.counts.prefill_seconds += seconds
        ran = len(rows) * ((prefill.width if cached is None else cached) - prefill.cached)
        if ran >= SHORTEST_CHUNK:
            self._tokens_per_second = ran / seconds
        self._left -= ran
        if cached is not None:
            prefill.cached = cached
        return True

    def _hidden(self, view: DecodeState) -> torch.Tensor | None:
        """Return a copy of the rows' states [B, H], which the next step overwrites, if they are to be delivered."""
        return view.hidden.clone() if self.states else None

    def _started(self, prefill: _Prefill, progress: Progress, hidden: torch.Tensor | None) -> list[tuple[Row, int]]:
        """Take the first token of each row whose prompt has run; return those that go on, with their slots."""
        going = []
        for place, (row, error) in enumerate(zip(prefill.rows, prefill.group.errors(), strict=True)):
            slot = prefill.slot + place
            if row.ended:
                continue
            finish = self._take(row, slot, progress, place, error, hidden)
            if finish != "error":
                self.slots.texts[slot] = row.text  # which grows with the row
            if finish is None:
                going.append((row, slot))
        return going

    # -- steps

    def _step(self, group: Group) -> None:
        """Launch one step of a group, and deliver what the one before it has committed, or on a CPU what it has."""
        if group.policy is None:  # the rows have changed
            self._read(group)
            if not group.rows:
                return
        device, first = self.model.backbone.device, self.groups.first_slot(group)
        width = self.groups.width(group, captured=device.type == "cuda")
        view = self.slots.rows(first, first + width)
        selector, limits = group.prepare(width, device, self.slots.temperatures[first : first + width])
        policy = self._policy(group)
        tree = policy.choose(lambda tree: is_made(self._step_for(tree), view, selector, limits), matched(group.rows))
        hold_copies(view, group.rows, tree.lookup)
        watch = group.watch = group.watch or Watch(self.slots.state, timed=True)
        watch.start(view)
        view.step.zero_()
        made = self._step_for(tree)(view, selector, limits)
        watch.record(view)
        group.unread.append(Launched(list(group.rows), group.errors(), tree, policy, bool(made), self._hidden(view)))
        self.counts.steps += 1
        self.counts.tree_nodes[tree.num_nodes] += 1
        self._read(group, 0 if isinstance(selector, HostTokenSelector) else watch.late)

    def _read(self, group: Group, late: int = 0) -> None:
        """Deliver what a group's steps have committed, except the last `late` ones; rows that have ended leave."""
        while len(group.unread) > late:
            assert group.watch is not None
            launched, progress = group.unread.popleft(), group.watch.read()
            assert progress.seconds is not None
            self.counts.step_seconds += progress.seconds
            committed, copied = [], []
            for place, (row, error) in enumerate(zip(launched.rows, launched.errors, strict=True)):
                if row.ended:  # by the step before this one, or cancelled
                    continue
                finish = self._take(row, self.groups.slot(row), progress, place, error, launched.hidden)
                if finish is not None:
                    self.groups.leave(row)
                if finish != "error":
                    committed.append(len(row.new))
                    copied += [] if row.copied is None else [row.copied]
            self.counts.row_steps[launched.tree.num_nodes] += len(committed)
            result = StepResult(launched.tree, progress.work, committed, launched.made, copied)
            launched.policy.observe(result)

    def _take(
        self,
        row: Row,
        slot: int,
        progress: Progress,
        place: int,
        error: Exception | None,
        hidden: torch.Tensor | None,
    ) -> Finish | None:
        """Take what a step or a prefill has left of a row; return why the row has ended, if it has."""
        before = row.count
        finish = row.take(progress, place, error, None if hidden is None else hidden[place])
        if finish == "error":
            self.slots.texts[slot] = []
        self.counts.new_tokens += row.count - before
        if before and finish != "error":
            self.counts.accepted_histogram[row.accepted[-1]] += 1
        if finish is not None:
            self.counts.finished[finish] += 1
        return finish

    def _policy(self, group: Group) -> Policy:
        """Return the policy of a group, told of its rows if they have changed."""
        if group.policy is not None:
            return group.policy
        rows, samples = len(group.rows), any(row.temperature > 0 for row in group.rows)
        copied = most_copied(self.model.backbone.device)
        asked = Tree([]) if self.states else group.kind[0]  # a state for each token: one token a step
        longest = max(len(row.text) for row in group.rows)
        choice = self.model.tree_choice(rows, longest, asked, samples)
        tree = choice.tree
        if asked is None and isinstance(tree, Tree) and (tree.num_nodes > MOST_NODES or tree.lookup > copied):
            logger.warning('tree: the tuned one for %d rows cannot be used in an engine; "auto" is', rows)
            choice = self.model.tree_choice(tree="auto")
        if group.kind[1] is not None:  # typical acceptance, see `MedusaModel.run`
            choice = dataclasses.replace(choice, copies=False)
        key = group.kind, choice.tree, choice.copies, samples
        policy = self._policies.get(key)
        if policy is None:
            if len(self._policies) == KEPT_POLICIES:  # requests may name any number of trees
                self._policies.clear()
                self._step_for = self.steps.prepare(self.model.backend)
            policy = self._policies[key] = self.model.policy(choice, samples, independent=True)
            policy.begin(batch=rows, rows=self.slots.state.cache.capacity)
        policy.resized(rows)
        if copied and any(tree.lookup for tree in policy.trees):
            for row in group.rows:
                row.repeats = row.repeats or Repeats(row.text)
        group.policy = policy
        return policy
