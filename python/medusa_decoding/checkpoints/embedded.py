"""Full Medusa-2 models: the base model's weights with the heads among them as `medusa_head.{h}...`.

Only the heads' tensors are read. To write such a model, the base model's files are copied unchanged and the heads
become one more shard. `load_base_model` loads the base model from the same folder.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from medusa_decoding.checkpoints.layout import HeadTensors
from medusa_decoding.checkpoints.tensor_files import (
    MODEL_WEIGHTS,
    model_tensors,
    open_tensors,
    own_file,
    read_index,
    save_tensors,
)
from medusa_decoding.files import read_json_object, write_json

NAME = "embedded"
FILES = "model.safetensors or pytorch_model.bin, whole or sharded, with medusa_head.* tensors in it"

PREFIX = "medusa_head."
SHARD = "model-medusa-heads.safetensors"
MEASURED_FILES = (
    "medusa_tree.json", "medusa_tree_sampling.json", "measured.json", "calibration.json", "tuning.json",
)  # fmt: skip
"""Files with what was measured with heads, or chosen for them."""
# Settings, tokenizer, chat template and terms of use; never code.
_OTHER_FILES = ("*.json", "*.txt", "*.model", "*.jinja", "LICENSE*", "NOTICE*", "USE_POLICY*")


def recognise(folder: Path) -> bool:
    """Return whether the folder holds a full model with heads in it."""
    return bool(model_tensors(folder, PREFIX))


def gather(folder: Path) -> HeadTensors:
    """List the heads' tensors; a damaged file or index is a `ValueError`."""
    tensors = model_tensors(folder, PREFIX)
    return HeadTensors({name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}, PREFIX)


def base_model(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the folder itself: Medusa-2 trains the base model together with its heads."""
    return str(folder)


def base_files(base: Path) -> list[Path]:
    """Return the weight files of a base model that heads can be put into.

    An adapter, also one next to a model, which transformers loads with it, is a `ValueError`.
    """
    single, index = base / MODEL_WEIGHTS[0], base / MODEL_WEIGHTS[1]
    adapted = (base / "adapter_config.json").is_file()
    if adapted or not (single.is_file() or index.is_file()):
        kind = "an adapter (merge it first)" if adapted else "none there"
        raise ValueError(f"base_model: expected a model's safetensors files for {NAME}, got {kind} in {base}")
    if not (base / "config.json").is_file():
        raise ValueError(f"base_model: {base} has no config.json, which {NAME} needs")
    if single.is_file():
        return [own_file(single)]
    shards = sorted(set(read_index(index).values()))
    if not shards:
        raise ValueError(f"{index}: expected a weight_map with tensors in it, got an empty one")
    return [own_file(base / shard) for shard in shards]


def write(staging: Path, base: Path, tensors: Mapping[str, torch.Tensor], fields: Mapping[str, Any]) -> None:
    """Write a base model, without its own heads and what was measured with them, with these heads into a folder.

    `tensors` are the heads' under the paper's names, `fields` theirs in the config. Errors as in `base_files`.
    """
    files = base_files(base)
    for pattern in _OTHER_FILES:
        for file in base.glob(pattern):
            if file.is_file() and file.name not in (*MODEL_WEIGHTS, "config.json", *MEASURED_FILES):
                shutil.copyfile(own_file(file), staging / file.name)
    old = read_json_object(own_file(base / "config.json"))
    kept = {key: value for key, value in old.items() if not key.startswith("medusa_") and key != "version"}
    write_json(staging / "config.json", kept | dict(fields), indent=2)
    weight_map: dict[str, str] = {}
    size = 0
    for number, file in enumerate(files, start=1):
        # transformers would read a file model.safetensors alone.
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        stored = open_tensors(file)
        own = {key: tensor for key, tensor in stored.items() if not key.startswith(PREFIX)}
        if len(own) == len(stored):
            shutil.copyfile(file, staging / name)
        elif own:
            save_tensors({key: tensor.load() for key, tensor in own.items()}, staging / name)
        weight_map |= dict.fromkeys(own, name)
        size += file.stat().st_size
    save_tensors({PREFIX + key: tensor for key, tensor in tensors.items()}, staging / SHARD)
    weight_map |= dict.fromkeys((PREFIX + key for key in tensors), SHARD)
    total = {"total_size": size + (staging / SHARD).stat().st_size}
    write_json(staging / MODEL_WEIGHTS[1], {"metadata": total, "weight_map": weight_map}, indent=2)
