"""Engine: generations of one model whose rows join and leave between steps.

One thread runs everything on the model (`scheduler`). All rows of a step verify the same tree, which follows the load:
the policy of "auto" keeps step times by the number of rows, so a full batch gets smaller trees or plain decoding where
these make more tokens per second. No text depends on that, nor on the rows beside it: each row gets what
`MedusaModel.generate` gives it alone (up to rounding, so in float32 the same tokens).

It knows token ids, and neither text nor HTTP.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from medusa_decoding.decode.runtime.memory import MemoryUse, Sizes, available, memory_use
from medusa_decoding.decode.runtime.steps import Steps
from medusa_decoding.model import MedusaModel
from medusa_decoding.options import SLOTS
from medusa_decoding.serving.rows import MOST_NODES, Submission, check_own_config, check_rows, check_tree, most_copied
from medusa_decoding.serving.scheduler import SHORTEST_CHUNK, Scheduler
from medusa_decoding.serving.scheduler import EngineStats as EngineStats
from medusa_decoding.serving.slots import Slots
from medusa_decoding.serving.ticket import Delta, EngineClosedError, QueueFullError, Ticket
from medusa_decoding.trees.tree import Tree

logger = logging.getLogger(__name__)

MEMORY_SHARE = 0.9
"""Part of the free memory that a default context may take."""
LONGEST_CONTEXT = 8192
"""The most tokens of a default context."""


class Engine:
    """Generates for many callers at once.

    Use it as a context manager, or call `start` and `close`. While it runs, the model's own `generate` works too, but
    the two wait for each other. Weights, adapters and hooks may change while no row runs.

    Args:
        model: its default tree is that of requests that name none.
        slots: the most rows that run at once.
        context: the most tokens of a prompt and its answer. None for the model's own limit, at most `LONGEST_CONTEXT`,
            or as many as fit into memory if these are fewer.
        queue: the most requests that wait for a slot.
        stall_seconds: how long each prompt may keep running rows waiting between two steps, roughly.
        states: deliver with each token the hidden state from which the model predicted it (`Delta.state`).

    Attributes:
        model: see above.
        context: see above.
        memory: what was allocated, and what steps will take.

    Raises:
        ValueError: impossible sizes, or a model that cannot be served: one that `generate` refuses, or that is over
            several processes, or whose rotary embedding depends on the length of a text, or whose own generation config
            no request could obey.
        MemoryError: the cache does not fit; says what would.
    """

    def __init__(
        self,
        model: MedusaModel,
        *,
        slots: int = SLOTS,
        context: int | None = None,
        queue: int = 64,
        stall_seconds: float = 0.1,
        states: bool = False,
    ) -> None:
        if states and model.heads is not None:
            raise ValueError("states: expected False with heads (their steps have several tokens), got True")
        for name, value, least in (("slots", slots, 1), ("context", context, 2), ("queue", queue, 0)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ValueError(f"{name}: expected a whole number of at least {least}, got {value!r}")
        backbone = model.backbone
        if backbone.peers.size > 1:
            raise ValueError(f"model: expected one in a single process, got one over {backbone.peers.size}")
        if "dynamic" in backbone.decoder.rotary_emb.rope_type:
            raise ValueError("model: expected rotary embeddings that are the same for all texts, got dynamic scaling")
        model._check_decodable()
        if isinstance(model._tree, Tree):  # a tuned one that is too large is replaced by "auto"
            check_tree(model._tree, backbone.device)
        self.model, self.queue, self._states = model, queue, states
        steps = Steps(backbone, model.heads)
        with self.model.current_device():
            self.context, self.memory = self._fit(slots, context)
            check_own_config(model, self.context)
            state = steps.pool.acquire(self._sizes(slots, self.context), self.context + self._spare)
            self._scheduler = Scheduler(model, steps, Slots(state, steps.pool.track), stall_seconds, states)
        self._changed = threading.Condition()  # guards the queue
        self._deadline: float | None = None  # when running rows are cancelled; None while requests are taken
        self._thread: threading.Thread | None = None

    @property
    def _deepest(self) -> int:
        """Tokens that a step may draft in a row; 0 for plain decoding alone."""
        heads = 0 if self.model.heads is None else self.model.heads.num_heads
        return 0 if self._states else max(heads, most_copied(self.model.backbone.device))

    @property
    def _spare(self) -> int:
        """Cache rows that a step needs after a row's last token."""
        return MOST_NODES + self._deepest

    def _sizes(self, slots: int, context: int) -> Sizes:
        deepest = self._deepest
        return Sizes(
            [context] * slots, context, nodes=MOST_NODES if deepest else 1, spare=self._spare, logits=True,
            noise=deepest + 1,
        )  # fmt: skip

    def _fit(self, slots: int, context: int | None) -> tuple[int, MemoryUse]:
        """Return the context and what it takes; a default one is halved until it fits."""
        backbone = self.model.backbone
        limit, free = backbone.context_limit, available(backbone.device)
        if context is not None and context > limit:
            raise ValueError(f"context: expected at most {limit} tokens (the model's own), got {context}")
        chosen = min(limit, LONGEST_CONTEXT) if context is None else context
        while True:
            use = memory_use(backbone, self._sizes(slots, chosen), chosen + self._spare)
            if context is not None or free is None or use.total <= MEMORY_SHARE * free or chosen < SHORTEST_CHUNK:
                return chosen, use
            chosen //= 2

    def submit(
        self,
        prompt: Sequence[int],
        deliver: Callable[[int, Delta], None],
        *,
        n: int = 1,
        ends: Sequence[int] = (),
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        tree: Tree | Literal["auto"] | None = None,
        seed: int | None = None,
        make_processors: Callable[[], list[Any]] | None = None,
        max_new_tokens: int | None = None,
        **settings: Any,
    ) -> list[Ticket]:
        """Queue a prompt; return one ticket per choice.

        Args:
            prompt: token ids.
            deliver: called with the number of a choice and each of its deltas, in order, in the engine's thread. It
                must return at once.
            n: choices. Choice i is what row i of `generate(.., num_return_sequences=n)` is.
            ends: tokens that end a choice, in addition to the model's EOS tokens.
            logprobs: how many of the most likely tokens to deliver with every token, 0 to 20; None for none.
            prompt_logprobs: how many of the most likely tokens to keep at each token of the prompt, 0 to 20, in the
                first ticket's `prompt_logprobs`; None for none. The whole prompt then runs, also what is cached of it.
            tree: a tree of at most 64 nodes, of which at most 16 are copied from the text (on a GPU none), or "auto";
                None for the model's default.
            seed: of sampling; None draws one.
            make_processors: returns the logits processors of one choice; called once per choice.
            max_new_tokens: None for the model's own default, or what the context leaves.
            **settings: of generation and acceptance, as `MedusaModel.generate` takes them. A minimum length beyond
                `max_new_tokens` is that; it delays all `ends`. The seconds of `max_time` begin with a row's first
                token. Stop strings, also the model's own (`rows.own_stop_strings`), are left to the caller, who knows
                the text.

        Raises:
            ValueError: bad settings, or more tokens than the context has; names them.
            QueueFullError: no room in the queue for all choices; none is queued.
            EngineClosedError: the engine is not running.
        """
        submission = Submission(list(prompt), deliver, ends, logprobs, prompt_logprobs, tree)
        settings["max_new_tokens"] = max_new_tokens
        rows = check_rows(self.model, self.context, submission, n, seed, make_processors, settings)
        scheduler, most = self._scheduler, self.queue + len(self._scheduler.slots)
        if len(rows) > most:
            raise ValueError(f"n: expected at most {most} choices (slots and queue), got {n}")
        with self._changed:
            if self._thread is None or self._deadline is not None:
                raise EngineClosedError("engine: expected a running one, got one that was not started or was closed")
            if len(rows) > most - scheduler.taken - len(scheduler.waiting):
                raise QueueFullError(
                    f"queue: expected at most {self.queue} waiting requests, got more; try again later"
                )
            scheduler.waiting.extend(rows)
            self._changed.notify_all()
        return [row.ticket for row in rows]

    @property
    def running(self) -> bool:
        """Whether requests are taken."""
        return self.alive and self._deadline is None

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs, also while a closing engine finishes what it has taken."""
        return self._thread is not None and self._thread.is_alive()

    def stats(self) -> EngineStats:
        """Return the figures so far; a copy."""
        scheduler, slots, counts = self._scheduler, len(self._scheduler.slots), self._scheduler.counts
        return replace(
            counts, accepted_histogram=counts.accepted_histogram.copy(), tree_nodes=counts.tree_nodes.copy(),
            row_steps=counts.row_steps.copy(), finished=counts.finished.copy(), running=scheduler.taken,
            waiting=len(scheduler.waiting), slots=slots, queue=self.queue, cached=scheduler.cached,
            capacity=slots * self.context,
        )  # fmt: skip

    def start(self) -> Engine:
        """Start the engine's thread."""
        with self._changed:
            if self._thread is not None or self._deadline is not None:
                raise RuntimeError("engine: it was started before; make a new one")
            self._thread = threading.Thread(target=self._run, name="medusa-engine", daemon=True)
            self._thread.start()
        return self

    def close(self, drain: float = 0.0) -> None:
        """Take no more requests, finish those that run or wait, and end the thread.

        Requests that have not ended after `drain` seconds are cancelled. A second call, from any thread, can only
        shorten that time.
        """
        with self._changed:
            deadline = time.monotonic() + drain
            self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Engine:
        """Start it."""
        return self.start()

    def __exit__(self, *exc: object) -> None:
        """Close it."""
        self.close()

    def _run(self) -> None:
        backbone, scheduler = self.model.backbone, self._scheduler
        last = Delta([], "cancelled")
        try:
            with torch.inference_mode(False), torch.no_grad(), self.model.current_device():
                while True:
                    with self._changed:
                        self._changed.wait_for(lambda: self._deadline is not None or not scheduler.idle)
                        if self._deadline is not None and (scheduler.idle or time.monotonic() >= self._deadline):
                            break
                    with backbone.lock.held(backbone.device):
                        scheduler.round()
        except BaseException as error:
            logger.exception("engine: it cannot go on; all its requests end")
            last = Delta([], "error", error=error)
        finally:
            with self._changed:
                self._deadline = 0.0
            scheduler.end_all(last)
