"""Decide what a record is, check it, and split off held-out ones. Every command reads its data and prompts here.

The keys of a record tell its kind (docs/data.md has an example line of each): `messages` (turns of `role` and
`content`), ShareGPT's `conversations` (`from` and `value`), MT-Bench's `turns` (the user's alone), a `prompt`,
`instruction` or `question` with or without its answer, and a plain `text`. Records that `medusa distill` wrote also
have their exact tokens (`input_ids`, the spans `learnt` of them, the `tokenizer`'s fingerprint).

Training leaves a bad record out and notes it; too large a share of them is an error. A prompt without an answer is bad
there, while seeds and prompts to measure on need none.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from medusa_decoding.training.config import SourceConfig
from medusa_decoding.training.data.sources import BadRecordError, raw_records

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
KINDS = {
    "turns": "turns", "conversations": "sharegpt", "messages": "messages", "prompt": "prompt", "instruction": "prompt",
    "question": "prompt", "text": "text",
}  # fmt: skip
"""Keys with the kind of record that they tell; the first one that has a value counts."""
ANSWERS = ("response", "completion", "output", "answer")
"""Keys of the answer to a prompt: Dolly's, TRL's, Alpaca's and GSM8K's."""
_WRITTEN = (
    "`medusa distill --config FILE` has the model write the answers and then trains on them, and `medusa train --init "
    "MODEL DATA` writes a config for that"
)
_TURNS = {"sharegpt": ("from", "value"), "messages": ("role", "content")}
NO_ANSWER = "no answer to learn: a prompt alone"
EXAMPLES = 20


@dataclass(frozen=True, eq=False)
class Tokens:
    """The exact tokens of a record.

    Attributes:
        ids: int32 [T] token ids.
        learnt: ordered spans (start, end) of the tokens that the losses train on.
        tokenizer: fingerprint of the tokenizer (see `encoding.fingerprint`).
        prompt: the beginning of a text that a model continued, or None.
    """

    ids: np.ndarray
    learnt: tuple[tuple[int, int], ...]
    tokenizer: str
    prompt: str | None = None


@dataclass(frozen=True)
class Content:
    """What a record says, in whatever form.

    Attributes:
        kind: one of the values of `KINDS`.
        messages: all turns, as `{"role": ..., "content": ...}`; empty for a text.
        text: a plain text, or None.
        prompt: the beginning of the text that a model is to continue, or None.
    """

    kind: str
    messages: tuple[dict[str, str], ...] = ()
    text: str | None = None
    prompt: str | None = None

    @property
    def answered(self) -> bool:
        """Whether there is something to learn: a text, or an answer after a user's turn."""
        roles = [message["role"] for message in self.messages]
        return self.text is not None or ("user" in roles and "assistant" in roles[roles.index("user") :])


@dataclass(frozen=True)
class Record:
    """A conversation or a text.

    Attributes:
        messages: turns as `{"role": ..., "content": ...}`. The last one is an assistant's; seeds may end with a user's.
            Empty for a text.
        text: a plain text, or None.
        where: its file and line, or another way to find it.
        tokens: exact tokens to learn from, or None. With them, messages and text are only for people.
    """

    messages: tuple[Mapping[str, str], ...]
    text: str | None
    where: str
    tokens: Tokens | None = None

    @property
    def prompt(self) -> str:
        """The first user turn; for a text, the beginning that was continued, or all of it."""
        if self.tokens is not None and self.tokens.prompt is not None:
            return self.tokens.prompt
        if self.text is not None:
            return self.text
        return next(turn["content"] for turn in self.messages if turn["role"] == "user")


@dataclass
class Report:
    """Counts of the records that were read.

    Attributes:
        read: number of all records.
        bad: number of bad records, which were left out, by reason.
        examples: the first of these as (where, reason).
        notes: number of other events worth knowing, by description.
    """

    read: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    examples: list[tuple[str, str]] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)

    def reject(self, where: str, reason: str) -> None:
        """Count a bad record."""
        self.bad[reason] += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append((where, reason))

    def check(self, max_bad_share: float) -> None:
        """Raise if too many records were bad, or there were none.

        Raises:
            ValueError: gives the counts, the reasons and the first bad records.
        """
        bad = self.bad.total()
        if self.read == 0:
            raise ValueError("data: expected at least one record, got none")
        if bad > max_bad_share * self.read:
            unanswered = self.bad[NO_ANSWER]
            if unanswered == self.read:
                raise ValueError(f"data: expected answers to learn from, got {unanswered} prompts alone; {_WRITTEN}")
            hint = f"\n{_WRITTEN}" if unanswered else ""
            raise ValueError(f"data: expected at most {max_bad_share:.2%} bad records, got {self}{hint}")

    def __str__(self) -> str:
        bad = self.bad.total()
        lines = [f"{bad} of {self.read} records bad" + (f" ({bad / self.read:.2%})" if self.read else "")]
        lines += [f"  {count} x {reason}" for reason, count in self.bad.most_common(EXAMPLES)]
        lines += [f"  {where}: {reason}" for where, reason in self.examples]
        lines += [f"  noted: {count} x {note}" for note, count in self.notes.most_common()]
        return "\n".join(lines)


