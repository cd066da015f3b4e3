"""Session: keys and values of a conversation, kept between calls of `generate`.

A chat's next prompt begins with all that was said before. What of it stands in the cache already is not run again:
only the tokens behind the longest common beginning of old text and new prompt are prefilled. A session knows tokens
and holds a state; it does not know how decoding works.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from medusa_decoding.backbone.backbone import Backbone
    from medusa_decoding.decode.state import DecodeState


class Session:
    """One conversation, or a batch of them in lockstep. Pass it to each call of `MedusaModel.generate`.

    A call that fails leaves it empty: the next one prefills the whole prompt.

    Attributes:
        reused: tokens of the last call's prompt that were not run again, the same number in every row.
    """

    def __init__(self) -> None:
        self.reused = 0
        self._state: DecodeState | None = None
        self._texts: list[list[int]] = []
        self._made_by: object = None
        self._trunk: weakref.ref[Backbone] | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the longest row whose keys and values are held; 0 for an empty session."""
        return max(map(len, self._texts), default=0)

    def clear(self) -> None:
        """Forget the conversation and free its cache."""
        self._state, self._texts, self._made_by, self._trunk = None, [], None, None
        self.reused = 0

    def take(
        self, backbone: Backbone, model: object, prompts: Sequence[torch.Tensor]
    ) -> tuple[DecodeState | None, int]:
        """Hand over what is held; the session is empty until `keep`.

        Args:
            backbone: the model that asks.
            model: tells states of the model apart: keys and values of another adapter or other weights are not reused.
            prompts: int64 [T_b] a row.

        Returns:
            The state of the generation before, and how many tokens of every prompt it has already; None and 0 where
            nothing is of use.

        Raises:
            ValueError: the session belongs to another model, or to another number of rows.
        """
        if self._state is not None:
            if self._trunk is None or self._trunk() is not backbone:
                raise ValueError("session: expected one of this model, got one of another")
            if len(self._texts) != len(prompts):
                raise ValueError(f"session: expected {len(self._texts)} rows as before, got {len(prompts)}")
        state, texts, made_by = self._state, self._texts, self._made_by
        self.clear()
        if state is None or made_by != model:
            return None, 0
        # The last token of a prompt always runs: what it predicts is asked for.
        pairs = zip(texts, prompts, strict=True)
        common = min(min(_common(text, prompt.tolist()), len(prompt) - 1) for text, prompt in pairs)
        return (state, common) if common else (None, 0)

    def keep(self, backbone: Backbone, model: object, state: DecodeState, texts: list[list[int]], reused: int) -> None:
        """Hold a generation's state for the next call: its texts as far as their keys and values are cached."""
        self._state, self._texts, self._made_by, self._trunk = state, texts, model, weakref.ref(backbone)
        self.reused = reused


def _common(text: list[int], prompt: list[int]) -> int:
    """Length of the common beginning of two lists."""
    for place, (ours, theirs) in enumerate(zip(text, prompt, strict=False)):
        if ours != theirs:
            return place
    return min(len(text), len(prompt))
