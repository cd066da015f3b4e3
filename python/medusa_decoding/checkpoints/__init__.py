"""Checkpoints of Medusa heads, read and written in several formats, and the models that they belong to."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from medusa_decoding.options import TARGETS

if TYPE_CHECKING:
    from medusa_decoding.checkpoints.base_model import load_base_model
    from medusa_decoding.checkpoints.exporting import Exported, export, export_plain
    from medusa_decoding.checkpoints.original import write_heads
    from medusa_decoding.checkpoints.reading import FORMATS, HeadsCheckpoint, read_heads

__all__ = [
    "FORMATS",
    "TARGETS",
    "Exported",
    "HeadsCheckpoint",
    "export",
    "export_plain",
    "load_base_model",
    "read_heads",
    "write_heads",
]

_MODULES = {
    "load_base_model": "base_model", "Exported": "exporting", "export": "exporting", "export_plain": "exporting",
    "write_heads": "original", "FORMATS": "reading", "HeadsCheckpoint": "reading", "read_heads": "reading",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    # Imported at first use: what needs only a name or a path of this package does not wait for transformers.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
