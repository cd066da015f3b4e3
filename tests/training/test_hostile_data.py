"""Damaged or malicious records: skipped with file and line, or refused by name, within bounds."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
import toy
from limits import MIB, bounded

from medusa_decoding.evaluation import read_prompts
from medusa_decoding.training.config import SourceConfig
from medusa_decoding.training.data import sources
from medusa_decoding.training.data.records import Report, read_records
from medusa_decoding.training.distill.record_file import RecordFile, finished

SOUND = json.dumps(toy.sharegpt("Hello?", "Hello.")).encode()
DEEP = 900
"""Nested as deeply as may still be parsed."""


def nested(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


def exact(**changes: Any) -> bytes:
    record = {"text": "abc", "input_ids": [1, 2, 3], "learnt": [[1, 3]], "tokenizer": "t"}
    return json.dumps(record | changes).encode()


LINES: dict[bytes, str] = {
    b'{"text": ' + b"7" * 5000 + b"}": "too many digits",
    b'{"text": "a", "id": ' + b"7" * 1_000_000 + b"}": "too many digits",
    b'{"text": NaN}': "text is not text",
    b'{"text": Infinity}': "text is not text",
    b'{"text": 1e999}': "text is not text",
    b"[" * 200_000: "nested too deeply",
    b'{"a":' * 200_000: "nested too deeply",
    b'{"text": ' + nested(DEEP) + b"}": "text is not text",
    b'{"messages": [{"role": ' + nested(DEEP) + b', "content": "x"}]}': "turn 1 has an unknown role",
    b'{"conversations": ' + nested(DEEP) + b"}": "turn 1 has no named fields",
    b'{"input_ids": ' + nested(DEEP) + b"}": "input_ids is not a list of token ids",
    b'{"text": "\\ud800"}': "half a surrogate pair",
    b'{"messages": [{"role": "\\ud800", "content": "x"}]}': "turn 1 has an unknown role",
    b'{"text": "\xed\xa0\x80"}': "half a surrogate pair",
    b'{"text": "\xff"}': "not UTF-8",
    b"\xff\xfe{\0}\0": "not UTF-8",
    b"\0": "not JSON",
    b"\0\0\0\0": "not UTF-8",
    b'{"text": "a\0b"}': "not JSON",
    b'{"text": ""}': "text is empty",
    b'{"text": ["a"]}': "text is not text",
    b'{"text": {}}': "text is not text",
    b'{"text": true}': "text is not text",
    b'{"messages": {}}': "messages is not a list of turns",
    b'{"messages": [{}]}': "turn 1 has an unknown role: None",
    b'{"messages": [{"role": [], "content": "x"}]}': "turn 1 has an unknown role: []",
    b'{"messages": [{"role": "user", "content": 7}]}': "content of turn 1 is not text",
    b'{"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]}': "a part of turn 1 is not text",
    b"7": "expected a record with named fields, got int",
    b"null": "expected a record with named fields, got NoneType",
    b'"a"': "expected a record with named fields, got str",
    exact(input_ids=[2**31]): "input_ids is not a list of token ids",
    exact(input_ids=[10**30]): "input_ids is not a list of token ids",
    exact(input_ids=[-1]): "input_ids is not a list of token ids",
    exact(input_ids=[1.0]): "input_ids is not a list of token ids",
    exact(input_ids=[float("nan")]): "input_ids is not a list of token ids",
    exact(input_ids=["1"]): "input_ids is not a list of token ids",
    exact(input_ids={}): "input_ids is not a list of token ids",
    exact(learnt=[[2**63 - 1, -(2**63)]]): "learnt reaches beyond input_ids",
    exact(learnt=[[0, 2], [2**63 - 1, -(2**63)]]): "learnt reaches beyond input_ids",
    exact(learnt=[[2, 1]]): "learnt is not a list of spans",
    exact(learnt=[["a", "b"]]): "learnt is not a list of spans",
    exact(tokenizer="\ud800"): "half a surrogate pair",
    exact(prompt=[]): "prompt is not text",
}


def read(*files: Path) -> tuple[Report, int]:
    report = Report()
    return report, len(list(read_records([SourceConfig(str(file)) for file in files], report)))


@pytest.mark.parametrize("number", range(len(LINES)))
def test_a_hostile_record_is_skipped_with_its_line_and_reason(tmp_path: Path, number: int) -> None:
    line, reason = list(LINES.items())[number]
    file = tmp_path / "a.jsonl"
    file.write_bytes(b"\n".join([SOUND, line, SOUND, b""]))
    with bounded(seconds=2, memory=64 * MIB):
        report, sound = read(file)
        str(report).encode()
    assert sound == 2
    assert report.read == 3
    ((where, said),) = report.examples
    assert where == f"{file}:2"
    assert reason in said


def test_hostile_prompts_are_refused_with_their_line(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    for line in LINES:
        file.write_bytes(b"\n".join([b'{"prompt": "a"}', line, b""]))
        with bounded(ValueError, seconds=2, memory=64 * MIB) as said:
            read_prompts([file])
        readable = line.startswith((b'{"text": "abc', b'{"text": "\\ud800', b'{"text": "\xed'))
        if not readable and not line.startswith(b'{"input_ids"'):
            assert said, line
            assert f"{file}:2" in said[0]


def test_a_line_without_an_end_is_refused_before_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    with file.open("wb") as lines:
        lines.write(SOUND + b"\n")
        os.truncate(lines.fileno(), 2**37)  # sparse, so it takes no disk space
    with bounded(ValueError, seconds=5, memory=160 * MIB) as said:
        read(file)
    assert f"lines of at most {sources.MAX_LINE:,} bytes" in said[0]
    assert f"{file}:2" in said[0]
    for name in ("a.json", "a.txt"):
        large = tmp_path / name
        with large.open("wb") as content:
            content.write(b"[")
            os.truncate(content.fileno(), 2**37)
        with bounded(ValueError, seconds=5, memory=64 * MIB) as said:
            read(large)
        assert f"at most {sources.MAX_WHOLE:,} bytes" in said[0]
        assert str(large) in said[0]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.gz", "a.txt.gz"])
@pytest.mark.parametrize("filling", [b"\n", b"a", b"["])
def test_a_compressed_file_that_becomes_too_large_is_refused(tmp_path: Path, name: str, filling: bytes) -> None:
    file = tmp_path / name
    part = gzip.compress(filling * (8 * MIB), 9)
    head = gzip.compress(b"[" if name == "a.json.gz" else SOUND + b"\n")
    file.write_bytes(head + part * 32)  # 256 MiB in 0.25
    with bounded(ValueError, seconds=20, memory=320 * MIB) as said:
        read(file)
    assert "100 times a .gz file's own size" in said[0]
    assert str(file) in said[0]


def test_files_without_records_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name, words in (
        ("empty.jsonl", None),
        ("folder.jsonl", "expected files that end in"),
        ("pipe.jsonl", "there is no such file"),
    ):
        with bounded(ValueError, seconds=2, memory=32 * MIB) as said:
            report, _ = read(tmp_path / name)
            report.check(1.0)
        assert (words or "expected at least one record, got none") in said[0]
    for content in (b"", b"no gzip", gzip.compress(SOUND)[:-9], b"\x1f\x8b" + b"\xff" * 40):
        broken = tmp_path / "a.jsonl.gz"
        broken.write_bytes(content)
        with bounded(ValueError, seconds=2, memory=32 * MIB) as said:
            read(broken)
        assert not content or f"expected a readable file, got {broken}" in said[0]


def test_a_list_with_a_number_of_too_many_digits_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(b"[" + SOUND + b"," + b"7" * 5000 + b"]")
    with bounded(ValueError, seconds=2) as said:
        read(file)
    assert said == [
        f"data: expected a list of records in {file}, got not JSON that can be read (an integer of too many digits)"
    ]


def test_any_bytes_are_records_or_counted_as_bad(tmp_path: Path) -> None:
    """Bytes of a valid file, changed, cut and mixed: every line is a record or counted as bad, none lacks text."""
    numbers = random.Random(0)
    sound = b"\n".join([SOUND, exact(), *itertools.islice(LINES, 12, 40), b""])
    file = tmp_path / "a.jsonl"
    for _ in range(300):
        content = bytearray(sound)
        for _ in range(numbers.choice((1, 5, 50))):
            place = numbers.randrange(len(content))
            content[place : place + numbers.choice((0, 1, 9))] = numbers.choice(
                (b"", b"\n", b"\0", b'"', b"[", b"}", b"\xff", b"\\ud800", b"7" * 4301, b"NaN", b"-1", b"null")
            )
        file.write_bytes(content)
        with bounded(seconds=2, memory=32 * MIB):
            report, kept = read(file)
        assert report.read == kept + report.bad.total()


SEED = {"number": 0, "part": 1, "parts": 1, "digest": "d"}
KNOWN: dict[str, Any] = {"seed": SEED, "cut": 0, "ended": None, "learnt": [[0, 2]]}


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000,
        b"1" * 5000,
        b"\xff",
        b"null",
        b"{}",
        *(
            json.dumps(KNOWN | changes).encode()
            for changes in (
                {"seed": []},
                {"seed": SEED | {"number": -1}},
                {"seed": SEED | {"number": "0"}},
                {"seed": SEED | {"number": [1]}},
                {"seed": SEED | {"part": 2}},
                {"seed": SEED | {"parts": True}},
                {"seed": SEED | {"digest": 7}},
                {"cut": "1"},
                {"cut": None},
                {"ended": {}},
                {"learnt": 7},
                {"learnt": [[1]]},
                {"learnt": [[2, 1]]},
                {"learnt": [["a", "b"]]},
                {"learnt": [[0, float("nan")]]},
            )
        ),
    ],
)
def test_a_hostile_line_of_generated_records_is_refused_by_its_number(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / "records.jsonl"
    written = RecordFile(file, {"a": 1}, resume=False)
    written.append([KNOWN])
    assert RecordFile(file, {"a": 1}, resume=True).earlier == [KNOWN]
    with file.open("ab") as lines:
        lines.write(line + b"\n")
    before = file.read_bytes()
    with bounded(ValueError, seconds=2, memory=32 * MIB) as said:
        RecordFile(file, {"a": 1}, resume=True)
    assert f"{file}:2: expected a generated record, got another line" in said[0]
    assert file.read_bytes() == before


def test_damaged_files_next_to_generated_records_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    RecordFile(file, {"a": 1}, resume=False).append([KNOWN])
    for name, read_again in (
        ("settings", lambda: RecordFile(file, {"a": 1}, resume=True)),
        ("finished", lambda: finished(file, {})),
    ):
        beside = tmp_path / f"records.jsonl.{name}"
        for content in (b"", b"[]", b"[" * 100_000, b"\xff", b'{"asked": {}}', b'{"report": {"records": "1"}}'):
            beside.write_bytes(content)
            with bounded(ValueError, seconds=2, memory=32 * MIB) as said:
                read_again()
            assert said, (name, content)
            assert str(beside) in said[0]
