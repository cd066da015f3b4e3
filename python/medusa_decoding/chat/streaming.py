"""Decode answers token by token, and print them while they are generated."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import compress
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

MOST_HELD = 16
"""Tokens without a complete character after which they are no character's beginning."""


class AnswerText:
    """Decodes an answer token by token: complete characters only, and nothing from the string that ends it on.

    The text has no special tokens. Stop strings that contain the text of one are searched in the text with them.

    Args:
        tokenizer: of the base model.
        stop: the string that ends the answer and is not part of it, several of them, or None.
        context: tokens before the answer, if it continues their text.

    Attributes:
        hidden: texts of the special tokens by id, if a stop string contains the text of one; else empty.
        stopped: whether a stop string has ended the answer; `end` resets it.
    """

    def __init__(self, tokenizer: Any, stop: str | Sequence[str] | None = None, context: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.stops = [text for text in ([stop] if isinstance(stop, str) else stop or ()) if text]
        # Decoders treat a text's first token differently, so tokens are decoded together with those before them.
        self._context = list(context)
        self._tokens: list[int] = []
        known = getattr(tokenizer, "added_tokens_decoder", {}) if self.stops else {}  # which takes time to make
        added = {number: str(token) for number, token in known.items()}
        named = any(text in stop for text in added.values() for stop in self.stops)
        self.hidden = {number: text for number, text in added.items() if named and not self._decode([number])}
        self._mixed = [stop for stop in self.stops if any(text in stop for text in self.hidden.values())]
        # The text that is held back, with hidden tokens, and which of its characters are shown.
        self._raw, self._shown, self.stopped = "", list[bool](), False

    @property
    def held(self) -> str:
        """Decoded text that is held back, because a stop string may have begun."""
        return "".join(compress(self._raw, self._shown))

    def add(self, token: int) -> str:
        """Return the text that a token completes; empty inside a character and inside what may be the stop string."""
        hidden = self.hidden.get(token, "")
        if not hidden:
            self._tokens.append(token)
        text = self._new_text()
        full = len(self._tokens) >= MOST_HELD
        if not hidden and text.endswith("\ufffd") and not full:  # a character whose other bytes are still to come
            return ""
        if text:
            self._context, self._tokens = self._tokens, []
        elif full:
            self._tokens = []
        return self._until_stop(text, hidden)

    def end(self) -> str:
        """Return the text that was held back; the next token begins another answer."""
        text = self._until_stop(self._new_text(), ended=True)
        self._context, self._tokens, self.stopped = [], [], False
        return text

    def _new_text(self) -> str:
        return self._decode(self._context + self._tokens)[len(self._decode(self._context)) :]

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _until_stop(self, text: str, hidden: str = "", ended: bool = False) -> str:
        """Return the new text as far as it cannot belong to a stop string; the rest is held back."""
        if self.stopped:
            return ""
        raw = self._raw + text + hidden
        shown = self._shown + [True] * len(text) + [False] * len(hidden)
        text, places = "".join(compress(raw, shown)), list(compress(range(len(raw)), shown))
        found = [text.index(stop) for stop in self.stops if stop in text]
        found += [sum(shown[: raw.index(stop)]) for stop in self._mixed if stop in raw]
        self.stopped, keep = bool(found), len(raw)
        if not found and not ended:
            keep -= begun(raw, self._mixed)
            keep = min(keep, [*places, len(raw)][len(text) - begun(text, self.stops)])
        self._raw, self._shown = raw[keep:], shown[keep:]
        return text[: min(found)] if found else text[: sum(shown[:keep])]


def begun(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest end of a text with which one of some marks may begin; 0 for none."""
    lengths = (n for mark in marks for n in range(1, min(len(mark), len(text) + 1)) if text.endswith(mark[:n]))
    return max(lengths, default=0)


CONTROLS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "\ufffd") | {ord("\r"): None}
"""For `str.translate`: characters that move the cursor or begin escape sequences, which no text may do."""


class AnswerStreamer(BaseStreamer):
    """Prints an answer token by token, then a line break; nothing from the string that ends it (`stop`) on."""

    def __init__(self, tokenizer: Any, stop: str | None = None) -> None:
        self._text = AnswerText(tokenizer, stop)
        self._begun = False

    def put(self, value: torch.Tensor) -> None:
        """Print the text of new tokens; the prompt, which comes first, is left out."""
        if self._begun:
            for token in value.flatten().tolist():
                self.show(self._text.add(token))
        self._begun = True

    def end(self) -> None:
        """Print the rest and a line break; nothing if the generation was refused before it began or has ended."""
        if self._begun:
            self._begun = False
            self.show(self._text.end() + "\n")

    def show(self, text: str) -> None:
        """Print a piece of the answer, without control characters on a terminal."""
        print(text.translate(CONTROLS) if sys.stdout.isatty() else text, end="", flush=True)
