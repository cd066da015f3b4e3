"""Conversations as token ids, and which of those tokens the assistant wrote.

The spans of the assistant's turns in the text come from the template's `{% generation %}` blocks if it has any.
Otherwise the answer is what the prefix with the answer adds to the prefix with the generation prompt. Text before and
after a turn is never learnt, nor is white space after an end-of-turn token.

A turn begins at the first token in which the whole conversation differs from the text before the turn, and ends with
the last token that it shares with the text up to the turn's end. So a token that contains the end of the prompt and the
start of the answer belongs to the answer, because the model has to write it. This needs no character offsets, which
some tokenizers get wrong.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jinja2
import numpy as np
from transformers import PreTrainedTokenizerBase

from medusa_decoding.chat.template import BUILT_IN_TRAINING, ChatTemplate
from medusa_decoding.generation.session import common_length
from medusa_decoding.training.config import DataConfig
from medusa_decoding.training.data.records import Record, Report, Tokens
from medusa_decoding.training.data.sources import BadRecordError

# For a tokenizer without a template: a prompt is bare text, as `medusa eval` and `generate` ask it.
_BARE = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{%- if not loop.last -%}
{{- raise_exception('several turns, and the tokenizer has no chat template: set data.template') -}}
{%- endif -%}
{%- generation -%}{{- message.content + end -}}{%- endgeneration -%}
{%- else -%}{{- ('' if loop.first else '\\n') + message.content -}}{%- endif -%}
{%- endfor -%}"""
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

    @classmethod
    def from_spans(
        cls, ids: Sequence[int] | np.ndarray, spans: Iterable[tuple[int, int]], where: str, is_text: bool = False
    ) -> Example:
        """Make an example of token ids, of which the spans (start, end) are learnt."""
        learnt = np.zeros(len(ids), dtype=bool)
        for start, end in spans:
            learnt[start:end] = True
        return cls(np.asarray(ids, dtype=np.int32), learnt, where, is_text)


