"""Encode chat messages as prompt tokens, and decode the tokens of answers.

A tokenizer may divide an answer in the history otherwise than the model wrote it. The KV cache of the previous turn
would then be useless from that token on. So the model's own tokens are kept as long as they spell the text that the
template asks for (`splice`).
"""

from __future__ import annotations

import bisect
import functools
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from medusa_decoding.chat import rendering
from medusa_decoding.chat.streaming import AnswerStreamer
from medusa_decoding.checks import check_text
from medusa_decoding.files import read_text
from medusa_decoding.generation.session import common_length

logger = logging.getLogger(__name__)

Message = dict[str, Any]

# Vicuna's format (v1.1 and later): a system message, then turns "USER: ..." and "ASSISTANT: ...</s>". The model was
# trained with this system message; a conversation's own one replaces it. The start token is left to the tokenizer, as
# Vicuna's own users do: some tokenizers divide a text differently after a start token that is written out.
_VICUNA = """\
{%- if messages[0].role != 'system' -%}
{{- 'A chat between a curious user and an artificial intelligence assistant. ' -}}
{{- "The assistant gives helpful, detailed, and polite answers to the user's questions. " -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{%- if not loop.first -%}{{ raise_exception('a system message comes first') }}{%- endif -%}
{{- message.content + ' ' -}}
{%- else -%}
{%- set turn = loop.index0 - (1 if messages[0].role == 'system' else 0) -%}
{%- if (message.role == 'user') != (turn % 2 == 0) -%}{{ raise_exception('turns take turns') }}{%- endif -%}
{%- if message.role == 'user' -%}
{{- 'USER: ' + message.content + ' ASSISTANT:' -}}
{%- else -%}
{%- generation -%}{{- ' ' + message.content + eos_token -}}{%- endgeneration -%}
{%- endif -%}
{%- endif -%}
{%- endfor -%}"""
# For models that have learnt no chat format: answers end where the model goes on with the user's next turn.
_PLAIN = """\
{% for message in messages %}
{{ message['role'] | capitalize }}: {{ message['content'] | trim }}

{% endfor %}
{% if add_generation_prompt %}Assistant:{% endif %}"""
PLAIN_STOP = "\nUser:"
# To train a model that has no chat format: one content per line, answers closed by the end token.
_PLAIN_TRAINING = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{%- generation -%}{{- message.content + eos_token -}}{%- endgeneration -%}
{%- else -%}{{- message.content + '\\n' -}}{%- endif -%}
{%- endfor -%}"""
MESSAGE_KEYS = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
"""What a template sees of a message."""
BUILT_IN = {"vicuna": _VICUNA, "plain": _PLAIN}
BUILT_IN_TRAINING = {"vicuna": _VICUNA, "plain": _PLAIN_TRAINING}

ANCHOR = 8
"""Common leading tokens that two token lists are decoded with: decoders treat a text's first token differently."""
PROBE = "8fe31b"
"""An answer that occurs in no template and has no white space to lose."""


