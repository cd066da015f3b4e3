"""Log-probabilities of a prompt's own tokens, from the hidden states of its prefill."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from medusa_decoding.backbone.backbone import Backbone
from medusa_decoding.serving.ticket import TokenLogprobs

MOST_LOGITS = 2**23
"""Logits at once, 32 MiB of them in float32."""


class PromptScores:
    """Collects the model's log-probability of each token of a prompt while the prompt runs.

    Args:
        backbone: the model.
        prompt: token ids.
        top: how many of the most likely tokens to keep at each place.

    Attributes:
        found: one entry per token so far; None for the first, which nothing predicts.
    """

    def __init__(self, backbone: Backbone, prompt: Sequence[int], top: int) -> None:
        self._backbone, self._prompt, self._top = backbone, prompt, top
        self.found: list[TokenLogprobs | None] = [None]

    def __call__(self, first: int, hidden: torch.Tensor) -> None:
        """Score the tokens after `hidden` [1, N, H], the final hidden states of the tokens from `first` on."""
        tokens = torch.tensor(self._prompt[first + 1 : first + 1 + hidden.shape[1]], device=hidden.device)
        rows = max(1, MOST_LOGITS // self._backbone.vocab_size)
        for states, targets in zip(hidden[0, : len(tokens)].split(rows), tokens.split(rows), strict=True):
            logprobs = self._backbone.lm_head(states[None])[0].float().log_softmax(-1)
            own = logprobs.gather(1, targets[:, None])
            ranks, best = (logprobs > own).sum(1) + 1, logprobs.topk(self._top)
            for logprob, rank, ids, values in zip(
                own[:, 0].tolist(), ranks.tolist(), best.indices.tolist(), best.values.tolist(), strict=True
            ):
                self.found.append(TokenLogprobs(logprob, list(zip(ids, values, strict=True)), rank))
