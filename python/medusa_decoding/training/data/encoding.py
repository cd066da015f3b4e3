"""Conversations as token ids, and which of those tokens the assistant wrote.

A conversation is rendered by the tokenizer's own chat template (or a built-in one, or a file). Where the assistant's
turns lie in the rendered text comes from the template's `{% generation %}` blocks if it has them, else from rendering
the conversation up to each of its turns: what a prefix with the generation prompt lacks of the prefix with the answer
is the answer. Text before and after a turn is never learnt, and neither is white space that follows an end-of-turn
token.

From text to tokens: a turn's first token is the first one in which the whole conversation's tokens depart from those of
the text before the turn, its last the last one that they share with those of the text up to the turn's end. So a token
that holds both the end of the prompt and the start of the answer is the answer's, as the model would have to write it;
one that reaches beyond the answer's end is not. This needs no character offsets, which not every tokenizer has right.

A record that carries its exact tokens is taken as it is. Such records come of `prompt` and `following`: what a model is
given to answer, and what stands between its answer and the next one, so that the tokens it wrote stay those it wrote.
This module knows tokenizers and templates; it does not know files or rows.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerBase

from medusa_decoding.chat.rendering import render
from medusa_decoding.files import read_text
from medusa_decoding.training.data.records import BadRecordError, Record, Report, Tokens

# Vicuna's format (v1.1 and later): a system message, then turns "USER: ..." and "ASSISTANT: ...</s>". The model was
# trained with this line as the system message; a conversation's own one takes its place. The tokenizer puts the start
# token in front, as it does for that model's own users: written as text, it would change how some tokenizers divide
# what follows.
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

# For models without a format of their own: contents a line each, answers closed by the end token.
_PLAIN = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{%- generation -%}{{- message.content + eos_token -}}{%- endgeneration -%}
{%- else -%}{{- message.content + '\\n' -}}{%- endif -%}
{%- endfor -%}"""

TEMPLATES = {"vicuna": _VICUNA, "plain": _PLAIN}
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Example:
    """What is learnt from.

    Attributes:
        ids: int32 [T] token ids.
        learnt: bool [T], the tokens that losses are about.
        where: where the record came from.
        is_text: whether it is a plain text, which may be divided anywhere.
    """

    ids: np.ndarray
    learnt: np.ndarray
    where: str
    is_text: bool = False


