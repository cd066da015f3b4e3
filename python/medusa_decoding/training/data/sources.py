"""Read records from files, folders and the hub, each with the place that it comes from.

Files are .jsonl, .json (a list, or one record per line), .txt (one text per file), all of them also as .gz, and
.parquet.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from medusa_decoding.checks import import_library
from medusa_decoding.training.config import SourceConfig

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet", ".txt", ".txt.gz")
"""Endings of the files that are data, in every command."""
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class BadRecordError(ValueError):
    """A record that is left out; says what is wrong with it."""


def raw_records(source: SourceConfig, partly: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield where each record of a source is, and the record as it was parsed (a `BadRecordError` if it cannot be).

    Files are read as far as records are taken, except lists in .json files, which are read whole. A dataset of the hub
    is downloaded first. With `partly`, for a caller that takes only the first records, it is streamed, unless the hub
    is offline.
    """
    path = Path(os.path.expanduser(source.path))
    if path.is_file():
        yield from _read_file(path)
    elif path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and file.name.endswith(SUFFIXES))
        # Hidden ones are copies that editors keep (.ipynb_checkpoints).
        files = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
        if not files:
            raise ValueError(f"data: {path} has no files that end in {', '.join(SUFFIXES)}")
        for file in files:
            yield from _read_file(file)
    elif path.is_absolute() or source.path.endswith(SUFFIXES) or not HUB_NAME.fullmatch(source.path):
        raise ValueError(f"data: expected a file, a folder or a hub name, got {source.path} (there is no such file)")
    else:
        yield from _from_hub(source, partly)


def _read_file(path: Path) -> Iterator[tuple[str, Any]]:
    readers: dict[str, Callable[[Path], Iterator[tuple[str, Any]]]] = {
        ".jsonl": _json_lines,
        ".json": _json,
        ".parquet": _parquet,
        ".txt": _whole_text,
    }
    suffix = Path(path.name.removesuffix(".gz")).suffix
    if suffix not in readers:
        raise ValueError(f"data: expected a file that ends in {', '.join(SUFFIXES)}, got {path}")
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
    except (RecursionError, ValueError):
        return BadRecordError("not JSON that can be read (nested too deeply, or an integer of too many digits)")


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    with _open(path) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield f"{path}:{number}", _parsed(line)


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    with _open(path) as file:
        is_list = file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
        if is_list:
            file.seek(0)
            whole = _parsed(file.read())
    if not is_list:
        yield from _json_lines(path)
        return
    if isinstance(whole, BadRecordError):
        raise ValueError(f"data: expected a list of records in {path}, got {whole}")
    for number, record in enumerate(whole, start=1):
        yield f"{path}: record {number}", record


def _whole_text(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with _open(path) as file:
            yield str(path), {"text": file.read().decode("utf-8-sig")}
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


def _from_hub(source: SourceConfig, partly: bool) -> Iterator[tuple[str, Any]]:
    datasets = import_library("datasets", f"{source.path}, which is no file and so a hub name")
    options: dict[str, Any] = {"split": source.split, "revision": source.revision}
    if partly and not datasets.config.HF_HUB_OFFLINE:  # offline, there is only what was downloaded
        options["streaming"] = True
    try:
        for number, row in enumerate(datasets.load_dataset(source.path, source.subset, **options), start=1):
            yield f"{source.path} [{source.split}]: row {number}", row
    except (OSError, ValueError) as error:
        raise ValueError(f"data: expected a file, a folder or a hub dataset, got {source.path} ({error})") from error
