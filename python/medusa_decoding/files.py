"""Files and folders that appear whole or not at all. This module does not know what is in them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any


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
