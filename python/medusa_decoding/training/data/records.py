"""Read conversations and texts from files and from the hub, check each record, and split off held-out ones.

Records are ShareGPT's (`conversations`, turns of `from` and `value`), messages (`messages`, of `role` and `content`) or
plain (`text`). Records that a model wrote also have their exact tokens (`input_ids`, the spans `learnt` of them, the
`tokenizer`'s fingerprint). A bad record is left out and noted; too large a share of them is an error.
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
_LISTS = {"sharegpt": ("conversations", "from", "value"), "messages": ("messages", "role", "content")}
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
            raise ValueError(f"data: expected at most {max_bad_share:.2%} bad records, got {self}")

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
                yield _record(raw, source.format, where, system, report.notes, seeds)
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


def _record(raw: Any, form: str, where: str, system: str | None, notes: Counter[str], seeds: bool) -> Record:
    if isinstance(raw, BadRecordError):
        raise raw
    if not isinstance(raw, Mapping):
        raise BadRecordError(f"expected a record with named fields, got {type(raw).__name__}")
    if form == "auto":
        if raw.get("input_ids") is not None:
            return _exact(raw, where)
        keys = [*((key, name) for name, (key, _, _) in _LISTS.items()), ("text", "text")]
        form = next((name for key, name in keys if raw.get(key) is not None), "")
        if not form:
            raise BadRecordError("none of the keys conversations, messages, text")
    if form == "text":
        return Record((), _text(raw.get("text"), "text"), where)
    key, role_key, content_key = _LISTS[form]
    turns = raw.get(key)
    if not isinstance(turns, list) or not turns:
        raise BadRecordError(f"{key} is not a list of turns")
    messages = [parse_turn(turn, number, role_key, content_key) for number, turn in enumerate(turns, start=1)]
    return Record(tuple(_trimmed(messages, system, notes, seeds)), None, where)


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
        raise BadRecordError("no assistant turn after a user turn")
    last = len(roles) if seeds else len(roles) - roles[::-1].index("assistant")
    head = [message for message in messages[:first] if message["role"] == "system"]
    if len(head) < first:
        notes["assistant turns before the first user turn dropped"] += 1
    if last < len(roles):
        notes["turns after the last assistant turn dropped"] += 1
    if system is not None and "system" not in roles[:last]:
        head = [{"role": "system", "content": system}]
    return head + messages[first:last]
