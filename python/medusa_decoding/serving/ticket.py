"""What callers of the engine hold and get: a ticket for each generation, and a delta for each step."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

Finish = Literal["stop", "length", "cancelled", "error"]
"""Why a generation ended: an end token, its budget, `Ticket.cancel`, or an exception."""


class QueueFullError(RuntimeError):
    """The engine's queue has no room for a request now."""


class EngineClosedError(RuntimeError):
    """The engine takes no requests: it was not started, or it was closed."""


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one token, of the model's own distribution: before penalties, masks and temperature.

    Attributes:
        logprob: of the token.
        top: the most likely tokens, best first: pairs of id and log-probability.
        rank: of the token among all, from 1; None for an emitted one.
    """

    logprob: float
    top: list[tuple[int, float]]
    rank: int | None = None


@dataclass(frozen=True)
class Delta:
    """What one step, or the prefill, has added to a generation.

    Attributes:
        tokens: new token ids in order; an end token is included. At most one after the prefill; after a step the
            accepted draft tokens and the model's own last one.
        finish: None while the generation goes on.
        logprobs: one entry per token if the request asked for them, else None.
        error: the exception if `finish` is "error".
        state: if the engine delivers states, that from which the one token was predicted, [H], else None.
    """

    tokens: list[int]
    finish: Finish | None = None
    logprobs: list[TokenLogprobs] | None = None
    error: BaseException | None = None
    state: torch.Tensor | None = None


@dataclass(eq=False)
class Ticket:
    """One generation that was submitted to an engine.

    Attributes:
        prompt: token ids.
        deliver: called with each delta, in order, in the engine's thread; must return at once. The last delta has a
            `finish`, and every ticket gets one.
        reused: tokens of the prompt whose keys and values were cached already; known from the first delta on.
        prompt_logprobs: one entry per token of the prompt, None for the first; complete from the first delta on, if
            the request asked for them, and of a request with several choices only the first has them.
        submitted: when, by `time.perf_counter`.
        waited: seconds in the queue, once the prompt has got a slot.
        accepted: how many draft tokens each step has accepted so far (the prefill is not a step).
        cancelled: whether `cancel` was called.
    """

    prompt: list[int]
    deliver: Callable[[Delta], None]
    reused: int = 0
    submitted: float = field(default_factory=time.perf_counter)
    waited: float = 0.0
    prompt_logprobs: Sequence[TokenLogprobs | None] = ()
    accepted: list[int] = field(default_factory=list)
    cancelled: bool = False

    def cancel(self) -> None:
        """Ask the engine to end this generation; from any thread. Its last delta then says "cancelled"."""
        self.cancelled = True
