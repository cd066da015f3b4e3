"""Checkpoints of Medusa heads, read and written in several formats, and the models that they belong to."""

from medusa_decoding.checkpoints.base_model import load_base_model
from medusa_decoding.checkpoints.exporting import Exported, export
from medusa_decoding.checkpoints.original import write_heads
from medusa_decoding.checkpoints.reading import (
    FORMATS,
    HeadsCheckpoint,
    find_base_model,
    find_base_revision,
    read_heads,
)
from medusa_decoding.options import TARGETS

__all__ = [
    "FORMATS",
    "TARGETS",
    "Exported",
    "HeadsCheckpoint",
    "export",
    "find_base_model",
    "find_base_revision",
    "load_base_model",
    "read_heads",
    "write_heads",
]
