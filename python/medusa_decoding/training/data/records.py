"""Read conversations and texts from files and from the hub, check each record, and split off held-out ones.

Records are ShareGPT's (`conversations`, turns of `from` and `value`), messages (`messages`, of `role` and `content`) or
plain (`text`). Records that a model wrote also have their exact tokens (`input_ids`, the spans `learnt` of them, the
`tokenizer`'s fingerprint). Files are .jsonl, .json (a list, or one record per line), .txt (one text per file), all of
them also as .gz, and .parquet. A bad record is left out and noted; too large a share of them is an error.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
import math
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from medusa_decoding.checks import import_library
from medusa_decoding.training.config import SourceConfig

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_LISTS = {"sharegpt": ("conversations", "from", "value"), "messages": ("messages", "role", "content")}
_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet", ".txt", ".txt.gz")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
EXAMPLES = 20
MAX_LINE, MAX_WHOLE, MAX_RATIO = 64 * 2**20, 4 * 2**30, 100
"""Most bytes of one line, and of a whole list or text; how many times its size a compressed file may expand to."""


class BadRecordError(ValueError):
    """A record that is left out; says what is wrong with it."""


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


def raw_records(source: SourceConfig) -> Iterator[tuple[str, Any]]:
    """Yield where each record of a source is, and the record as it was parsed (a `BadRecordError` if it cannot be).

    Raises:
        ValueError: a source that does not exist, holds no files, or cannot be read as a whole.
        ModuleNotFoundError: a parquet file or a hub name without the `datasets` library.
    """
    path = Path(os.path.expanduser(source.path))
    if path.is_file():
        yield from _read_file(path)
    elif path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and file.name.endswith(_SUFFIXES))
        if not files:
            raise ValueError(f"data: expected files that end in {', '.join(_SUFFIXES)} in {path}, got none")
        for file in files:
            yield from _read_file(file)
    elif path.is_absolute() or source.path.endswith(_SUFFIXES) or not HUB_NAME.fullmatch(source.path):
        raise ValueError(f"data: expected a file, a folder or a hub name, got {source.path} (there is no such file)")
    else:
        yield from _from_hub(source)


def _read_file(path: Path) -> Iterator[tuple[str, Any]]:
    readers: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
        ".jsonl": _json_lines,
        ".json": _json,
        ".parquet": _parquet,
        ".txt": _whole_text,
    }
    suffix = Path(path.name.removesuffix(".gz")).suffix
    if suffix not in readers:
        raise ValueError(f"data: expected a file that ends in {', '.join(_SUFFIXES)}, got {path}")
    try:
        yield from readers[suffix](path)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"data: expected a readable file, got {path} ({error})") from error


def _open(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb"))


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        return BadRecordError(f"not JSON ({error.msg})")
    except UnicodeDecodeError:
        return BadRecordError("not UTF-8")
    except RecursionError:
        return BadRecordError("not JSON that can be read (nested too deeply)")
    except ValueError:
        return BadRecordError("not JSON that can be read (an integer of too many digits)")


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    room = _most_bytes(path)
    with _open(path) as lines:
        for number in itertools.count(1):
            line = lines.readline(MAX_LINE + 1)
            if not line:
                return
            room -= max(len(line), 64)  # empty lines take time, too
            if len(line) > MAX_LINE or room < 0:
                raise _too_large(f"{path}:{number}", f"lines of at most {MAX_LINE:,} bytes")
            if line.strip():
                yield f"{path}:{number}", _parsed(line)


def _most_bytes(path: Path) -> float:
    """Return how many bytes may be read from a file: a compressed one could expand without end."""
    return max(MAX_LINE, MAX_RATIO * path.stat().st_size) if path.suffix == ".gz" else math.inf


def _read_whole(path: Path) -> bytes:
    limit = int(min(MAX_WHOLE, _most_bytes(path)))
    content = b""
    if path.stat().st_size <= limit:
        with _open(path) as file:
            content = file.read(limit + 1)
    if len(content) > limit or path.stat().st_size > limit:
        raise _too_large(path, f"at most {limit:,} bytes")
    return content


def _too_large(where: object, words: str) -> ValueError:
    return ValueError(
        f"data: expected {words} (and at most {MAX_RATIO} times a .gz file's own size) in {where}, got more; split it "
        "into several records or files"
    )


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    with _open(path) as file:
        is_list = file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    if not is_list:
        yield from _json_lines(path)
        return
    whole = _parsed(_read_whole(path))
    if isinstance(whole, BadRecordError):
        raise ValueError(f"data: expected a list of records in {path}, got {whole}")
    for number, record in enumerate(whole, start=1):
        yield f"{path}: record {number}", record


def _whole_text(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        yield str(path), {"text": _read_whole(path).decode("utf-8-sig")}
    except UnicodeDecodeError:
        yield str(path), BadRecordError("not UTF-8")


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    datasets = import_library("datasets", str(path))
    # Streamed, so that the library caches no copy.
    try:
        rows = datasets.load_dataset("parquet", data_files=str(path), split="train", streaming=True)
        for number, row in enumerate(rows, start=1):
            yield f"{path}: row {number}", row
    except ValueError as error:
        raise ValueError(f"data: expected a readable file, got {path} ({error})") from error


def _from_hub(source: SourceConfig) -> Iterator[tuple[str, Any]]:
    datasets = import_library("datasets", f"{source.path}, which is no file and so a hub name")
    try:
        rows = datasets.load_dataset(source.path, source.subset, split=source.split, revision=source.revision)
    except (OSError, ValueError) as error:
        raise ValueError(f"data: expected a file, a folder or a hub dataset, got {source.path} ({error})") from error
    for number, row in enumerate(rows, start=1):
        yield f"{source.path} [{source.split}]: row {number}", row
