"""Session: keys and values of a conversation, kept between calls of `generate`.

A chat's next prompt begins with the earlier text. Only the tokens after the longest common prefix of the earlier text
and the new prompt are prefilled.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from medusa_decoding.backbone.backbone import Backbone
from medusa_decoding.decode.state import DecodeState


class Session:
    """One conversation, or a batch of them in lockstep. Pass it to each call of `MedusaModel.generate`.

    A call that fails leaves it empty: the next one prefills the whole prompt.

    Attributes:
        reused: tokens of the last call's prompt that were already cached, the same number in every row.
    """

    def __init__(self) -> None:
        self.reused = 0
        self._state: DecodeState | None = None
        self._texts: list[list[int]] = []
        self._weights: object = None
        self._backbone: weakref.ref[Backbone] | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the longest row whose keys and values are held; 0 for an empty session."""
        return max(map(len, self._texts), default=0)

    def clear(self) -> None:
        """Forget the conversation and free its cache."""
        self._state, self._texts, self._weights, self._backbone = None, [], None, None
        self.reused = 0

    def take(
        self, backbone: Backbone, weights: object, prompts: Sequence[torch.Tensor]
    ) -> tuple[DecodeState | None, int]:
        """Hand over the state; the session is empty until `keep`.

        Keys and values are not reused if `weights`, the model's fingerprint, have changed. `prompts` are int64 [T_b]
        per row. Returns the state of the previous generation, and how many tokens of every prompt it has cached; None
        and 0 if nothing can be reused.

        Raises:
            ValueError: the session belongs to another model, or to another number of rows.
        """
        if self._state is not None:
            if self._backbone is None or self._backbone() is not backbone:
                raise ValueError("session: expected one of this model, got one of another")
            if len(self._texts) != len(prompts):
                raise ValueError(f"session: expected {len(self._texts)} rows as before, got {len(prompts)}")
        state, texts, made_by = self._state, self._texts, self._weights
        self.clear()
        if state is None or made_by != weights:
            return None, 0
        # The last token of a prompt always runs: its prediction is needed.
        pairs = zip(texts, prompts, strict=True)
        common = min(min(common_length(text, prompt.tolist()), len(prompt) - 1) for text, prompt in pairs)
        return (state, common) if common else (None, 0)

    def keep(
        self, backbone: Backbone, weights: object, state: DecodeState, texts: list[list[int]], reused: int
    ) -> None:
        """Keep a generation's state for the next call, with its texts as far as they are cached."""
        self._state, self._texts, self._weights, self._backbone = state, texts, weights, weakref.ref(backbone)
        self.reused = reused


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return how many first entries two lists, or two texts, have in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # comparing slices takes a hundredth of the time of comparing entries one by one
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
