"""Where the file of `medusa tune` stands: beside the heads, or in the user's folder for caches.

In the latter for heads that are part of an installed package, which are nobody's to write into and would go into the
next wheel, and for those in a folder that may not be written to. This module does not know what the file says.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

FILE = "tuning.json"
PACKAGE = Path(__file__).resolve().parents[1]


def cached(folder: Path) -> Path:
    """Return where the user's folder for caches has the file of a checkpoint's folder.

    That is $XDG_CACHE_HOME, or ~/.cache without it (or where it is no absolute path).
    """
    base = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if not base.is_absolute():
        base = Path("~/.cache").expanduser()
    digest = hashlib.blake2b(str(folder.resolve()).encode(), digest_size=8).hexdigest()
    return base / "medusa-kernels" / f"{folder.resolve().name}-{digest}" / FILE


def place_of(folder: Path) -> Path:
    """Return where `medusa tune` stores its file: beside the heads, where that is a place to write into."""
    shipped = folder.resolve().is_relative_to(PACKAGE)
    return cached(folder) if shipped or not os.access(folder, os.W_OK) else folder / FILE


def places(folder: Path) -> list[Path]:
    """Return where the file of a checkpoint's folder may be; the place that `medusa tune` would store it in first."""
    return sorted((folder / FILE, cached(folder)), key=lambda file: file != place_of(folder))
