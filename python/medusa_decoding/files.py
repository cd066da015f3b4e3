"""Files and folders that appear whole or not at all, and JSON files read within bounds.

This module does not know what is in them.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MAX_JSON = 64 * 2**20
"""Bytes that `read_json` takes unless told otherwise: far more than any file of settings or measurements has."""


@contextlib.contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Give a file to write, which takes its name when the block ends well, and goes when it does not.

    Nobody finds half a file under the name, also where the machine stops or another process writes the same one.

    Raises:
        OSError: it could not be written; what was there before is unchanged.
    """
    path = Path(path)
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        yield scratch
        _on_disk(scratch)
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # the file is there; some file systems know no fsync of a folder
        _on_disk(path.parent)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with whole_file(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def write_json(path: str | Path, values: Any, indent: int | None = 1) -> None:
    """Write a JSON file, whole or not at all."""
    write_text(path, json.dumps(values, indent=indent) + "\n")


def read_json(path: str | Path, limit: int = MAX_JSON) -> Any:
    """Read a JSON file.

    Args:
        path: the file.
        limit: the most bytes that it may have. A larger file is refused before it is read.

    Raises:
        ValueError: a file that is too large or is not JSON (see `parse_json`); the message names the file.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        too_large = os.fstat(file.fileno()).st_size > limit
        content = b"" if too_large else file.read(limit + 1)  # a pipe or a device has no size
    if too_large or len(content) > limit:
        raise ValueError(f"{path}: expected JSON of at most {limit:,} bytes, got a larger file")
    return parse_json(content, path)


def read_json_object(path: str | Path) -> dict[str, Any]:
    """Read a JSON file that holds an object, as `read_json` does; anything else in it is a `ValueError`."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found


def parse_json(text: str | bytes, where: object) -> Any:
    """Parse JSON. NaN and Infinity are numbers here, as they are for Python's own parser.

    Args:
        text: the JSON; bytes are UTF-8, with or without a byte order mark.
        where: the file, line or name that the error message begins with.

    Raises:
        ValueError: text that is not JSON, is not UTF-8, is nested too deeply, or has an integer of more digits than
            Python converts (4,300 unless set otherwise).
    """
    try:
        return json.loads(text.decode("utf-8-sig") if isinstance(text, bytes) else text)
    except UnicodeDecodeError as error:
        reason = f"bytes that are not UTF-8 ({error.reason} at byte {error.start})"
    except json.JSONDecodeError as error:
        reason = f"text that does not parse ({error})"
    except RecursionError:
        reason = "lists or objects that are nested too deeply"
    except ValueError:  # Python bounds the digits, as its conversion takes quadratic time
        reason = "an integer of more digits than Python converts"
    raise ValueError(f"{where}: expected JSON, got {reason}")


@contextlib.contextmanager
def whole_folder(folder: Path, replace: bool = False) -> Iterator[Path]:
    """Give a folder to write into, which gets its name when the block ends well, and goes when it does not.

    Args:
        folder: the name; its parents are made.
        replace: put it in the place of a folder of that name, which is removed then.

    Raises:
        ValueError: there is something of that name and `replace` is not set.
        OSError: the files could not be written; what was there before is unchanged. A Ctrl-C also leaves that, or the
            new folder in its place.
    """
    if folder.exists() and not replace:
        raise ValueError(f"folder: expected a new one, got {folder}")
    mark = secrets.token_hex(4)
    staging, aside = (folder.parent / f".{folder.name}.{mark}.{end}" for end in ("tmp", "old"))
    staging.mkdir(parents=True)
    try:
        yield staging
        for file in staging.iterdir():
            _on_disk(file)
        if folder.exists():
            os.rename(folder, aside)
        os.rename(staging, folder)
    finally:
        # Also behind a Ctrl-C between any two of these lines there is the old folder or the new one.
        if aside.exists():
            if folder.exists():
                shutil.rmtree(aside, ignore_errors=True)
            else:
                os.rename(aside, folder)
        shutil.rmtree(staging, ignore_errors=True)


def _on_disk(path: Path) -> None:
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
