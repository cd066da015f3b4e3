"""Write files and folders whole or not at all, one writer at a time; read JSON and text up to a size."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

MAX_JSON = 64 * 2**20
"""The default limit of `read_json` in bytes: far more than any file of settings or measurements has."""
MAX_TEXT = 16 * 2**20
"""The default limit of `read_text` in bytes: more text than fits into a model's context."""


@contextlib.contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Yield a scratch file that is renamed to `path` when the block succeeds, and deleted when it fails.

    No half-written file ever has the name, even if the machine stops or another process writes the same file.

    Raises:
        ValueError: there is a device, a pipe or a folder of that name.
        OSError: the file could not be written; one that was there before is unchanged.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: expected a new name or that of a file, got a folder, device or pipe")
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        yield scratch
        _on_disk(scratch)
        os.replace(scratch, path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # some file systems have no fsync of folders
        _on_disk(path.parent)


def write_text(path: str | Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with whole_file(path) as scratch:
        scratch.write_text(text, encoding="utf-8")


def write_json(path: str | Path, values: Any, indent: int | None = 1) -> None:
    """Write a JSON file, whole or not at all."""
    write_text(path, json.dumps(values, indent=indent) + "\n")


def read_json(path: str | Path, limit: int = MAX_JSON) -> Any:
    """Read a JSON file of at most `limit` bytes; a larger one is refused before it is read.

    Raises:
        ValueError: a file that is too large or is not JSON (see `parse_json`); the message names the file.
        OSError: the file cannot be read.
    """
    return parse_json(_content(path, limit, "JSON"), path)


def read_text(path: str | Path, limit: int = MAX_TEXT) -> str:
    """Read a text file of at most `limit` bytes, with or without a byte order mark; see `read_json`.

    Raises:
        ValueError: a file that is too large or is not UTF-8; the message names the file.
        OSError: the file cannot be read.
    """
    content = _content(path, limit, "text")
    try:
        return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig").read()  # line ends as `open` reads them
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8 text, got {error.reason} at byte {error.start}") from error


def _content(path: str | Path, limit: int, kind: str) -> bytes:
    with open(path, "rb") as file:
        too_large = os.fstat(file.fileno()).st_size > limit
        content = b"" if too_large else file.read(limit + 1)  # a pipe or a device has no size
    if too_large or len(content) > limit:
        raise ValueError(f"{path}: expected {kind} of at most {limit:,} bytes, got a larger file")
    return content


def read_json_object(path: str | Path, limit: int = MAX_JSON) -> dict[str, Any]:
    """Read a JSON file that holds an object, as `read_json` does; anything else in it is a `ValueError`."""
    found = read_json(path, limit)
    if not isinstance(found, dict):
        raise ValueError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found


def parse_json(text: str | bytes, where: object) -> Any:
    """Parse JSON; bytes are UTF-8, with or without a byte order mark. NaN and Infinity are numbers, as in Python.

    `where` is the file, line or name at the beginning of error messages.

    Raises:
        ValueError: text that is not JSON, is not UTF-8, is nested too deeply, or has an integer of more digits than
            Python converts (4,300 by default).
    """
    try:
        return json.loads(text.decode("utf-8-sig") if isinstance(text, bytes) else text)
    except UnicodeDecodeError as error:
        reason = f"bytes that are not UTF-8 ({error.reason} at byte {error.start})"
    except json.JSONDecodeError as error:
        reason = f"text that does not parse ({error})"
    except RecursionError:
        reason = "lists or objects that are nested too deeply"
    except ValueError:  # Python limits the digits, since converting them takes quadratic time
        reason = "an integer of more digits than Python converts"
    raise ValueError(f"{where}: expected JSON, got {reason}")


_held: ContextVar[frozenset[Path]] = ContextVar("held", default=frozenset())


@contextlib.contextmanager
def only_writer(name: str, path: str | Path, *, inside: bool = False) -> Iterator[None]:
    """Lock a file or folder while the block runs, so that no other process or thread writes there.

    The hidden lock file is removed at the end, and the system frees the lock when the process ends for any reason. A
    thread may take a lock again that it holds.

    Args:
        name: the argument that names the path, for messages.
        path: need not exist; missing parents are created.
        inside: put the lock file into the folder `path`, which is created, instead of next to it. An empty folder that
            was created here is removed at the end.

    Raises:
        ValueError: another process or thread holds it.
        OSError: the lock file could not be written.
    """
    lock = Path(path) / ".lock" if inside else Path(path).parent / f".{Path(path).name}.lock"
    made = not lock.parent.exists()
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock = lock.parent.resolve() / lock.name
    if lock in _held.get():
        yield
        return
    held = FileLock(lock, timeout=0, thread_local=False)
    try:
        held.acquire()
    except Timeout:
        raise ValueError(
            f"{name}: another process writes to {path} (it holds {lock}); wait for it, or name another place"
        ) from None
    token = _held.set(_held.get() | {lock})
    try:
        yield
    finally:
        _held.reset(token)
        lock.unlink(missing_ok=True)  # still held
        held.release()
        if made:
            with contextlib.suppress(OSError):  # not empty
                lock.parent.rmdir()


def append_line(path: str | Path, values: Any) -> None:
    """Append a line of JSON to a file in one write, so that lines of several processes do not mix.

    Raises:
        OSError: the file could not be written, or only a part of the line (the disk is full).
    """
    line = (json.dumps(values) + "\n").encode()
    with open(path, "ab", buffering=0) as file:
        if file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


@contextlib.contextmanager
def whole_folder(folder: Path, replace: bool = False) -> Iterator[Path]:
    """Yield a scratch folder that is renamed to `folder` when the block succeeds, and deleted when it fails.

    Parents are created. With `replace`, a folder of that name is deleted.

    Raises:
        ValueError: the name exists and `replace` is not set, or another process writes it.
        OSError: the files could not be written; a folder that was there before is unchanged. After Ctrl-C there is
            either that folder or the new one.
    """
    with only_writer("folder", folder):
        if folder.exists() and not replace:
            raise ValueError(f"folder: expected a new one, got {folder}")
        mark = secrets.token_hex(4)
        staging, aside = (folder.parent / f".{folder.name}.{mark}.{end}" for end in ("tmp", "old"))
        staging.mkdir(parents=True)
        try:
            yield staging
            for file in staging.rglob("*"):
                _on_disk(file)
            if folder.exists():
                os.rename(folder, aside)
            os.rename(staging, folder)
        finally:
            # After Ctrl-C between any two of these lines there is still the old folder or the new one.
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
