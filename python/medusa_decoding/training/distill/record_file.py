"""The file that generated records are appended to, in a way that a stopped run can go on from.

`records.jsonl` has a record a line; `records.jsonl.settings` beside it says what they were made with, and records of
other settings are never added; `records.jsonl.finished` is there once all are written. Records are appended and
brought to the disk a block at a time; a last line that a kill has left half written is cut off when the run goes on.
This module knows lines and files; it does not know models or seeds.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from medusa_decoding.files import parse_json, read_json_object, write_json


class GeneratedFile:
    """Records that are being written.

    Args:
        path: of the records; its folder is made.
        settings: what they are made with, as JSON has it.
        resume: go on where a stopped run left off; without one, begin.

    Attributes:
        path: as given.

    Raises:
        ValueError: records that are there and shall not be gone on with; other settings than theirs; a damaged file.
        OSError: a folder that cannot be written to.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], resume: bool) -> None:
        self.path = path
        stated = _beside(path, "settings")
        if not resume and (path.exists() or stated.exists()):
            raise ValueError(
                f"output: expected no generated records in {path}, or to go on with them (--resume), got some"
            )
        if path.exists() and not stated.exists():
            raise ValueError(f"output: expected {stated} beside {path}, which says what it was made with, got none")
        if stated.exists():
            _check_same(stated, json.loads(json.dumps(settings)))
        self._parts: dict[int, set[int]] = {}
        self._complete: set[int] = set()
        self._digests: dict[int, str] = {}
        self._there = list(self._read()) if path.exists() else []
        path.parent.mkdir(parents=True, exist_ok=True)
        if not stated.exists():
            write_json(stated, settings)
        _beside(path, "finished").unlink(missing_ok=True)

    def there(self) -> list[dict[str, Any]]:
        """Return what is known of the records that a run before has written, without their tokens."""
        return self._there

    def has(self, number: int, digest: str) -> bool:
        """Return whether all records of a seed are there.

        Raises:
            ValueError: they are of another seed that had this number.
        """
        if self._digests.get(number, digest) != digest:
            raise ValueError(
                f"data.train: expected the seeds that {self.path} was begun with, got another one in place {number + 1}"
            )
        return number in self._complete

    def append(self, records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Write those records that are not there yet, as one block, and return them.

        Raises:
            OSError: it could not be written.
        """
        new = [record for record in records if record["seed"]["part"] not in self._parts.get(_number(record), ())]
        block = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in new).encode("utf-8", "replace")
        with self.path.open("ab") as file:
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
        for record in new:
            self._note(record)
        return new

    def finish(self, report: Mapping[str, Any], asked: Any = None) -> None:
        """Say that all is written, with a report and what was asked for."""
        write_json(_beside(self.path, "finished"), {"asked": asked, "report": report})

    def _note(self, record: Mapping[str, Any]) -> None:
        seed, number = record["seed"], _number(record)
        self._digests[number] = seed["digest"]
        parts = self._parts.setdefault(number, set())
        parts.add(seed["part"])
        if len(parts) == seed["parts"]:
            self._complete.add(number)

    def _read(self) -> Iterator[dict[str, Any]]:
        with self.path.open("rb+") as file:
            end = 0
            for place, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    file.truncate(end)
                    break
                end += len(line)
                where = f"{self.path}:{place}"
                try:
                    known = _known(parse_json(line, where))
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(
                        f"{where}: expected a generated record, got another line ({error!s:.200}); remove this line "
                        "and those after it to go on from there"
                    ) from error
                self._note(known)
                yield known


def _known(record: Any) -> dict[str, Any]:
    """Return what a run that goes on needs to know of a record."""
    known = {key: record[key] for key in ("seed", "cut", "ended", "learnt")}
    seed, learnt = known["seed"], known["learnt"]
    counts = [*(seed[name] for name in ("number", "part", "parts")), known["cut"], *itertools.chain(*learnt)]
    if not all(type(count) is int and count >= 0 for count in counts) or not 1 <= seed["part"] <= seed["parts"]:
        raise ValueError("expected counts of 0 or more")
    if not isinstance(seed["digest"], str) or not isinstance(known["ended"], str | None):
        raise ValueError("expected text as digest and reason")
    if any(len(span) != 2 or span[0] > span[1] for span in learnt):
        raise ValueError("expected spans [start, end]")
    return known


def finished(path: Path, asked: Any) -> dict[str, Any] | None:
    """Return the report of the run that finished a file, if the very same was asked for; else None.

    Raises:
        ValueError: a damaged report; it is named.
    """
    marker = _beside(path, "finished")
    if not (marker.is_file() and path.is_file()):
        return None
    found = read_json_object(marker)
    report = found.get("report")
    if not isinstance(report, dict) or not isinstance(report.get("records"), int):
        raise ValueError(f"{marker}: expected the report of a finished run, got another file; remove it to go on")
    return report if found.get("asked") == json.loads(json.dumps(asked)) else None


def _number(record: Mapping[str, Any]) -> int:
    number: int = record["seed"]["number"]
    return number


def _check_same(file: Path, settings: Mapping[str, Any]) -> None:
    stated = read_json_object(file)
    for name in sorted({*stated, *settings}):
        before, now = stated.get(name), settings.get(name)
        if before != now:
            raise ValueError(
                f"{name}: expected {before} like the records that are there ({file}), got {now}; use another folder "
                "for other settings"
            )


def asked_of(path: Path) -> dict[str, Any] | None:
    """Return the settings that a finished file of records was asked for with; None where nothing beside it says so.

    What lies beside data of one's own may be anything, and is no reason to refuse that.
    """
    try:
        asked = read_json_object(_beside(path, "finished")).get("asked") if path.is_file() else None
    except (OSError, ValueError):
        return None
    return asked if isinstance(asked, dict) and {"model", "generation", "data"} <= asked.keys() else None


def _beside(path: Path, what: str) -> Path:
    return path.with_name(f"{path.name}.{what}")