def read_records(
    sources: Sequence[SourceConfig],
    report: Report,
    *,
    system: str | None = None,
    limit: int | None = None,
    seeds: bool = False,
) -> Iterator[Record]:
    """Yield the good records of all sources in order, at most `limit`. The caller calls `Report.check` at the end.

    Assistant turns before the first user turn are dropped, because they answer nothing, and turns after the last
    assistant turn, because they teach nothing. Seeds need no assistant turn, and keep all turns from the first user
    turn on, as a model will answer their user turns. Conversations without a system message get `system`.

    Raises:
        ValueError, ModuleNotFoundError: as `raw_records`.
    """
    count = 0
    for source in sources:
        for where, raw in raw_records(source):
            if limit is not None and count >= limit:
                return
            report.read += 1
            try:
                yield parse_record(raw, where, source.format, system=system, notes=report.notes, seeds=seeds)
                count += 1
            except BadRecordError as error:
                report.reject(where, str(error))


def prompt_key(prompt: str) -> str:
    """Return a prompt without differences in white space and case; equal keys count as the same prompt."""
    return " ".join(prompt.split()).casefold()


def held_out(prompt: str, share: float, seed: int = 0) -> bool:
    """Decide by its hash alone whether a prompt is held out, so that the same prompt is always on the same side."""
    text = f"{seed}\0{prompt_key(prompt)}"
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def split_records(records: Iterable[Record], share: float, seed: int = 0) -> tuple[list[Record], list[Record]]:
    """Split records into those to train on and those held out, by `held_out` of their prompts."""
    if not 0 <= share < 1:
        raise ValueError(f"share: expected a number from 0 to below 1, got {share}")
    sides: tuple[list[Record], list[Record]] = ([], [])
    for record in records:
        sides[held_out(record.prompt, share, seed)].append(record)
    return sides


def parse_record(
    raw: Any,
    where: str,
    form: str = "auto",
    *,
    system: str | None = None,
    notes: Counter[str] | None = None,
    seeds: bool = False,
) -> Record:
    """Return a parsed record as training takes it, or a seed; `read_records` says how they differ.

    Raises:
        BadRecordError: no record of a known kind, or nothing in it to learn from.
    """
    if form == "auto" and isinstance(raw, Mapping) and raw.get("input_ids") is not None:
        return _exact(raw, where)
    content = interpret(raw, form)
    if content.text is not None:
        return Record((), content.text, where)
    counted = Counter() if notes is None else notes
    return Record(tuple(_trimmed(list(content.messages), system, counted, seeds)), None, where)


def interpret(raw: Any, form: str = "auto") -> Content:
    """Return what a parsed record says. `form` is a kind to take it for, or "auto": its keys tell.

    Raises:
        BadRecordError: no record of a known kind, or a part of it that is not text.
    """
    if isinstance(raw, BadRecordError):
        raise raw
    if not isinstance(raw, Mapping):
        raise BadRecordError(f"expected a record with named fields, got {type(raw).__name__}")
    keys = [key for key, kind in KINDS.items() if form in ("auto", kind)]
    key = next((key for key in keys if raw.get(key) is not None), None)
    if key is None:
        raise BadRecordError(f"none of the keys {', '.join(keys)}, but {_listed(raw)}")
    kind, value = KINDS[key], raw[key]
    if key == "text" or (form == "auto" and key == "prompt" and raw.get("text") is not None):
        # A prompt next to its whole text is the beginning of that text.
        prompt = None if raw.get("prompt") is None else _text(raw["prompt"], "prompt")
        return Content("text", text=_text(raw["text"], "text"), prompt=prompt)
    if kind == "prompt":
        return Content(kind, tuple(_single_turn(raw, key)))
    if not isinstance(value, list) or not value:
        raise BadRecordError(f"{key} is not a list of turns")
    if kind == "turns":
        asked = [_text(turn, f"turn {number}") for number, turn in enumerate(value, start=1)]
        return Content(kind, tuple({"role": "user", "content": turn} for turn in asked))
    may_be_empty = raw.get("input_ids") is not None  # a model may have answered with nothing
    turns = (parse_turn(turn, number, *_TURNS[kind], may_be_empty) for number, turn in enumerate(value, start=1))
    return Content(kind, tuple(turns))


