"""Presence and frequency penalties and logit bias as logits processors, as OpenAI's API defines them.

A token that was generated c times gets `logit - c * frequency_penalty - (c > 0) * presence_penalty`. Tokens of the
prompt do not count; transformers' repetition penalty is the one that counts them. `logit_bias` is added to the logits.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

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
    """Adds a bias to the logits of some tokens, given by token id."""

    def __init__(self, biases: Mapping[int, float]) -> None:
        self.tokens, self.biases = torch.tensor(list(biases)), torch.tensor(list(biases.values()), dtype=torch.float32)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return the scores [1, V] with the biases added."""
        return scores.index_add(1, self.tokens.to(scores.device), self.biases.to(scores)[None])


def penalty_processors(
    prompt_length: int, presence: float, frequency: float, logit_bias: Mapping[int, float]
) -> list[Processor]:
    """Return the processors for one generation; none if nothing is asked for. Values are not checked."""
    processors: list[Processor] = []
    if presence or frequency:
        processors.append(Penalties(prompt_length, presence, frequency))
    if any(logit_bias.values()):
        processors.append(LogitBias(logit_bias))
    return processors
