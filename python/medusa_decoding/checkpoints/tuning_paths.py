"""Where tuning files are: next to the heads, or in the user's cache folder.

The cache folder is for heads that are part of an installed package or in a read-only folder. Machines may share a home
folder, so files in the cache have different names per device, dtype and backend.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

FILE = "tuning.json"
PACKAGE = Path(__file__).resolve().parents[1]
logger = logging.getLogger(__name__)


def is_writable(folder: Path) -> bool:
    """Return whether files may be written next to heads: the folder is writable and no part of the package."""
    return folder.is_dir() and not folder.resolve().is_relative_to(PACKAGE) and os.access(folder, os.W_OK | os.X_OK)


def cache_folder(folder: Path) -> Path | None:
    """Return the cache folder for a folder of heads; None if the user has no home folder.

    It is in $XDG_CACHE_HOME, or in ~/.cache if that is not set or not an absolute path.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if not base.is_absolute():
        try:
            base = Path("~/.cache").expanduser()
        except RuntimeError as error:  # no HOME, and a user without an entry
            logger.info("no folder for caches: %s", error)
            return None
    return base / "medusa-kernels" / f"{folder.resolve().name}-{_hash(str(folder.resolve()))}"


def cache_name(runtime: str) -> str:
    """Return the name of a tuning file in the cache folder for conditions without weights (`Conditions.runtime`)."""
    return f"tuning-{_hash(runtime)}.json"


def output_folder(folder: Path) -> Path:
    """Return the folder that `medusa tune` writes to: the folder of the heads if it is writable, else the cache folder.

    Raise `ValueError` if there is no cache folder either.
    """
    found = folder if is_writable(folder) else cache_folder(folder)
    if found is None:
        raise ValueError(
            f"--out is needed, because {folder} is no folder of yours to write into and your home folder is not known"
        )
    return found


def output_file(folder: Path, runtime: str) -> Path:
    """Return the file that `medusa tune` writes; arguments and errors as in `cache_name` and `output_folder`."""
    return output_folder(folder) / (FILE if is_writable(folder) else cache_name(runtime))


def stored_files(folder: Path, runtime: str = "") -> list[Path]:
    """Return the existing tuning files of a folder of heads, first the one that `medusa tune` would write.

    Cached files of other devices, dtypes and backends come last: they do not hold here, but tell what has changed.
    Files that cannot be accessed are left out.
    """
    own, cache = folder / FILE, cache_folder(folder)
    try:
        cached = [] if cache is None else sorted(cache.glob("tuning*.json"))
    except OSError:
        cached = []
    first = [own, (cache or folder) / cache_name(runtime)]
    if not is_writable(folder):
        first.reverse()
    return [file for file in dict.fromkeys([*first, *cached]) if os.path.isfile(file)]


def check_writable(name: str, file: Path) -> None:
    """Raise `ValueError` unless a file can be written; `name` is the argument that names it."""
    folder = file.absolute().parent
    fits = folder.is_dir() and os.access(folder, os.W_OK | os.X_OK) and not file.is_dir()
    if not fits or (file.exists() and not os.access(file, os.W_OK)):
        raise ValueError(f"{name}: expected a file in a folder that exists and may be written to, got {file}")


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
