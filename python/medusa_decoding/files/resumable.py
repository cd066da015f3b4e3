"""A file of JSON lines that takes long to make: a stopped run can continue it, a run with other settings cannot.

`records.jsonl.settings` next to `records.jsonl` says what the lines were made with. Every block of lines is on disk
before the next one is made. If a kill left a half-written last line, the continued run removes it.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from medusa_decoding.files import parse_json, read_json_object, write_json


class ResumableFile:
    """A file of records made with some settings; its folder is made.

    The records depend on `settings` (JSON). `name` is the argument that names the file, for messages. `earlier` has
    what `known` returned of the records of earlier runs: what a continued run needs to know of each. It raises
    `ValueError`, `KeyError` or `TypeError` for anything that is no record.

    Raises:
        ValueError: there are records and `resume` is not set; their settings differ; a damaged file.
        OSError: a folder that cannot be written to.
    """

    def __init__(
        self,
        path: Path,
        settings: Mapping[str, Any],
        resume: bool,
        known: Callable[[Any], Any],
        name: str = "output",
    ) -> None:
        self.path = path
        if not resume:
            check_new(path, name)
        before = stated(path) if _begun(path) else None
        if before is not None:
            _check_same(companion(path, "settings"), before, json.loads(json.dumps(settings)))
        elif _begun(path):
            raise ValueError(f"{name}: {companion(path, 'settings')}, which says what {path} was made with, is missing")
        self.earlier = list(self._read(known)) if path.exists() else []
        path.parent.mkdir(parents=True, exist_ok=True)
        if before is None:
            write_json(companion(path, "settings"), settings)

    def write(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Write records as one block.

        Raises:
            OSError: they could not be written.
        """
        block = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        with self.path.open("ab") as file:
            file.write(block.encode("utf-8", "replace"))
            file.flush()
            os.fsync(file.fileno())

    def _read(self, known: Callable[[Any], Any]) -> Iterator[Any]:
        with self.path.open("rb+") as file:
            end = 0
            for place, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    file.truncate(end)
                    break
                end += len(line)
                where = f"{self.path}:{place}"
                try:
                    found = known(parse_json(line, where))
                except (ValueError, KeyError, TypeError) as error:
                    raise ValueError(
                        f"{where}: expected a record of this run, got another line ({error!s:.200}); remove this line "
                        "and those after it to continue from there"
                    ) from error
                yield found


def check_new(path: Path, name: str = "output") -> None:
    """Raise `ValueError` if a file has records already."""
    if _begun(path):
        raise ValueError(
            f"{name}: expected no records of an earlier run in {path}, got some; continue with them (--resume)"
        )


def stated(path: Path) -> dict[str, Any] | None:
    """Return what a file was made with, or None if nothing says so."""
    settings = companion(path, "settings")
    return read_json_object(settings) if settings.is_file() else None


def remove(path: Path) -> None:
    """Delete a file and its settings, if they exist."""
    for file in (path, companion(path, "settings")):
        file.unlink(missing_ok=True)


def _begun(path: Path) -> bool:
    """Return whether a file, or a part of it by one of several processes, has anything in it."""
    files = [path, *path.parent.glob(f"{glob.escape(path.name)}.part-*")]
    return any(file.is_file() and file.stat().st_size > 0 for file in files if file.suffix != ".settings")


def companion(path: Path, what: str) -> Path:
    """Return the file next to a file of records that says something about it."""
    return path.with_name(f"{path.name}.{what}")


def _check_same(file: Path, stated: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    for name in ("model", *sorted({*stated, *settings})):  # another model changes other settings too
        before, now = stated.get(name), settings.get(name)
        if before != now:
            raise ValueError(
                f"{name}: expected {before} like the records that are there ({file}), got {now}; use another output "
                "for other settings"
            )
