"""Presence and frequency penalties and logit bias as logits processors, as OpenAI's API defines them.

A token that was generated c times gets `logit - c * frequency_penalty - (c > 0) * presence_penalty`. Tokens of the
prompt do not count; transformers' repetition penalty is the one that counts them. `logit_bias` is added to the logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from medusa_decoding.checks import index, shown
from medusa_decoding.decode.selection.processors import Processor

MAX_PENALTY, MAX_BIAS = 2.0, 100.0
"""Largest absolute value of a penalty, and of the bias of a token."""


class Penalties:
    """Lowers the logits of tokens that were generated before; see the module for the formula.

    Args:
        prompt_length: tokens of the prompt, which do not count.
        presence: subtracted once per token that occurs.
        frequency: subtracted for each time that the token occurs.
    """

    def __init__(self, prompt_length: int, presence: float, frequency: float) -> None:
        self.prompt_length, self.presence, self.frequency = prompt_length, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores [1, V] of the token after a text [1, length]."""
        tokens, counts = input_ids[0, self.prompt_length :].unique(return_counts=True)
        lowered = scores[:, tokens] - counts * self.frequency - self.presence
        return scores.index_copy(1, tokens, lowered)


class LogitBias:
    """Adds a bias to the logits of some tokens.

    Args:
        biases: by token id.
    """

    def __init__(self, biases: Mapping[int, float]) -> None:
        self.tokens, self.biases = torch.tensor(list(biases)), torch.tensor(list(biases.values()), dtype=torch.float32)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores [1, V] with the biases added."""
        return scores.index_add(1, self.tokens.to(scores.device), self.biases.to(scores)[None])


def penalty_processors(
    prompt_length: int,
    presence: float = 0.0,
    frequency: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    *,
    vocab_size: int | None = None,
) -> list[Processor]:
    """Return the processors for one generation; none if nothing is asked for.

    Args:
        prompt_length: tokens of the prompt.
        presence: the request's `presence_penalty`, -2 to 2.
        frequency: the request's `frequency_penalty`, -2 to 2.
        logit_bias: -100 to 100 by token id.
        vocab_size: token ids must be below it; None to leave this to the caller.

    Raises:
        ValueError: a value out of its range, named as in a request.
    """
    presence = _number("presence_penalty", presence, MAX_PENALTY)
    frequency = _number("frequency_penalty", frequency, MAX_PENALTY)
    biases = {}
    for given, bias in (logit_bias or {}).items():
        token = index("logit_bias", given)
        if token < 0 or (vocab_size is not None and token >= vocab_size):
            below = "" if vocab_size is None else f" and below {vocab_size}"
            raise ValueError(f"logit_bias: expected token ids from 0{below}, got {shown(token)}")
        biases[token] = _number(f"logit_bias of token {token}", bias, MAX_BIAS)
    processors: list[Processor] = []
    if presence or frequency:
        processors.append(Penalties(prompt_length, presence, frequency))
    if any(biases.values()):
        processors.append(LogitBias(biases))
    return processors


def _number(name: str, value: Any, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -most <= value <= most:
        raise ValueError(f"{name}: expected a number from {-most:g} to {most:g}, got {shown(value)}")
    return float(value)
