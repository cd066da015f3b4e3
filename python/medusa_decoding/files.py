"""Write files and folders whole or not at all, one writer at a time; read JSON and text up to a size."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import logging
import os
import secrets
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)
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
_NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


@contextlib.contextmanager
def only_writer(name: str, path: str | Path, *, inside: bool = False) -> Iterator[None]:
    """Lock a file or folder while the block runs, so that no other process or thread writes there.

    A hidden lock file tells who holds the lock, and is removed at the end. The system frees the lock when the process
    ends for any reason. The same thread may take a lock again that it holds. If the file system has no locks, a warning
    says so and the block runs.

    `name` is the argument that names the path, for messages. The file or folder need not exist; missing parents are
    created. With `inside`, the lock file is in the folder `path`, which is created, instead of next to it. An empty
    folder that was created here is removed at the end.

    Raises:
        ValueError: another process or thread holds it. The message tells its id, host, command and start time.
        OSError: the lock file could not be written.
    """
    lock = Path(path) / ".lock" if inside else Path(path).parent / f".{Path(path).name}.lock"
    made = not lock.parent.exists()
    lock.parent.mkdir(parents=True, exist_ok=True)
    lock = lock.parent.resolve() / lock.name
    if lock in _held.get():
        yield
        return
    number = _locked(lock, f"{name}: expected a place that nobody else writes to, got {path}")
    token = _held.set(_held.get() | {lock})
    try:
        os.ftruncate(number, 0)
        command = " ".join(shlex.join(sys.orig_argv).split())[:300]
        since = time.strftime("%Y-%m-%d %H:%M:%S %z")
        statement = f"process {os.getpid()} on {socket.gethostname()} ({command}, since {since})\n"
        os.pwrite(number, statement.encode("utf-8", "replace"), 0)
        yield
    finally:
        _held.reset(token)
        if _is_file_at(number, lock):
            lock.unlink(missing_ok=True)  # still held: nobody else can have taken it
        os.close(number)
        if made:
            with contextlib.suppress(OSError):  # not empty
                lock.parent.rmdir()


def _locked(lock: Path, refusal: str) -> int:
    """Open and lock a lock file; return its descriptor."""
    while True:
        try:
            number = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except PermissionError as error:
            if not lock.exists():
                raise
            raise ValueError(f"{refusal} with the {lock} of another user; remove it if nobody writes there") from error
        try:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_file_at(number, lock):
                return number
        except BlockingIOError:
            holder = _statement_in(number)
            if _is_file_at(number, lock):
                os.close(number)
                raise ValueError(f"{refusal}, which {holder} holds; wait for it, or name another place") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(number)
                raise
            logger.warning(
                "%s: this file system has no locks (%s): make sure that nobody else writes there", lock.parent, error
            )
            return number
        os.close(number)  # the holder has removed the file since it was opened


def _is_file_at(number: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(number), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _statement_in(number: int) -> str:
    """Return who holds a lock file. Holders write their statement shortly after they lock the file."""
    for _ in range(50):
        statement = os.pread(number, 4096, 0).decode("utf-8", "replace")
        if statement.endswith("\n"):
            return " ".join(statement.split())
        time.sleep(0.02)
    return "another process (which has not stated its id)"


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
            for file in staging.iterdir():
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