class ChatEncoder:
    """Renders and tokenizes records.

    Args:
        tokenizer: of the model.
        template: "auto" for the tokenizer's own, "vicuna", "plain", or a file with a Jinja template.
        turns: "joint" learns all assistant turns of a conversation at once; "each" makes one example a turn, with the
            conversation up to it, for templates that render a turn differently once others follow.
        arguments: further variables of the template.
        vocab_size: token ids that exact records may hold, the model's; None for the tokenizer's.

    Raises:
        ValueError: no template, no such file, or a template that needs an end token where the tokenizer has none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str = "auto",
        *,
        turns: str = "joint",
        arguments: Mapping[str, Any] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        if turns not in ("joint", "each"):
            raise ValueError(f"turns: expected 'joint' or 'each', got {turns!r}")
        self._tokenizer, self._each = tokenizer, turns == "each"
        self._template = template_text(tokenizer, template)
        self._built_in = template in TEMPLATES
        self._vocab_size = vocab_size
        self._marked = _MARKED.search(self._template) is not None
        self._variables: dict[str, Any] = {**tokenizer.special_tokens_map, **(arguments or {})}
        added = [str(token) for token in tokenizer.get_added_vocab()]
        self._special = tuple(token for token in {*tokenizer.all_special_tokens, *added} if token.strip())

    def encode(self, record: Record) -> list[Example]:
        """Return a record's examples: one, or one an assistant turn with `turns="each"`. Exact tokens are one example.

        Raises:
            BadRecordError: the template refuses the conversation, or there are token ids beyond the vocabulary.
            ValueError: the template does not render prefixes of a conversation as prefixes; another tokenizer's tokens.
        """
        if record.tokens is not None:
            return [self._exact(record, record.tokens)]
        if record.text is not None:
            return [self._encode_text(record.text, record.where)]
        messages = list(record.messages)
        answers = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        if not self._each:
            return [self._encode_turns(messages, answers, record.where)]
        return [self._encode_turns(messages[: place + 1], [place], record.where) for place in answers]

    @functools.cached_property
    def fingerprint(self) -> str:
        """The tokenizer's, see `fingerprint`."""
        return fingerprint(self._tokenizer)

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """What decides how conversations become tokens, the tokenizer apart, as JSON has it."""
        text = hashlib.blake2b(self._template.encode(), digest_size=8).hexdigest()
        added = {
            name: value for name, value in self._variables.items() if name not in self._tokenizer.special_tokens_map
        }
        return {"template": text, "arguments": added, "turns": "each" if self._each else "joint"}

    @functools.cached_property
    def end_of_turn(self) -> int | None:
        """The special token that the template puts behind an answer; None where it puts something else there."""
        said = "8fe31b"  # stands nowhere in a template, and has no space to lose
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": said}]
        try:
            behind = self._rendered(messages)[0].split(said)
        except jinja2.TemplateError:
            return None
        return self._special_first(behind[1]) if len(behind) == 2 else None

    def opening(self, text: str, count: int) -> list[int]:
        """Return the first tokens of a text, at most `count`, for a model to continue."""
        return self._without_end(text, list(self._tokenizer(text, verbose=False)["input_ids"]))[:count]

    def prompt(self, messages: Sequence[Mapping[str, str]]) -> tuple[str, list[int]]:
        """Return what a model is given to answer the last of some messages: its text and its tokens.

        Raises:
            BadRecordError: the template refuses the messages.
        """
        try:
            text, _ = self._rendered(messages, add_generation_prompt=True)
        except jinja2.TemplateError as error:
            raise BadRecordError(f"the chat template refuses it ({error})") from error
        return text, self._without_end(text, self._tokens([text])[0])

    def following(self, before: str, answer: str, messages: Sequence[Mapping[str, str]]) -> tuple[str, list[int]]:
        """Return the text of a further prompt, and the tokens that it has behind the answer.

        The further prompt's tokens are those of the prompt before, those of the answer as the model wrote them, and
        the ones returned, of which the first is the answer's end token. This holds if the template keeps what stood
        there and the answer (white space around it aside), and goes on with a special token, across which no
        tokenizer joins anything.

        Args:
            before: the text of the prompt that was answered.
            answer: its answer's text without the end token.
            messages: all messages so far, that answer and a further user turn at their end.

        Raises:
            BadRecordError: it does not hold, or the template refuses the messages.
        """
        text, whole = self.prompt(messages)
        if not text.startswith(before):
            raise BadRecordError("the chat template renders earlier turns otherwise once others follow")
        rest, said = text[len(before) :].lstrip(), answer.strip()
        if not rest.startswith(said):
            raise BadRecordError("the chat template does not keep an earlier answer as it was written")
        behind = rest[len(said) :].lstrip()
        ids = self._bare(behind)
        if self._special_first(behind) is None:
            raise BadRecordError("the chat template does not close an earlier answer with a special token")
        if whole[-len(ids) :] != ids:
            raise BadRecordError("what the chat template puts behind an answer has other tokens when it stands alone")
        return text, ids

    def spelt(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        text: Any = self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _special_first(self, text: str) -> int | None:
        text = text.lstrip()
        return self._bare(text)[0] if text.startswith(self._special) else None

    def _bare(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _without_end(self, text: str, ids: list[int]) -> list[int]:
        # Some tokenizers end every text themselves; what shall go on has no end.
        end = self._tokenizer.eos_token
        added = end is not None and ids[-1:] == [self._tokenizer.eos_token_id] and not text.rstrip().endswith(end)
        return ids[:-1] if added else ids

    def _exact(self, record: Record, tokens: Tokens) -> Example:
        if tokens.tokenizer != self.fingerprint:
            raise ValueError(
                f"tokenizer: expected the one that {record.where} was written with, fingerprint {tokens.tokenizer}, "
                f"got {self.fingerprint}"
            )
        size = self._vocab_size if self._vocab_size is not None else self._tokens_known
        if int(tokens.ids.max()) >= size:
            raise BadRecordError(f"a token id is not below {size}, the size of the vocabulary")
        learnt = np.zeros(len(tokens.ids), dtype=bool)
        for start, end in tokens.learnt:
            learnt[start:end] = True
        return Example(tokens.ids, learnt, record.where, is_text=record.text is not None)

    @functools.cached_property
    def _tokens_known(self) -> int:
        return max(self._tokenizer.get_vocab().values()) + 1

    def _encode_text(self, text: str, where: str) -> Example:
        ids = list(self._tokenizer(text, verbose=False)["input_ids"])
        end = self._tokenizer.eos_token_id
        if end is not None and ids[-1:] != [end]:
            ids.append(end)
        return Example(np.array(ids, dtype=np.int32), np.ones(len(ids), dtype=bool), where, is_text=True)

    def _encode_turns(self, messages: list[Mapping[str, str]], answers: list[int], where: str) -> Example:
        try:
            text, spans = (
                self._marked_spans(messages, where) if self._marked else self._prefix_spans(messages, answers, where)
            )
        except jinja2.TemplateError as error:
            raise BadRecordError(f"the chat template refuses it ({error})") from error
        if self._marked and self._each:
            spans = spans[-1:]
        cuts = sorted({cut for span in spans for cut in span} - {len(text)})
        whole, *prefixes = self._tokens([text, *(text[:cut] for cut in cuts)])
        places = {cut: _common(prefix, whole) for cut, prefix in zip(cuts, prefixes, strict=True)}
        places[len(text)] = len(whole)
        learnt = np.zeros(len(whole), dtype=bool)
        for start, end in spans:
            learnt[places[start] : places[end]] = True
        return Example(np.array(whole, dtype=np.int32), learnt, where)

    def _marked_spans(self, messages: list[Mapping[str, str]], where: str) -> tuple[str, list[tuple[int, int]]]:
        text, spans = self._rendered(messages)
        if not spans:
            raise ValueError(f"template: expected a {{% generation %}} block around each answer of {where}, got none")
        return text, spans

    def _prefix_spans(
        self, messages: list[Mapping[str, str]], answers: list[int], where: str
    ) -> tuple[str, list[tuple[int, int]]]:
        text, spans = self._rendered(messages)[0], []
        for place in answers:
            before, _ = self._rendered(messages[:place], add_generation_prompt=True)
            after, _ = self._rendered(messages[: place + 1])
            if not after.startswith(before):
                raise ValueError(
                    f"template: expected turn {place + 1} of {where} to follow the generation prompt, got "
                    f"{_departure(before, after)}; add {{% generation %}} markers to the template"
                )
            if not text.startswith(after):
                raise ValueError(
                    f"template: expected turn {place + 1} of {where} rendered the same when turns follow it, got "
                    f"{_departure(after, text)}; use turns='each', or add {{% generation %}} markers to the template"
                )
            bare = after.rstrip()
            spans.append((len(before), len(bare if bare.endswith(self._special) else after)))
        return text, spans

    def _rendered(self, messages: Sequence[Mapping[str, str]], **options: Any) -> tuple[str, list[tuple[int, int]]]:
        return render(self._template, messages, **options, **self._variables)

    def _tokens(self, texts: list[str]) -> list[list[int]]:
        # A template of the tokenizer's or a file writes the start token itself.
        found = self._tokenizer(texts, add_special_tokens=self._built_in, verbose=False)
        return [list(ids) for ids in found["input_ids"]]


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return what tells tokenizers apart whose token ids mean different things: a hash of all tokens with their ids."""
    tokens = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    return hashlib.blake2b(repr(tokens).encode(), digest_size=8).hexdigest()


def encode_records(records: Iterable[Record], encoder: ChatEncoder, report: Report) -> Iterator[Example]:
    """Yield the examples of all records; one that the template refuses is noted in the report."""
    for record in records:
        try:
            yield from encoder.encode(record)
        except BadRecordError as error:
            report.reject(record.where, str(error))


def template_text(tokenizer: PreTrainedTokenizerBase, name: str) -> str:
    """Return a chat template in Jinja: see `ChatEncoder` for its names and errors."""
    if name == "auto":
        if not tokenizer.chat_template:
            raise ValueError(
                "template: expected 'vicuna', 'plain' or a file (the tokenizer has no template), got 'auto'"
            )
        own: str = tokenizer.get_chat_template()
        return own
    if name in TEMPLATES:
        if tokenizer.eos_token is None:
            raise ValueError(f"template: expected a tokenizer with an end token for {name!r}, got one without")
        return TEMPLATES[name]
    path = Path(name).expanduser()
    if not path.is_file():
        raise ValueError(f"template: expected 'auto', 'vicuna', 'plain' or a file, got {name!r}")
    return read_text(path)


def _common(one: Any, other: Any) -> int:
    # Lists or strings: how many first entries they share.
    if other[: len(one)] == one:
        return len(one)
    both = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(both) if a != b), len(other))


def _departure(expected: str, text: str) -> str:
    start = _common(expected, text)
    return f"{text[start : start + 30]!r} where {expected[start : start + 30]!r} stood"
