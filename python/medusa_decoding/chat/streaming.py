"""Decode answers token by token, and print them while they are generated."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer


class AnswerText:
    """Decodes an answer token by token: complete characters only, and nothing from the string that ends it on.

    Args:
        tokenizer: of the base model.
        stop: the string that ends the answer and is not part of it, several of them, or None.
        context: tokens before the answer, if it continues their text.

    Attributes:
        held: decoded text that is held back, because a stop string may have begun.
        stopped: whether a stop string has ended the answer; `end` resets it.
    """

    def __init__(self, tokenizer: Any, stop: str | Sequence[str] | None = None, context: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.stops = [text for text in ([stop] if isinstance(stop, str) else stop or ()) if text]
        # Decoders treat a text's first token differently, so tokens are decoded together with those before them.
        self._context = list(context)
        self._tokens: list[int] = []
        self.held, self.stopped = "", False

    def add(self, token: int) -> str:
        """Return the text that a token completes; empty inside a character and inside what may be the stop string."""
        self._tokens.append(token)
        text = self._new_text()
        if text.endswith("\ufffd"):  # a character whose other bytes are still to come
            return ""
        if text:
            self._context, self._tokens = self._tokens, []
        return self._until_stop(text)

    def end(self) -> str:
        """Return the text that was held back; the next token begins another answer."""
        text = self._until_stop(self._new_text(), ended=True)
        self._context, self._tokens, self.stopped = [], [], False
        return text

    def _new_text(self) -> str:
        return self._decode(self._context + self._tokens)[len(self._decode(self._context)) :]

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _until_stop(self, text: str, ended: bool = False) -> str:
        """Return the new text as far as it cannot belong to a stop string; the rest is held back."""
        text = "" if self.stopped else self.held + text
        found = [text.index(stop) for stop in self.stops if stop in text]
        if found:
            self.stopped, length = True, min(found)
        else:
            length = len(text) - (0 if ended else begun(text, self.stops))
        self.held = "" if self.stopped else text[length:]
        return text[:length]


def begun(text: str, marks: Sequence[str]) -> int:
    """Return the length of the longest end of a text with which one of some marks may begin; 0 for none."""
    lengths = (n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n]))
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
