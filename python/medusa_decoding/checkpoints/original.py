"""The paper's heads-only folder: `config.json` next to `medusa_lm_head.safetensors` or `medusa_lm_head.pt`.

Version 1 stores one vocabulary projection per head, version 2 shares the base model's lm_head: the tensors tell which.
The config repeats what this package adds: `medusa_storage`, `medusa_parent_rank`, `medusa_root_rank`,
`medusa_feature_layers` and `base_model_revision`.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from medusa_decoding.checkpoints.layout import HeadTensors, check_finite, examine, unpack
from medusa_decoding.checkpoints.tensor_files import StoredTensor, open_tensors, save_tensors
from medusa_decoding.files import read_json_object, whole_file, whole_folder, write_json
from medusa_decoding.heads import MedusaHeads

NAME = "original"
FILES = "medusa_lm_head.safetensors or medusa_lm_head.pt"

WEIGHTS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
# The paper's trainers save the state of the whole wrapper; its loader expects the bare list of heads.
_PREFIX = "medusa_head."
REVISION = "base_model_revision"


def recognise(folder: Path) -> bool:
    """Return whether the folder holds a heads-only file."""
    return any((folder / name).is_file() for name in WEIGHTS)


def gather(folder: Path) -> HeadTensors:
    """List the heads' tensors. If both files exist, the safetensors file is read, and a note says so.

    A damaged file, or one in which only some names have the prefix `medusa_head.`, is a `ValueError`.
    """
    file, *others = (folder / name for name in WEIGHTS if (folder / name).is_file())
    notes = [f"{other.name}: not read, {file.name} lies beside it" for other in others]
    tensors = open_tensors(file)
    if not any(name.startswith(_PREFIX) for name in tensors):
        return HeadTensors(tensors, notes=notes)
    for name in tensors:
        if not name.startswith(_PREFIX):
            raise ValueError(f"{name} in {file}: the prefix {_PREFIX} is missing, which the file's other tensors have")
    return HeadTensors({name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}, _PREFIX, notes)


def base_model(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the base model's folder or hub id; a folder relative to the heads' folder is found there."""
    name = config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        return None
    beside = folder / name
    return str(beside.resolve()) if os.path.exists(beside) else name  # False also for an invalid path


def write_heads(
    heads: MedusaHeads,
    folder: str | Path,
    *,
    base_model: str | Path,
    base_revision: str | None = None,
) -> None:
    """Write heads in the paper's layout, completely or not at all.

    A new folder appears under its name when it is complete. In an existing folder both files are first written
    elsewhere, then renamed over the old ones; other files stay.

    Args:
        heads: the heads; the projection is left out (version 2) when it is shared.
        folder: where to write; parents are made.
        base_model: hub id or folder of the base model; a relative folder is read as relative to `folder`.
        base_revision: branch, tag or commit of the base model on the hub that the heads belong to.

    Raises:
        ValueError: NaN or Inf weights, weights of mixed or unsupported dtypes, an empty `base_model`; a `folder` whose
            `config.json` is a model's own and would be lost.
        OSError: the files could not be written; what was there before is unchanged.
    """
    folder = Path(folder).resolve()
    config_file, weights_file = folder / "config.json", folder / WEIGHTS[0]
    old = read_json_object(config_file) if config_file.is_file() else None
    if old is not None and ("medusa_num_heads" not in old or "architectures" in old):
        raise ValueError(f"folder: expected a new one or one of heads alone, got {folder} with a model's config.json")
    stated = fields(heads, str(base_model), base_revision)
    tensors = unpack(heads)
    stored = {name: StoredTensor.from_tensor(name, tensor, weights_file) for name, tensor in tensors.items()}
    for name, *_ in examine(HeadTensors(stored)).expected():
        check_finite(stored[name], tensors[name])
    with contextlib.ExitStack() as stack:
        if folder.is_dir():  # exits run in reverse order: the config is replaced after the weights
            settings, weights = (stack.enter_context(whole_file(file)) for file in (config_file, weights_file))
        else:
            staging = stack.enter_context(whole_folder(folder))
            settings, weights = staging / config_file.name, staging / weights_file.name
        save_tensors(tensors, weights)
        write_json(settings, stated, indent=2)


def fields(heads: MedusaHeads, base: str, revision: str | None = None) -> dict[str, Any]:
    """Return the config of heads; an empty `base` is a `ValueError`.

    It has no `architectures`, with which text-generation-inference ignores the heads.
    """
    if not base:
        raise ValueError("base_model: expected a hub id or a folder, got an empty string")
    found: dict[str, Any] = {
        "base_model_name_or_path": base,
        "medusa_num_heads": heads.num_heads,
        "medusa_num_layers": heads.num_layers,
        "hidden_size": heads.hidden_size,
        "vocab_size": heads.vocab_size,
    }
    if heads.shared_projection:
        found["version"] = "2"
    if revision is not None:
        found[REVISION] = revision
    additions = {
        "medusa_storage": heads.storage,
        "medusa_parent_rank": heads.parent_rank,
        "medusa_root_rank": heads.root_rank,
        "medusa_feature_layers": heads.feature_layers,
    }
    return found | {key: value for key, value in additions.items() if value not in ("float", 0, ())}