def _listed(raw: Mapping[Any, Any]) -> str:
    return ", ".join(map(str, raw))[:60] or "no keys"


def _single_turn(raw: Mapping[str, Any], key: str) -> Iterator[dict[str, str]]:
    asked = _text(raw[key], key)
    given = raw.get("input") if key == "instruction" else None  # Alpaca's
    yield {"role": "user", "content": f"{asked}\n\n{_text(given, 'input')}" if given else asked}
    answers = (raw[name] for name in ANSWERS if isinstance(raw.get(name), str) and raw[name].strip())
    answer = next(answers, None)
    if answer is not None:
        yield {"role": "assistant", "content": _text(answer, "the answer")}


def _exact(raw: Mapping[str, Any], where: str) -> Record:
    ids = _whole_numbers(raw["input_ids"])
    if ids is None or ids.ndim != 1 or len(ids) == 0 or ids.min() < 0 or ids.max() >= 2**31:
        raise BadRecordError("input_ids is not a list of token ids")
    spans = np.zeros((0, 2), dtype=np.int64) if raw.get("learnt") == [] else _whole_numbers(raw.get("learnt"))
    if spans is None or spans.ndim != 2 or spans.shape[1] != 2:
        raise BadRecordError("learnt is not a list of spans [start, end] in order")
    if len(spans) and (spans.min() < 0 or spans.max() > len(ids)):  # first: differences of larger ones overflow
        raise BadRecordError("learnt reaches beyond input_ids")
    if (np.diff(spans, axis=1) < 1).any() or (np.diff(spans.flatten()) < 0).any():
        raise BadRecordError("learnt is not a list of spans [start, end] in order")
    turns = raw.get("messages")
    if turns is not None and not isinstance(turns, list):
        raise BadRecordError("messages is not a list of turns")
    # A model may have answered with nothing.
    messages = [parse_turn(turn, number, "role", "content", True) for number, turn in enumerate(turns or (), start=1)]
    text = None if messages else _text(raw.get("text"), "text")
    if messages and "user" not in [message["role"] for message in messages]:
        raise BadRecordError("no user turn")
    prompt = None if raw.get("prompt") is None else _text(raw["prompt"], "prompt")
    learnt = tuple((start, end) for start, end in spans.tolist())
    tokens = Tokens(ids.astype(np.int32), learnt, _text(raw.get("tokenizer"), "tokenizer"), prompt)
    return Record(tuple(messages), text, where, tokens)


def _whole_numbers(value: Any) -> np.ndarray | None:
    try:
        found = np.asarray(value)
    except (TypeError, ValueError, OverflowError):  # lists of different lengths
        return None
    return found if found.dtype.kind == "i" else None


def parse_turn(turn: Any, number: int, role_key: str, content_key: str, may_be_empty: bool = False) -> dict[str, str]:
    """Return a turn's role and content (a text, or a list of texts), which the record has under these keys.

    Raises:
        BadRecordError: it has no known role, or no content.
    """
    if not isinstance(turn, Mapping):
        raise BadRecordError(f"turn {number} has no named fields")
    name = turn.get(role_key)
    role = ROLES.get(name) if isinstance(name, str) else None
    if role is None:
        raise BadRecordError(f"turn {number} has an unknown {role_key}: {repr(name)[:40]}")
    content = turn.get(content_key)
    if isinstance(content, list) and all(isinstance(p, Mapping) and p.get("type") == "text" for p in content):
        content = "".join(_text(part.get("text"), f"a part of turn {number}") for part in content)
    return {"role": role, "content": _text(content, f"the {content_key} of turn {number}", may_be_empty)}


def _text(value: Any, name: str, may_be_empty: bool = False) -> str:
    if not isinstance(value, str):
        raise BadRecordError(f"{name} is not text")
    if not value.strip() and not may_be_empty:
        raise BadRecordError(f"{name} is empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRecordError(f"{name} holds half a surrogate pair") from None
    return value


def _trimmed(
    messages: list[dict[str, str]], system: str | None, notes: Counter[str], seeds: bool
) -> list[dict[str, str]]:
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        raise BadRecordError("no user turn")
    first = roles.index("user")
    if "assistant" not in roles[first:] and not seeds:
        raise BadRecordError(NO_ANSWER)
    last = len(roles) if seeds else len(roles) - roles[::-1].index("assistant")
    head = [message for message in messages[:first] if message["role"] == "system"]
    if len(head) < first:
        notes["assistant turns before the first user turn dropped"] += 1
    if last < len(roles):
        notes["turns after the last assistant turn dropped"] += 1
    if system is not None and "system" not in roles[:last]:
        head = [{"role": "system", "content": system}]
    return head + messages[first:last]
