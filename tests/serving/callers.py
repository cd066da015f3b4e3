"""Callers of an engine, which collect what it delivers."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from medusa_decoding import MedusaModel
from medusa_decoding.serving.engine import Engine
from medusa_decoding.serving.ticket import Delta

SECONDS = 60.0
"""After which a test gives up waiting."""


class Caller:
    """Collects the deltas of one submitted request.

    Attributes:
        deltas: of each choice.
    """

    def __init__(self, engine: Engine, prompt: Sequence[int], *, n: int = 1, **settings: Any) -> None:
        self.deltas: list[list[Delta]] = [[] for _ in range(n)]
        self.came = threading.Condition()
        self.tickets = engine.submit(prompt, self._deliver, n=n, **settings)

    def _deliver(self, choice: int, delta: Delta) -> None:
        with self.came:
            self.deltas[choice].append(delta)
            self.came.notify_all()

    def wait_for(self, tokens: int, choice: int = 0) -> None:
        """Wait until a choice has some tokens."""
        with self.came:
            assert self.came.wait_for(lambda: len(self._tokens(choice)) >= tokens, SECONDS)

    def wait(self) -> Caller:
        """Wait for the end of all choices."""
        with self.came:
            assert self.came.wait_for(lambda: all(own and own[-1].finish for own in self.deltas), SECONDS)
        for own in self.deltas:
            assert [delta.finish for delta in own[:-1]] == [None] * (len(own) - 1)
        return self

    def _tokens(self, choice: int) -> list[int]:
        return [token for delta in self.deltas[choice] for token in delta.tokens]

    def tokens(self, choice: int = 0) -> list[int]:
        """All tokens of a choice that has ended."""
        self.wait()
        return self._tokens(choice)

    def finish(self, choice: int = 0) -> str | None:
        """Why a choice has ended."""
        self.wait()
        return self.deltas[choice][-1].finish

    def error(self, choice: int = 0) -> BaseException | None:
        """What ended a choice."""
        self.wait()
        return self.deltas[choice][-1].error


def alone(model: MedusaModel, prompt: Sequence[int], **settings: Any) -> list[int]:
    """What `generate` writes for a prompt alone."""
    output = model.generate(torch.tensor([list(prompt)]), **settings)
    return output.sequences[0, len(prompt) :].tolist()
