"""Seeds whose user turns a model answers, one after the other (Medusa paper, section 2.3.2).

A seed's own answers are dropped, except those of weight 0, which are not learnt and stay as they are. With
`turns="joint"` all answers of a seed are one record: each prompt is the previous one, its answer as the model wrote it,
and what the template puts after it. With `turns="each"` every prompt is rendered again from the text of the answers, as
in serving, and every answer is one record. The first tokens of a text are a prompt, and its continuation is the only
answer.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from medusa_decoding.chat.template import PROBE, Message, open_tokens
from medusa_decoding.training.config import GenerationConfig
from medusa_decoding.training.data.encoding import ChatEncoder
from medusa_decoding.training.data.records import Record
from medusa_decoding.training.data.sources import BadRecordError

# An answer, and one with a block of thought, which some templates remove once turns follow.
_PROBES = (PROBE, f"<think>\n{PROBE}\n</think>\n\n{PROBE}")


class Seed:
    """A seed record, a conversation with a user turn or a text, that is being answered.

    Raises `BadRecordError` if the template refuses it, or its prompt leaves no room for an answer.

    Attributes:
        digest: a hash of the parts of the record that matter.
        turns: user turns that will be answered.
        prompt: tokens to answer next; empty at the end.
        ended: why not all turns were answered, or None.
    """

    def __init__(
        self, number: int, record: Record, encoder: ChatEncoder, settings: GenerationConfig, length: int
    ) -> None:
        self.number, self.record = number, record
        self.ended: str | None = None
        self._encoder, self._length = encoder, length
        self._joint = encoder.turns == "joint" or record.text is not None
        self._spans: list[tuple[int, int]] = []
        self._cut = 0
        self._lines: list[dict[str, Any]] = []
        self._states: list[Sequence[torch.Tensor]] = []
        if record.text is not None:
            self.turns, self.prompt = 1, open_tokens(encoder.tokenizer, record.text)[: settings.prompt_tokens]
            if not self.prompt:
                raise BadRecordError("a text without tokens")
            source: Any = record.text
        else:
            head, groups = _asked(record.messages)
            groups = groups[: settings.turns]
            if not groups:
                raise BadRecordError("every answer has weight 0")
            self.turns, self._groups, self._messages = len(groups), groups[1:], [*head, *groups[0]]
            source = [*head, *(turn for group in groups for turn in group), *record.tools]
            self._text, self.prompt = encoder.prompt(self._messages, record.tools)
            if self._joint and self._groups:
                self._check_template()
        self.digest = hashlib.blake2b(json.dumps(source).encode(), digest_size=8).hexdigest()
        if len(self.prompt) >= length:
            raise BadRecordError(f"its prompt leaves no room within {length} tokens")

    @property
    def room(self) -> int:
        """How many tokens the next answer may have."""
        return self._length - len(self.prompt)

    @property
    def answered(self) -> int:
        """How many turns have been answered."""
        return len(self._spans)

    def take(self, answer: Sequence[int], ends: Collection[int], states: Sequence[torch.Tensor] = ()) -> None:
        """Add the tokens of an answer to the prompt, and make the next prompt if there is one; `ends` end an answer.

        `states` are those from which the tokens were predicted, [H] each, if they are kept.
        """
        self._states.append(states)
        ids = [*self.prompt, *answer]
        closed = bool(answer) and answer[-1] in ends
        span, self.prompt = (len(self.prompt), len(ids)), []
        self._spans.append(span)
        self._cut += not closed
        if self.record.text is not None:
            content = {"text": self._encoder.spell(ids), "prompt": self._encoder.spell(ids[: span[0]])}
            self._lines = [self._line(content, ids, self._spans)]
            return
        answer_text = self._encoder.spell(answer[:-1] if closed else answer)
        self._messages.append({"role": "assistant", "content": answer_text})
        tools = {"tools": list(self.record.tools)} if self.record.tools else {}
        content_so_far = {"messages": list(self._messages), **tools}
        if self._joint:
            self._lines = [self._line(content_so_far, ids, self._spans)]
        else:
            self._lines.append(self._line(content_so_far, ids, [span]))
            self._cut = 0
        if self._groups:
            try:
                self._ask(self._groups.pop(0), answer_text, ids, closed)
            except BadRecordError as error:
                self.ended, self.prompt = str(error), []

    def lines(self) -> list[dict[str, Any]]:
        """Return the seed's records in the form that `read_records` takes."""
        source = {"number": self.number, "digest": self.digest, "where": self.record.where}
        of = len(self._lines)
        return [
            {"seed": source | {"part": part, "parts": of}, "ended": self.ended} | line
            for part, line in enumerate(self._lines, start=1)
        ]

    def states(self) -> list[Sequence[torch.Tensor]]:
        """Return the states of each record's answers, in their order."""
        return [list(itertools.chain.from_iterable(self._states))] if self._joint else self._states

    def _line(self, content: Mapping[str, Any], ids: list[int], spans: list[tuple[int, int]]) -> dict[str, Any]:
        tokens = {"learnt": [list(span) for span in spans], "input_ids": ids}
        return {"cut": self._cut, **content, "tokenizer": self._encoder.fingerprint, **tokens}

    def _ask(self, group: list[Message], answer_text: str, ids: list[int], closed: bool) -> None:
        messages = [*self._messages, *group]
        if self._joint:
            text, after = self._following(answer_text, messages)
            if closed and after[0] != ids[-1]:
                raise BadRecordError("an answer ended with another token than the one the chat template puts there")
            prompt = ids + after[1 if closed else 0 :]
        else:
            text, prompt = self._encoder.prompt(messages, self.record.tools)
        if len(prompt) >= self._length:
            raise BadRecordError(f"a further prompt leaves no room within {self._length} tokens")
        self._text, self.prompt, self._messages = text, prompt, messages

    def _following(self, answer: str, messages: Sequence[Mapping[str, str]]) -> tuple[str, list[int]]:
        """Return the text of a further prompt, and the tokens that it has after the previous answer.

        The further prompt's tokens are those of the previous prompt, those of the answer as the model wrote them, and
        the ones returned, which begin with the answer's end token. This holds if the template keeps the earlier text
        and the answer (except white space around it), and goes on with a special token: no tokenizer joins text across
        one. Raises `BadRecordError` if it does not hold.
        """
        text, whole = self._encoder.prompt(messages, self.record.tools)
        if not text.startswith(self._text):
            raise BadRecordError("the chat template renders earlier turns otherwise once others follow")
        rest, answer = text[len(self._text) :].lstrip(), answer.strip()
        if not rest.startswith(answer):
            raise BadRecordError("the chat template does not keep an earlier answer as it was written")
        after = rest[len(answer) :].lstrip()
        if not after.startswith(self._encoder.closing):
            raise BadRecordError("the chat template does not close an earlier answer with a special token")
        ids = open_tokens(self._encoder.tokenizer, after, special=False)
        if whole[-len(ids) :] != ids:
            raise BadRecordError("what the chat template puts after an answer has other tokens when it is alone")
        return text, ids

    def _check_template(self) -> None:
        for probe in _PROBES:
            messages = [*self._messages, {"role": "assistant", "content": probe}, *self._groups[0]]
            try:
                self._following(probe, messages)
            except BadRecordError as error:
                raise ValueError(
                    f"template: expected one that keeps earlier answers as they are ({self.record.where} has several "
                    f"user turns), got one that does not: {error}; data.turns: each renders every prompt again, "
                    "generation.turns: 1 asks once"
                ) from error


def _asked(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Message], list[list[Message]]]:
    """Return the system messages before the first user turn, and the turns that precede each answer of the model."""
    first = [turn["role"] for turn in messages].index("user")
    head = [dict(turn) for turn in messages[:first] if turn["role"] == "system"]
    groups: list[list[Message]] = []
    group: list[Message] = []
    for turn, following in zip(messages[first:], [*messages[first + 1 :], {}], strict=True):
        is_kept = turn.get("weight") == 0 and any(one["role"] == "user" for one in group)
        if turn["role"] in ("system", "user") or is_kept:
            group.append(dict(turn))
        if turn["role"] == "user" and following.get("weight") != 0:
            groups.append(group)
            group = []
    return head, groups