class PromptEncoder:
    """Encodes messages without a template: the first turn is the text, and each further turn a new line.

    A token of `eos` at the end of an answer is removed before the text goes on.

    Attributes:
        stop: the string that ends an answer and is not part of it; None if a token ends it.
    """

    stop: str | None = None

    def __init__(self, tokenizer: Any, eos: Collection[int] = ()) -> None:
        self.tokenizer, self._eos = tokenizer, frozenset(eos)

    @property
    def end_of_turn(self) -> int | None:
        """The special token that ends an answer in addition to the model's own, or None."""
        return None

    def encode(
        self, messages: Sequence[Message], known: Sequence[int] = (), tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Return the tokens of a prompt; `known` are the tokens of the previous prompt and its answer."""
        self.known_tools(tools)
        if not known:
            return open_tokens(self.tokenizer, "\n".join(message["content"] for message in messages))
        written = list(known[:-1] if known[-1] in self._eos else known)
        return written + open_tokens(self.tokenizer, "\n" + messages[-1]["content"], special=False)

    def known_tools(self, tools: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]] | None:
        """Return definitions of tools if prompts can contain them, else None; logs the first time that they cannot."""
        return tools if tools and self._takes_tools else None

    @functools.cached_property
    def _takes_tools(self) -> bool:
        logger.warning("prompts leave out their tools: the chat template has no place for them, or there is none")
        return False

    def answer(self, tokens: Sequence[int]) -> str:
        """Return the text of an answer's tokens, without special tokens and without the string that ends it."""
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


class ChatTemplate(PromptEncoder):
    """Encodes messages by a chat template.

    Args:
        tokenizer: of the base model.
        name: one of `built_in`, one of the tokenizer's templates by name, a file with a Jinja template, or None for the
            one that `tokenizer.get_chat_template` chooses: "tool_use" if there are tools, else "default".
        built_in: templates by name.
        variables: further variables of the template.
        check: render a question at once, so that an unusable template fails before a model is loaded.

    Attributes:
        text: the template in Jinja, for messages without tools.
        tool_text: the template for messages with tools; mostly the same.
        variables: all variables of the template, with the tokenizer's special tokens, which `special` has too.

    Raises:
        ValueError: no template, or one that does not render a question; a file that cannot be read.
    """

    def __init__(
        self,
        tokenizer: Any,
        name: str | None = None,
        *,
        built_in: Mapping[str, str] = BUILT_IN,
        variables: Mapping[str, Any] | None = None,
        check: bool = True,
    ) -> None:
        super().__init__(tokenizer)
        self.text, self.tool_text = _template_texts(tokenizer, name, built_in)
        self.variables: dict[str, Any] = {**tokenizer.special_tokens_map, **(variables or {})}
        # A built-in template leaves the start token to the tokenizer; any other one writes it itself.
        self._adds_special = name in built_in
        self.stop = PLAIN_STOP if self.text is _PLAIN else None
        # Some tokens are special only by their role (EOS), some only where they were added.
        added = (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
        self.special = tuple(token for token in {*tokenizer.all_special_tokens, *added} if token.strip())
        if check:
            self.render([{"role": "user", "content": "?"}])

    def render_spans(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        further: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of messages and where its `{% generation %}` blocks are; see `rendering.render`.

        `further` are variables for these messages only.
        """
        plain = [{key: message[key] for key in MESSAGE_KEYS if key in message} for message in messages]
        variables = {**self.variables, **(further or {})}
        if tools is not None:
            variables["tools"] = [dict(tool) for tool in tools]
        text = self.text if tools is None else self.tool_text
        return rendering.render(text, plain, add_generation_prompt=add_generation_prompt, **variables)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        further: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a prompt, up to where the answer begins; a template's refusal is a `ValueError`.

        `tools` are definitions of functions in OpenAI's form. Messages may have `tool_calls` and the role "tool".
        `further` are variables of the template for this prompt only.
        """
        for message in messages:
            check_text("message", message["content"] or "")
        try:
            return self.render_spans(messages, add_generation_prompt, tools, further)[0]
        except TemplateError as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"chat template: expected one that takes these messages, got {reason}") from error

    def encode(
        self, messages: Sequence[Message], known: Sequence[int] = (), tools: Sequence[Mapping[str, Any]] = ()
    ) -> list[int]:
        """Return the tokens of a prompt, known ones as long as they spell the same text; errors as in `render`."""
        text = self.render(messages, self.known_tools(tools))
        return splice(self.tokenizer, list(known), self.prompt_tokens(text))

    @functools.cached_property
    def _takes_tools(self) -> bool:
        probe = {"type": "function", "function": {"name": PROBE, "description": PROBE, "parameters": {}}}
        try:
            if PROBE in self.render([{"role": "user", "content": "?"}], [probe]):
                return True
        except ValueError:  # of this question alone, perhaps
            return True
        return super()._takes_tools

    def tokens(self, texts: list[str]) -> list[list[int]]:
        """Return the tokens of rendered texts."""
        return self.tokenizer(texts, add_special_tokens=self._adds_special, verbose=False)["input_ids"]

    def prompt_tokens(self, text: str) -> list[int]:
        """Return the tokens of a rendered prompt."""
        return open_tokens(self.tokenizer, text, special=self._adds_special)

    @functools.cached_property
    def after_answer(self) -> str:
        """The text that the template puts after an answer; empty if that is not certain."""
        try:
            messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": PROBE}]
            text, _ = self.render_spans(messages)
        except (TemplateError, ValueError):
            return ""
        parts = text.split(PROBE)
        return parts[1] if len(parts) == 2 else ""

    @functools.cached_property
    def end_of_turn(self) -> int | None:
        """The special token right after an answer; models learn to end with it, even if no generation config says so.

        None if something else follows, such as white space, which may be part of the answer or of what ends it.
        """
        return self.leading_token(self.after_answer, self.special)

    def leading_token(self, text: str, tokens: tuple[str, ...]) -> int | None:
        """Return the id of a text's first token if the text begins with one of some tokens, else None."""
        return open_tokens(self.tokenizer, text, special=False)[0] if text.startswith(tokens) else None


def prompt_encoder(tokenizer: Any, template: str | None, eos: Collection[int]) -> PromptEncoder:
    """Return what encodes a model's prompts; `eos` are the model's tokens that end a text.

    The template is a file in Jinja, "vicuna", "plain", or None for the tokenizer's own; a tokenizer without one encodes
    plain text. Errors are the same as in `ChatTemplate`.
    """
    if template is None and not tokenizer.chat_template:
        return PromptEncoder(tokenizer, eos)
    return ChatTemplate(tokenizer, template)


def open_tokens(tokenizer: Any, text: str, special: bool = True) -> list[int]:
    """Return the tokens of a text that goes on: without the end token that some tokenizers add to every text."""
    ids = list(tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"])
    end = tokenizer.eos_token
    added = special and end is not None and ids[-1:] == [tokenizer.eos_token_id] and not text.rstrip().endswith(end)
    return ids[:-1] if added else ids


def _template_texts(tokenizer: Any, name: str | None, built_in: Mapping[str, str]) -> tuple[str, str]:
    """Return the templates for messages without and with tools."""
    own = tokenizer.chat_template
    expected = f"template: expected {', '.join(built_in)} or a Jinja file"
    if name is None:
        if not own:
            raise ValueError(f"{expected}, because the tokenizer of {tokenizer.name_or_path} has no template, got none")
        if isinstance(own, dict) and "default" not in own:
            raise ValueError(f"template: name one of the tokenizer's templates, none is the default: {', '.join(own)}")
        return tokenizer.get_chat_template(), tokenizer.get_chat_template(tools=[])
    if name in built_in:
        if "eos_token" in built_in[name] and tokenizer.eos_token is None:
            raise ValueError(f"template: expected a tokenizer with an end token for {name!r}, got one without")
        return (built_in[name],) * 2
    if isinstance(own, dict) and name in own:
        return (own[name],) * 2
    try:
        return (read_text(os.path.expanduser(name)),) * 2
    except ValueError as error:
        raise ValueError(f"template: {error}") from error
    except OSError as error:
        raise ValueError(f"{expected}, got {name} ({error.strerror})") from error


def splice(tokenizer: Any, known: list[int], fresh: list[int]) -> list[int]:
    """Return a prompt's tokens that begin with as many known tokens as spell the same text.

    `known` is the previous prompt and the model's answer as it wrote it, `fresh` the new prompt as the tokenizer
    divides it. Returns `known[:n]` for the largest possible n, then the rest of `fresh`; decoded, it is the text of
    `fresh`.
    """
    same = common_length(known, fresh)
    start = max(0, same - ANCHOR)

    def text(tokens: list[int], end: int | None = None, begin: int = start) -> str:
        return tokenizer.decode(tokens[begin:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)

    # Texts cannot be compared without a common leading token: decoders treat the first token differently.
    if 0 < same < min(len(known), len(fresh)):
        whole = text(fresh, begin=0)
        shared = text(fresh)[: common_length(text(known), text(fresh))]
        ends, places = range(same + 1, len(known) + 1), range(same + 1, len(fresh) + 1)
        most = bisect.bisect_right(ends, _size(shared), key=lambda end: _size(text(known, end)))
        for end in reversed(ends[:most]):
            wanted = text(known, end)
            first = bisect.bisect_left(places, _size(wanted), key=lambda place: _size(text(fresh, place)))
            for place in places[first : first + 4]:  # up to 3 bytes of a 4-byte character may all look alike
                if text(fresh, place) == wanted and text(known[:end] + fresh[place:], begin=0) == whole:
                    return known[:end] + fresh[place:]
    return fresh


def _size(text: str) -> int:
    """Return a text's size in bytes, which never shrinks when tokens are added.

    The number of characters may shrink: each byte of an incomplete character is decoded as one mark.
    """
    return len(text.encode()) - 2 * text.count("\ufffd")
