"""Where files about a checkpoint of heads stand: beside the heads, or in the user's folder for caches.

In the latter for heads that are part of an installed package, which are nobody's to write into and would go into the
next wheel, and for those in a folder that may not be written to. There, files of different devices, dtypes and backends
stand side by side, as machines may share a home folder. This module does not know what the files say.
"""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

FILE = "tuning.json"
PACKAGE = Path(__file__).resolve().parents[1]
logger = logging.getLogger(__name__)


def is_users(folder: Path) -> bool:
    """Return whether a folder of heads is there to write into: no part of the package, and writable."""
    shipped = folder.resolve().is_relative_to(PACKAGE)
    return folder.is_dir() and not shipped and os.access(folder, os.W_OK | os.X_OK)


def cache_of(folder: Path) -> Path | None:
    """Return where the user's folder for caches has the files of a checkpoint's folder; None where it is not known.

    That is in $XDG_CACHE_HOME, or ~/.cache without it (or where it is no absolute path).
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if not base.is_absolute():
        try:
            base = Path("~/.cache").expanduser()
        except RuntimeError as error:  # no HOME, and a user without an entry
            logger.info("no folder for caches: %s", error)
            return None
    digest = hashlib.blake2b(str(folder.resolve()).encode(), digest_size=8).hexdigest()
    return base / "medusa-kernels" / f"{folder.resolve().name}-{digest}"


def cached_name(here: str) -> str:
    """Return what `medusa tune` calls its file in the folder for caches.

    Args:
        here: what step times depend on besides weights: device, dtype, backend.
    """
    return f"tuning-{hashlib.blake2b(here.encode(), digest_size=8).hexdigest()}.json"


def folder_of(folder: Path) -> Path:
    """Return where `medusa tune` stores: the folder of the heads, where that is a place to write into, or the cache.

    Raises:
        ValueError: neither.
    """
    found = folder if is_users(folder) else cache_of(folder)
    if found is None:
        raise ValueError(
            f"--out: expected a file, because {folder} is no folder of yours to write into and your home folder is not "
            "known, got none"
        )
    return found


def place_of(folder: Path, here: str) -> Path:
    """Return the file in which `medusa tune` stores; `here` as in `cached_name`.

    Raises:
        ValueError: no place for it.
    """
    return folder_of(folder) / (FILE if is_users(folder) else cached_name(here))


def places(folder: Path, here: str) -> list[Path]:
    """Return the files that `medusa tune` may have stored and that are there, the one that it would write first.

    Behind the one beside the heads and the cached one come cached ones of other devices, dtypes or backends, which hold
    nowhere here but tell what has changed. What cannot be looked at is as if it were not there.
    """
    own, cache = folder / FILE, cache_of(folder)
    there = [] if cache is None else _files(cache)
    exact = [file for file in there if file.name == cached_name(here)]
    beside = [own] if _is_there(own) else []
    first = [*beside, *exact] if is_users(folder) else [*exact, *beside]
    return first + [file for file in there if file not in exact]


def expanded(path: str | Path) -> Path:
    """Return a path with a home folder in place of `~`, as the shell does not write behind `=`."""
    return Path(os.path.expanduser(path))


def check_place(name: str, file: Path) -> None:
    """Raise `ValueError` unless a file can be written there; `name` is the argument that says where."""
    place = file.absolute().parent
    fits = place.is_dir() and os.access(place, os.W_OK | os.X_OK) and not file.is_dir()
    if not fits or (file.exists() and not os.access(file, os.W_OK)):
        raise ValueError(f"{name}: expected a file in a folder that exists and may be written to, got {file}")


def _is_there(file: Path) -> bool:
    try:
        return file.is_file()
    except OSError as error:
        logger.info("%s cannot be looked at: %s", file, error)
        return False


def _files(cache: Path) -> list[Path]:
    try:
        return sorted(file for file in cache.iterdir() if file.name.startswith("tuning") and file.suffix == ".json")
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        logger.info("%s cannot be looked at: %s", cache, error)
    return []
