"""A chat's messages made into a prompt: text by the chat template, then tokens; and an answer's text made of tokens.

A model's answer, once it stands in the history, may be tokenised in another way than the model wrote it, and then the
cache of the generation before would be of no use from there on. Where the tokens the model wrote spell the very text
that the template asks for, they are put in place of the tokenizer's. This module knows tokenizers; it does not know
models or caches.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import TextStreamer

from medusa_decoding.chat.rendering import render
from medusa_decoding.checks import check_text
from medusa_decoding.files import read_text
from medusa_decoding.training.data.encoding import template_text

Message = dict[str, Any]

PLAIN = """\
{% for message in messages %}
{{ message['role'] | capitalize }}: {{ message['content'] | trim }}

{% endfor %}
{% if add_generation_prompt %}Assistant:{% endif %}"""
PLAIN_STOP = "\nUser:"
ANCHOR = 8
"""Common tokens in front that two token lists are decoded with: decoders treat a text's first token apart."""


class ChatTemplate:
    """A tokenizer's chat template, or the one to use in its place.

    Args:
        tokenizer: of the base model.
        asked: a file with a Jinja template, "vicuna" (as in training), "plain", or None for the tokenizer's own.

    Attributes:
        stop: the string with which an answer ends, and which is no part of it; None where a token ends it.
        end_of_turn: the special token that the template puts behind an answer, or None where this is not certain: it
            must be the very next token, and one of the tokenizer's special ones. Models are taught to end with it,
            though not all generation configs name it.

    Raises:
        ValueError: no template, or one that does not render a question.
        OSError: a file that cannot be read.
    """

    def __init__(self, tokenizer: Any, asked: str | None = None) -> None:
        self.tokenizer, self._plain = tokenizer, asked == "plain"
        self._built_in = self._plain or asked == "vicuna"
        self.stop = PLAIN_STOP if self._plain else None
        if asked is None and not tokenizer.chat_template:
            raise ValueError(
                f"--template: expected a Jinja file or plain, because the tokenizer of {tokenizer.name_or_path} has no "
                "chat template (vicuna for Vicuna models), got none"
            )
        self._text = tokenizer.get_chat_template() if asked is None else _text(tokenizer, asked)
        self.render([{"role": "user", "content": "?"}])
        self.end_of_turn = self._end_of_turn()

    def render(self, messages: Sequence[Message]) -> str:
        """Return the prompt's text, up to where the answer begins.

        Raises:
            ValueError: the template refuses the messages.
        """
        return self._render(messages, True)

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        plain = [{"role": message["role"], "content": message["content"]} for message in messages]
        for message in plain:
            check_text("message", message["content"])
        special = self.tokenizer.special_tokens_map
        try:
            return render(self._text, plain, add_generation_prompt=add_generation_prompt, **special)[0]
        except TemplateError as error:
            raise ValueError(
                f"chat template: expected one that takes these messages, got {_one_line(error)}"
            ) from error

    def encode(self, messages: Sequence[Message], known: Sequence[int] = ()) -> list[int]:
        """Return the prompt's tokens.

        Args:
            messages: `role` and `content` each.
            known: the tokens of the prompt before and its answer; they are used as far as they spell the same text.

        Raises:
            ValueError: the template refuses the messages.
        """
        return splice(self.tokenizer, list(known), self._tokens(self.render(messages)))

    def answer(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer's tokens, special ones and what ends it left out."""
        text = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text if self.stop is None else text.split(self.stop, 1)[0]

    def ends(self, eos: list[int]) -> list[int]:
        """Return the tokens that end an answer: the model's EOS tokens and the template's end of a turn."""
        return eos if self.end_of_turn is None or self.end_of_turn in eos else [*eos, self.end_of_turn]

    def stop_strings(self, asked: Sequence[str] | None) -> list[str] | None:
        """Return the strings that end an answer: those asked for and the template's own."""
        return [*(asked or ()), *([] if self.stop is None else [self.stop])] or None

    def streamer(self) -> AnswerStreamer:
        """Return a streamer that prints an answer."""
        return AnswerStreamer(self.tokenizer, self.stop)

    def _tokens(self, text: str) -> list[int]:
        # A chat template writes special tokens itself; a built-in one leaves them to the tokenizer.
        return self.tokenizer(text, add_special_tokens=self._built_in)["input_ids"]

    def _end_of_turn(self) -> int | None:
        said = "8fe31b"  # stands nowhere in a template, and has no space to lose
        try:
            text = self._render([{"role": "user", "content": "?"}, {"role": "assistant", "content": said}], False)
        except ValueError:
            return None
        behind = text.split(said)[1:]
        tokens = self.tokenizer(behind[0], add_special_tokens=False)["input_ids"] if len(behind) == 1 else []
        return tokens[0] if tokens and not self._plain and self._special(tokens[0]) else None

    def _special(self, token: int) -> bool:
        # Some are only said to be special where they were added, some only by their role (EOS, say).
        added = self.tokenizer.added_tokens_decoder.get(token)
        return token in self.tokenizer.all_special_ids or (added is not None and added.special)


class AnswerStreamer(TextStreamer):
    """Prints an answer word by word, as transformers' streamer does, without the string that ends it.

    Args:
        tokenizer: of the base model.
        stop: the string from which on nothing is printed, or None.
    """

    def __init__(self, tokenizer: Any, stop: str | None = None) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.stop, self._held, self._ended = stop or "", "", False
        self._begun = False

    def put(self, value: torch.Tensor) -> None:
        """Take the prompt, then token by token."""
        self._begun = True
        super().put(value)

    def end(self) -> None:
        """Print what is left and a line's end; nothing where generation was refused before it began."""
        if self._begun:
            super().end()

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Print what cannot be the beginning of the string that ends the answer."""
        self._held = "" if self._ended else self._held + text
        if self.stop and self.stop in self._held:
            self._ended, shown = True, self._held.index(self.stop)
        else:
            shown = len(self._held) - (0 if stream_end else self._possible())
        super().on_finalized_text(self._held[:shown], stream_end)
        self._held = self._held[shown:]

    def _possible(self) -> int:
        """Length of the longest end of what is held that begins the string that ends the answer."""
        return max((n for n in range(1, len(self.stop)) if self._held.endswith(self.stop[:n])), default=0)


def splice(tokenizer: Any, known: list[int], fresh: list[int]) -> list[int]:
    """Return a prompt's tokens, as many in front as known if they spell the same text.

    Args:
        tokenizer: decodes.
        known: the prompt before and the model's answer, as it wrote it.
        fresh: the new prompt as the tokenizer divides it.

    Returns:
        `known[:n]` for the largest n possible, and behind it the rest of `fresh`; decoded, it is the text of `fresh`.
    """
    same = _common(known, fresh)
    start = max(0, same - ANCHOR)

    def text(tokens: list[int], end: int | None = None, begin: int = start) -> str:
        return tokenizer.decode(tokens[begin:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    # Without a common token in front, texts cannot be compared: decoders treat the first token apart.
    if 0 < same < min(len(known), len(fresh)):
        whole = text(fresh, begin=0)
        shared = text(fresh)[: _common(text(known), text(fresh))]
        ends, places = range(same + 1, len(known) + 1), range(same + 1, len(fresh) + 1)
        most = bisect.bisect_right(ends, _size(shared), key=lambda end: _size(text(known, end)))
        for end in reversed(ends[:most]):
            wanted = text(known, end)
            first = bisect.bisect_left(places, _size(wanted), key=lambda place: _size(text(fresh, place)))
            for place in places[first : first + 4]:  # of a character of 4 bytes, up to 3 may all be shown alike
                if text(fresh, place) == wanted and text(known[:end] + fresh[place:], begin=0) == whole:
                    return known[:end] + fresh[place:]
    return fresh


def _size(text: str) -> int:
    """Bytes of a text; it never gets smaller with more tokens.

    Its characters may get fewer: bytes of characters that are not complete are shown by a mark each.
    """
    return len(text.encode()) - 2 * text.count("\ufffd")


def _common(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Length of the common beginning."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _text(tokenizer: Any, asked: str) -> str:
    if asked == "plain":
        return PLAIN
    return template_text(tokenizer, asked) if asked == "vicuna" else _read(asked)


def _read(path: str) -> str:
    try:
        return read_text(path)
    except ValueError as error:
        raise ValueError(f"--template: {error}") from error
    except OSError as error:
        raise ValueError(
            f"--template: expected vicuna, plain or a readable file, got {path} ({error.strerror})"
        ) from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
