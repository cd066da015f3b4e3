"""Decide what a record is, check it, and split off held-out ones. Every command reads its data and prompts here.

The keys of a record tell its kind (docs/data.md has an example line of each): a list of turns (`messages`,
`conversations`), MT-Bench's `turns` (the user's alone), a `prompt`, `instruction` or `question` with or without its
answer, and a plain `text`. `turns.py` reads the turns. A key that is not read, with text that may belong to the prompt,
is noted. Records that `medusa distill` wrote also have their exact tokens (`input_ids`, the spans `learnt` of them, the
`tokenizer`'s fingerprint).

Training leaves a bad record out and notes it; too large a share of them is an error. A prompt without an answer is bad
there, while seeds and prompts to measure on need none.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from medusa_decoding.chat.template import Message
from medusa_decoding.training.config import SourceConfig
from medusa_decoding.training.data.sources import BadRecordError, raw_records
from medusa_decoding.training.data.turns import READ, WEIGHTS, parse_turns, text_of, tool_definitions

KINDS = {
    "turns": "turns", "conversations": "sharegpt", "conversation": "sharegpt", "messages": "messages",
    "prompt": "prompt", "instruction": "prompt", "question": "prompt", "chosen": "messages", "text": "text",
}  # fmt: skip
"""Keys with the kind of record that they tell; the first one that has a value counts."""
ANSWERS = ("response", "completion", "output", "answer", "chosen")
"""Keys of the answer to a prompt: Dolly's, TRL's, Alpaca's, GSM8K's and that of preferences."""
SYSTEMS = ("system", "system_prompt", "system_message")
TOOLS = ("tools", "functions")
_NO_PROMPT = re.compile(
    r"(.*_)?(ids?|idx|hash|ip|sources?|dataset|split|subset|categor(y|ies)|model|generator|lang(uage)?|country|state|license"
    r"|urls?|path|file|date|time(stamp)?|created|updated|type|tags?|labels?|version|finish|tool_choice|text|reference"
    r"|reference_answer|solution|test|entry_point|ground_truth)|task_name|response|completion|output|answers?|rejected.*",
    re.IGNORECASE,
)
"""Keys whose text never belongs to a prompt."""
_WRITTEN = (
    "`medusa distill --config FILE` has the model write the answers and then trains on them, and `medusa train --init "
    "MODEL DATA` writes a config for that"
)
NO_ANSWER = "no answer to learn: a prompt alone"
EXAMPLES = 20


@dataclass(frozen=True, eq=False)
class Tokens:
    """The exact tokens of a record.

    Attributes:
        ids: int32 [T] token ids.
        learnt: ordered spans (start, end) of the tokens that the losses train on.
        tokenizer: fingerprint of the tokenizer (see `encoding.fingerprint`).
    """

    ids: np.ndarray
    learnt: tuple[tuple[int, int], ...]
    tokenizer: str


@dataclass(frozen=True)
class Record:
    """A conversation or a text.

    Attributes:
        messages: turns as `parse_turns` returns them. In training the last one is an assistant's; seeds may end with a
            user's. Empty for a text.
        text: a plain text, or None.
        where: its file and line, or another way to find it.
        tokens: exact tokens to learn from, or None. With them, messages and text are only for people.
        tools: definitions of the tools that the model may call, for the chat template.
        kind: one of the values of `KINDS`, or "token ids" for exact tokens.
        beginning: of the text, which a model is to continue, or None.
        unread: keys that were not read: with text that may belong to the prompt, or a weight of 0.
    """

    messages: tuple[Mapping[str, Any], ...]
    text: str | None
    where: str
    tokens: Tokens | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    kind: str = "messages"
    beginning: str | None = None
    unread: tuple[str, ...] = ()

    @property
    def prompt(self) -> str:
        """The first user turn; for a text, the beginning that was continued, or all of it."""
        if self.beginning is not None or self.text is not None:
            return self.beginning or self.text or ""
        found: str = next(turn["content"] for turn in self.messages if turn["role"] == "user")
        return found

    def note_unread(self, notes: Counter[str]) -> None:
        """Count the keys that were not read."""
        notes.update(f"{key!r} is not read" for key in self.unread)


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
        """Raise `ValueError` if too many records were bad, or there were none."""
        bad = self.bad.total()
        if self.read == 0:
            raise ValueError("data: there is no record")
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
        lines += [f"  noted: {count} x {note}" for note, count in self.notes.most_common(EXAMPLES)]
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

    Nothing after the last of `limit` records is read (see `raw_records`).

    Assistant turns before the first user turn are dropped, because they answer nothing, and turns after the last
    assistant turn, because they teach nothing. Seeds need no assistant turn, and keep all turns from the first user
    turn to the first result of a tool, as a model will answer their user turns and may call no tool. Conversations
    without a system message get `system`.
    """
    count = 0
    for source in sources:
        for where, raw in raw_records(source, partly=limit is not None):
            report.read += 1
            try:
                yield parse_record(raw, where, source.format, system=system, notes=report.notes, seeds=seeds)
                count += 1
            except BadRecordError as error:
                report.reject(where, str(error))
            if count == limit:
                return


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

    Raises `BadRecordError` if it is neither.
    """
    if form == "auto" and isinstance(raw, Mapping) and raw.get("input_ids") is not None:
        return _exact(raw, where)
    found, counted = interpret(raw, where, form), Counter() if notes is None else notes
    messages = () if found.text is not None else tuple(_trimmed(found.messages, system, counted, seeds))
    found.note_unread(counted)
    return replace(found, messages=messages)


def interpret(raw: Any, where: str = "", form: str = "auto") -> Record:
    """Return what a parsed record says, all of its turns. `form` is a kind to take it for, or "auto": its keys tell.

    Raises `BadRecordError` if it is of no known kind, or a part of it is not text.
    """
    if isinstance(raw, BadRecordError):
        raise raw
    if not isinstance(raw, Mapping):
        raise BadRecordError(f"expected a record with named fields, got {type(raw).__name__}")
    keys = [key for key, kind in KINDS.items() if form in ("auto", kind)]
    key = next((key for key in keys if raw.get(key) is not None), None)
    if key is None:
        raise BadRecordError(f"none of the keys {', '.join(keys)}, but {_listed(raw)}")
    kind = KINDS[key]
    if key == "text" or (form == "auto" and key == "prompt" and _is_whole(raw)):
        text, unread = text_of(raw["text"], "text"), _unread(raw, {"text", "prompt"})
        return Record((), text, where, kind="text", beginning=_beginning(raw), unread=unread)
    read = {key}
    messages = _asked_once(raw, key, read) if kind == "prompt" else _turns(raw, key)
    if key := next((name for name in SYSTEMS if _is_text(raw.get(name))), ""):
        if messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": text_of(raw[key], key)})
        if messages[0]["content"] == raw[key]:
            read.add(key)
    name = next((name for name in TOOLS if raw.get(name)), "")
    tools = tool_definitions(raw.get(name))
    if tools is not None:
        read.add(name)
    return Record(tuple(messages), None, where, tools=tools or (), kind=kind, unread=_unread(raw, read))


def _beginning(raw: Mapping[str, Any]) -> str | None:
    return None if raw.get("prompt") is None else text_of(raw["prompt"], "prompt")


def _listed(raw: Mapping[Any, Any]) -> str:
    return ", ".join(map(str, raw))[:60] or "no keys"


def _is_whole(raw: Mapping[str, Any]) -> bool:
    """Return whether a prompt is next to its whole text, whose beginning it is."""
    prompt, text = raw["prompt"], raw.get("text")
    if not _is_text(prompt) or not isinstance(text, str) or not text.strip():
        return False
    return raw.get("input_ids") is not None or prompt.strip() in text


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _filled(value: Any) -> bool:
    return bool(value.strip() if isinstance(value, str) else value)


def _turns(raw: Mapping[str, Any], key: str) -> list[Message]:
    turns = raw[key]
    if key == "turns" and isinstance(turns, list) and not any(isinstance(turn, (Mapping, list)) for turn in turns):
        turns = [{"role": "user", "content": text_of(turn, f"turn {n}")} for n, turn in enumerate(turns, start=1)]
    return parse_turns(turns, key, raw.get("input_ids") is not None)  # a model may have answered with nothing


def _asked_once(raw: Mapping[str, Any], key: str, read: set[str]) -> list[Message]:
    """Return the messages of a prompt with its answer, if it has one; add the keys that they are made of to `read`."""
    if _is_conversation(raw[key]):
        messages = parse_turns(raw[key], key)
    else:
        # Alpaca's and Dolly's text that the instruction is about.
        given = [name for name in (("input",) if key == "instruction" else ()) + ("context",) if _filled(raw.get(name))]
        parts = [text_of(raw[name], name) for name in given]
        if _filled(raw[key]) or not parts:
            parts.insert(0, text_of(raw[key], key))
        messages = [{"role": "user", "content": "\n\n".join(parts)}]
        read.update(given)
    if raw.get("history"):
        messages = parse_turns(raw["history"], "history") + messages
        read.add("history")
    answers = (name for name in ANSWERS if _is_text(raw.get(name)) or _is_conversation(raw.get(name)))
    answer = next(answers, None)
    if answer is None:
        return messages
    read.add(answer)
    if _is_text(raw[answer]):
        return [*messages, {"role": "assistant", "content": text_of(raw[answer], "the answer")}]
    turns = parse_turns(raw[answer], answer)
    if turns[0]["role"] not in ("system", "user"):
        return messages + turns
    # Some repeat the prompt. What they lack of it is noted, as text that is not read.
    read.clear()
    read.add(answer)
    return [message for message in messages if message["role"] == "system" != turns[0]["role"]] + turns


def _is_conversation(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)


def _unread(raw: Mapping[Any, Any], read: set[str]) -> tuple[str, ...]:
    """Return the keys of a record with text that is not read and may belong to the prompt; a weight of 0 neither is."""
    if raw.get("input_ids") is not None:
        return ()
    found = [str(key) for key, value in raw.items() if key not in read and _is_text(value)]
    for name in sorted(read.difference(TOOLS)):
        value = raw.get(name)
        turns = [turn for turn in value if isinstance(turn, Mapping)] if isinstance(value, list) else []
        texts = {str(key): None for turn in turns for key, value in turn.items() if key not in READ and _is_text(value)}
        found += [f"{name}[].{key}" for key in texts]
    return (
        *(key for key in found if not _NO_PROMPT.fullmatch(key.rpartition("].")[2])),
        *(key for key in WEIGHTS if raw.get(key) == 0),  # of turns they are read
    )


def _exact(raw: Mapping[str, Any], where: str) -> Record:
    ids, spans = _whole_numbers(raw["input_ids"]), _whole_numbers(raw.get("learnt"))
    if ids is None or ids.ndim != 1 or len(ids) == 0 or ids.min() < 0 or ids.max() >= 2**31:
        raise BadRecordError("input_ids is not a list of token ids")
    if raw.get("learnt") == []:
        spans = np.zeros((0, 2), dtype=np.int64)
    bounds = [] if spans is None or spans.ndim != 2 or spans.shape[1] != 2 else [0, *spans.flatten().tolist(), len(ids)]
    if bounds != sorted(bounds) or not bounds or any(start == end for start, end in spans.tolist()):
        raise BadRecordError("learnt is not a list of spans [start, end] of input_ids in order")
    # A model may have answered with nothing.
    messages = parse_turns(raw["messages"], "messages", True) if raw.get("messages") else []
    text = None if messages else text_of(raw.get("text"), "text")
    if messages and "user" not in [message["role"] for message in messages]:
        raise BadRecordError("no user turn")
    learnt = tuple((start, end) for start, end in spans.tolist())
    tokens = Tokens(ids.astype(np.int32), learnt, text_of(raw.get("tokenizer"), "tokenizer"))
    return Record(tuple(messages), text, where, tokens, kind="token ids", beginning=_beginning(raw))


def _whole_numbers(value: Any) -> Any:
    try:
        found = np.asarray(value)
    except (TypeError, ValueError, OverflowError):  # lists of different lengths
        return None
    return found if found.dtype.kind == "i" else None


def before_results(messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the messages before the first result of a tool, which a model that writes its own answers may not call."""
    roles = [message["role"] for message in messages]
    first = roles.index("user") if "user" in roles else 0
    return messages[: roles.index("tool", first)] if "tool" in roles[first:] else messages


def _trimmed(
    messages: Sequence[Mapping[str, Any]], system: str | None, notes: Counter[str], seeds: bool
) -> list[Mapping[str, Any]]:
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        raise BadRecordError("no user turn")
    first = roles.index("user")
    if "assistant" not in roles[first:] and not seeds:
        raise BadRecordError(NO_ANSWER)
    last = len(before_results(messages)) if seeds else len(roles) - roles[::-1].index("assistant")
    head = [message for message in messages[:first] if message["role"] == "system"]
    if len(head) < first:
        notes["assistant turns before the first user turn dropped"] += 1
    if last < len(roles) and seeds:
        notes["turns from the first result of a tool on dropped: the model writes its own answers"] += 1
    elif last < len(roles):
        notes["turns after the last assistant turn dropped"] += 1
    if system is not None and "system" not in roles[:last]:
        head = [{"role": "system", "content": system}]
    return [*head, *messages[first:last]]