class ChatEncoder:
    """Renders and tokenizes records.

    Args:
        template: as `data.template`. If the tokenizer has no template, "auto" takes a prompt as bare text.
        turns, arguments: as `data.turns` and `data.template_arguments`.
        vocab_size: the model's vocabulary size, a bound for the ids of exact records; None for the tokenizer's.

    Attributes:
        bare: whether there is no chat template.
        closing: tokens that may close a turn: special ones, and others that were added to the vocabulary.
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
        self.tokenizer, self.turns = tokenizer, turns
        self._vocab_size = max(tokenizer.get_vocab().values(), default=-1) + 1 if vocab_size is None else vocab_size
        name = None if template == "auto" else template
        built_in, variables = BUILT_IN_TRAINING, dict(arguments or {})
        self.bare = name is None and not tokenizer.chat_template
        if self.bare:
            name, built_in = "bare", {"bare": _BARE}
            variables["end"] = tokenizer.eos_token or ""
        self.template = ChatTemplate(tokenizer, name, built_in=built_in, variables=variables, check=False)
        self._marked = _MARKED.search(self.template.text) is not None
        self.closing = (*self.template.special, *(token for token in tokenizer.get_added_vocab() if token.strip()))

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, data: DataConfig, vocab_size: int | None = None) -> ChatEncoder:
        """Return the encoder of a configuration's data; see the class."""
        return cls(tokenizer, data.template, turns=data.turns, arguments=data.template_arguments, vocab_size=vocab_size)

    def encode(self, record: Record) -> list[Example]:
        """Return a record's examples: one, or one per assistant turn with `turns="each"`. Exact tokens are one example.

        Raises `BadRecordError` if the template refuses the conversation, or token ids are beyond the vocabulary.
        """
        if record.tokens is not None:
            return [self._exact(record, record.tokens)]
        if record.text is not None:
            return [self._encode_text(record.text, record.where)]
        answers = [place for place, message in enumerate(record.messages) if message["role"] == "assistant"]
        learnt = [place for place in answers if record.messages[place].get("weight") != 0]
        if self.turns == "joint" or not learnt:
            return [self._encode_turns(record, answers, learnt)]
        parts = [(replace(record, messages=record.messages[: place + 1]), place) for place in learnt]
        return [self._encode_turns(part, [place], [place]) for part, place in parts]

    @functools.cached_property
    def fingerprint(self) -> str:
        """The tokenizer's, see `fingerprint`."""
        return fingerprint(self.tokenizer)

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """What decides how conversations become tokens, except the tokenizer, as JSON."""
        text = hashlib.blake2b(self.template.text.encode(), digest_size=8).hexdigest()
        known = self.tokenizer.special_tokens_map
        added = {name: value for name, value in self.template.variables.items() if name not in known}
        return {"template": text, "arguments": added, "turns": self.turns}

    @functools.cached_property
    def end_of_turn(self) -> int | None:
        """The token that closes an answer, white space before it aside; None if the template puts no token there."""
        return self.template.leading_token(self.template.after_answer.lstrip(), self.closing)

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[str, list[int]]:
        """Return the text and the tokens of a prompt whose last message a model will answer.

        Raises `BadRecordError` if the template refuses the messages.
        """
        text, _ = self._rendered(messages, tools, add_generation_prompt=True)
        return text, self.template.prompt_tokens(text)

    def compare(self, record: Record, ends: Collection[int | None] = ()) -> tuple[int, bool]:
        """Return how many answers in exact tokens have no end token, and whether the text next to them is another.

        End tokens are the tokenizer's, the template's, and `ends`.
        """
        assert record.tokens is not None
        ids, ends = record.tokens.ids.tolist(), (self.tokenizer.eos_token_id, self.end_of_turn, *ends)
        spans = [(start, end, ids[end - 1] in ends) for start, end in reversed(record.tokens.learnt)]
        written, said = [self.spell(ids).strip()], [(record.text or "").strip()]
        if record.text is None:  # the last answers, if each turn is a record; tokenizers add space
            written = [self.spell(ids[start : end - closed]).strip() for start, end, closed in spans]
            turns = [turn for turn in record.messages if turn["role"] == "assistant" and turn.get("weight") != 0]
            said = [(turn["content"] or "").strip() for turn in reversed(turns)]
        return sum(not closed for _, _, closed in spans), written != said[: len(written)]

    def spell(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included."""
        text: Any = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _exact(self, record: Record, tokens: Tokens) -> Example:
        if tokens.tokenizer != self.fingerprint:
            raise ValueError(
                f"tokenizer: expected the one that {record.where} was written with, fingerprint {tokens.tokenizer}, "
                f"got {self.fingerprint}"
            )
        if int(tokens.ids.max()) >= self._vocab_size:
            raise BadRecordError(f"a token id is not below {self._vocab_size}, the size of the vocabulary")
        return Example.from_spans(tokens.ids, tokens.learnt, record.where, is_text=record.text is not None)

    def _encode_text(self, text: str, where: str) -> Example:
        ids = list(self.tokenizer(text, verbose=False)["input_ids"])
        end = self.tokenizer.eos_token_id
        if end is not None and ids[-1:] != [end]:
            ids.append(end)
        return Example.from_spans(ids, [(0, len(ids))], where, is_text=True)

    def _encode_turns(self, record: Record, answers: list[int], learnt: list[int]) -> Example:
        """Encode a conversation; `answers` are the places of the assistant's turns, `learnt` those to learn."""
        where = record.where
        text, spans = self._rendered(record.messages, record.tools)
        if not self._marked:
            spans = self._prefix_spans(text, record, learnt)
        elif not spans:
            raise ValueError(f"template: it has no {{% generation %}} block around the answers of {where}")
        elif self.turns == "each":
            spans = spans[-1:] if learnt else []
        elif len(learnt) < len(answers):
            if len(spans) != len(answers):
                raise BadRecordError(
                    f"the chat template marks {len(spans)} answers of {len(answers)}, so which have weight 0 is unknown"
                )
            spans = [span for span, place in zip(spans, answers, strict=True) if place in learnt]
        cuts = sorted({cut for span in spans for cut in span} - {len(text)})
        whole, *prefixes = self.template.tokens([text, *(text[:cut] for cut in cuts)])
        places = {cut: common_length(prefix, whole) for cut, prefix in zip(cuts, prefixes, strict=True)}
        places[len(text)] = len(whole)
        return Example.from_spans(whole, [(places[start], places[end]) for start, end in spans], where)

    def _prefix_spans(self, text: str, record: Record, answers: list[int]) -> list[tuple[int, int]]:
        spans, messages, where = [], record.messages, record.where
        for place in answers:
            before, _ = self._rendered(messages[:place], record.tools, add_generation_prompt=True)
            after, _ = self._rendered(messages[: place + 1], record.tools)
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
            spans.append((len(before), len(bare if bare.endswith(self.closing) else after)))
        return spans

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = False,
    ) -> tuple[str, list[tuple[int, int]]]:
        try:
            text, spans = self.template.render_spans(messages, add_generation_prompt, self.template.known_tools(tools))
        except jinja2.TemplateError as error:
            raise BadRecordError(f"the chat template refuses it ({error})") from error
        for call in (call for message in messages for call in message.get("tool_calls", ())):
            if call["function"]["name"] not in text:
                raise BadRecordError("the chat template leaves out tool calls")
        return text, spans


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


def _departure(expected: str, text: str) -> str:
    start = common_length(expected, text)
    return f"{text[start : start + 30]!r} instead of {expected[start : start + 30]!r}"
