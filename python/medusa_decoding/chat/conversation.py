"""Token ids of what is asked, with the answers so far: by a chat template, or as the text stands.

This module knows tokenizers and templates; it does not know models or files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

Message = dict[str, Any]


class Conversation(Protocol):
    """What makes prompts of messages, and messages of answers; the command line's `ChatTemplate` is one."""

    tokenizer: Any

    def encode(self, messages: Sequence[Message], known: Sequence[int] = ()) -> list[int]:
        """Return the prompt's tokens; `known` are those of the prompt before and its answer."""

    def answer(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer's tokens, without what ends it."""

    def ends(self, eos: list[int]) -> list[int]:
        """Return the tokens that end an answer, of which `eos` are the model's own."""

    def stop_strings(self, asked: Sequence[str] | None) -> list[str] | None:
        """Return the strings that end an answer: those asked for and what else there is."""


class AsItStands:
    """No template: the first turn is the text, and each further turn a line behind the answer.

    Args:
        tokenizer: of the base model.
        eos: the model's tokens that end a text; one at an answer's end is taken off before the text goes on.
    """

    def __init__(self, tokenizer: Any, eos: Sequence[int]) -> None:
        self.tokenizer, self._eos = tokenizer, frozenset(eos)

    def encode(self, messages: Sequence[Message], known: Sequence[int] = ()) -> list[int]:
        """Return the tokens known and the last message's, or of the first messages all."""
        if not known:
            text = "\n".join(message["content"] for message in messages)
            return list(self.tokenizer(text)["input_ids"])
        written = list(known)
        if written[-1] in self._eos:
            written.pop()
        return written + list(self.tokenizer("\n" + messages[-1]["content"], add_special_tokens=False)["input_ids"])

    def answer(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer's tokens, special ones left out."""
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def ends(self, eos: list[int]) -> list[int]:
        """Return the model's own."""
        return eos

    def stop_strings(self, asked: Sequence[str] | None) -> list[str] | None:
        """Return those asked for."""
        return list(asked) if asked else None


def conversation_of(tokenizer: Any, template: str | None, eos: Sequence[int]) -> Conversation:
    """Return how messages become tokens.

    Args:
        tokenizer: of the base model.
        template: a file with a Jinja template, "vicuna", "plain", or None: the tokenizer's own, and text as it stands
            where it has none.
        eos: the model's tokens that end a text.

    Raises:
        ValueError: a template that does not render a question.
        OSError: a file that cannot be read.
    """
    if template is None and not tokenizer.chat_template:
        return AsItStands(tokenizer, eos)
    # Here, as the commands import this package.
    from medusa_decoding.chat.template import ChatTemplate

    return ChatTemplate(tokenizer, template)
