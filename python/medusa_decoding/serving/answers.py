"""Answers to many prompts, by an engine whose rows join and leave: as many prompts run at once as there are slots.

Each answer is what `MedusaModel.generate` gives its prompt alone; answers come in the order in which they end.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from medusa_decoding.chat.streaming import AnswerText
from medusa_decoding.model import MedusaModel
from medusa_decoding.serving.engine import Engine
from medusa_decoding.serving.ticket import Delta, Ticket

Asked = TypeVar("Asked")


@dataclass(eq=False)
class Answer:
    """A prompt and its answer so far.

    Attributes:
        asked: what the caller knows the prompt by.
        where: where the prompt comes from, for messages.
        text: finds stop strings in the answer; None without any.
        tokens: of the answer, an end token included.
        ticket: of its generation, once it was submitted.
        steps: that have added tokens to the answer.
        finish: why the answer has ended: "stop" or "length"; None until then.
        states: those from which the model predicted the tokens, [H] each, if they were asked for.
        exact: whether the tokens are the generated ones, not those of their text.
        refused: why the answer cannot be used, or None.
    """

    asked: Any
    where: str
    text: AnswerText | None = None
    tokens: list[int] = field(default_factory=list)
    ticket: Ticket | None = None
    steps: int = 0
    finish: str | None = None
    states: list[torch.Tensor] = field(default_factory=list)
    exact: bool = True
    refused: str | None = None

    def take(self, delta: Delta) -> bool:
        """Add a step's tokens, up to the one that completes a stop string; return whether this has ended the answer."""
        if self.finish is not None:  # a stop string did; the engine had begun another step
            return False
        if delta.error is not None:
            raise ValueError(f"{self.where}: {delta.error}") from delta.error
        if delta.state is not None and delta.tokens:
            self.states.append(delta.state)
        self.steps += bool(self.tokens and delta.tokens)  # the first token is the prefill's
        for token in delta.tokens:
            self.tokens.append(token)
            if self.text is None:
                continue
            self.text.add(token)
            if self.text.stopped:
                self.finish = "stop"
                if delta.finish is None and self.ticket is not None:
                    self.ticket.cancel()
                return True
        self.finish = delta.finish
        return self.finish is not None

    @property
    def accepted(self) -> list[int]:
        """Accepted draft tokens of each step; the engine may be steps ahead of a stop string."""
        return [] if self.ticket is None else self.ticket.accepted[: self.steps]


class Answers:
    """Asks a model many prompts; a context manager, whose end cancels what still runs.

    Args:
        model: see `Engine`.
        slots: prompts that run at once. As many again wait, so that no slot is empty.
        context: the most tokens of a prompt and its answer; memory is taken for `slots` of that length.
        states: collect the hidden states of the answers, of a model without heads.
        settings: of every prompt, as `Engine.submit` takes them.
    """

    def __init__(self, model: MedusaModel, slots: int, context: int, states: bool = False, **settings: Any) -> None:
        # A row leaves its slot a moment after its last delta: the queue has room for that.
        self._engine = Engine(model, slots=slots, context=context, queue=2 * slots, states=states)
        self._most = 2 * slots
        self._settings, self._running = settings, 0
        self._delivered: queue.SimpleQueue[tuple[Answer, Delta]] = queue.SimpleQueue()

    def each(self, waiting: Iterator[Asked], ask: Callable[[Asked], None]) -> Iterator[Answer]:
        """Yield each answer when it ends, and have `ask` call `Answers.ask` for what waits as soon as there is room.

        Whoever gets an answer may ask one more prompt before the next answer, such as a further question.
        """
        while True:
            for asked in itertools.islice(waiting, self._most - self._running):
                ask(asked)
            answer = self.next()
            if answer is None:
                return
            yield answer

    def ask(self, answer: Answer, prompt: Sequence[int], **settings: Any) -> None:
        """Submit a prompt whose answer will be `answer`; `settings` as in `Engine.submit`."""
        try:
            (answer.ticket,) = self._engine.submit(
                prompt, lambda _, delta: self._delivered.put((answer, delta)), **self._settings, **settings
            )
        except ValueError as error:
            raise ValueError(f"{answer.where}: {error}") from error
        self._running += 1

    def next(self) -> Answer | None:
        """Wait for the next answer that ends; None if no prompt runs or waits."""
        while self._running:
            answer, delta = self._delivered.get()
            self._running -= delta.finish is not None
            if answer.take(delta):
                return answer
        return None

    def __enter__(self) -> Answers:
        """Start the engine."""
        self._engine.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """Cancel what still runs, and end the engine's thread."""
        self._engine.close()
