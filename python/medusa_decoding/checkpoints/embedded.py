"""Full Medusa-2 models: the base model's weights with the heads among them as `medusa_head.{h}...`.

Only the heads' tensors are read. This module does not know the base model, which `base.load_base_model` loads from the
same folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medusa_decoding.checkpoints._files import StoredTensor, open_sharded, open_tensors
from medusa_decoding.checkpoints._layout import HeadTensors

NAME = "embedded"
FILES = "model.safetensors or pytorch_model.bin, whole or sharded, with medusa_head.* tensors in it"

# In the order in which transformers looks for them.
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
PREFIX = "medusa_head."


def recognise(folder: Path) -> bool:
    """Return whether the folder holds a full model with heads in it."""
    return bool(_tensors(folder))


def gather(folder: Path) -> HeadTensors:
    """List the heads' tensors.

    Raises:
        ValueError: a damaged file or index.
    """
    return HeadTensors({name.removeprefix(PREFIX): tensor for name, tensor in _tensors(folder).items()}, PREFIX)


def base_model(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the folder itself: Medusa-2 trains the base model together with its heads."""
    return str(folder)


def _tensors(folder: Path) -> dict[str, StoredTensor]:
    for name in _WEIGHTS:
        file = folder / name
        if file.is_file():
            if name.endswith(".json"):
                return open_sharded(file, PREFIX)
            return {key: tensor for key, tensor in open_tensors(file).items() if key.startswith(PREFIX)}
    return {}
