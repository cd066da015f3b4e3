"""The paper's heads-only folder: `config.json` beside `medusa_lm_head.safetensors` or `medusa_lm_head.pt`.

Version 1 stores a vocabulary projection a head, version 2 only the residual blocks and shares the base model's lm_head;
which one a file is, its tensors say, as they say what the paper does not have (`_layout`). The config repeats it:
`medusa_storage` ("int8" or "fp8") and `medusa_parent_rank`, where they are not "float" and 0. `base_model_revision`
says which revision of its base model a checkpoint belongs to. This module does not know other formats or how a base
model is loaded.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file

from medusa_decoding.checkpoints._files import StoredTensor, open_tensors, read_json
from medusa_decoding.checkpoints._layout import HeadTensors, check_finite, examine, unpack
from medusa_decoding.heads import MedusaHeads

NAME = "original"
FILES = "medusa_lm_head.safetensors or medusa_lm_head.pt"

_WEIGHTS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
# The paper's trainers save the whole wrapper's state, its loader the bare list of heads.
_PREFIX = "medusa_head."
REVISION = "base_model_revision"


def recognise(folder: Path) -> bool:
    """Return whether the folder holds a heads-only file."""
    return any((folder / name).is_file() for name in _WEIGHTS)


def gather(folder: Path) -> HeadTensors:
    """List the heads' tensors; safetensors first where both files exist, with a note.

    Raises:
        ValueError: a damaged file, or one where only some names have the prefix `medusa_head.`.
    """
    file, *others = (folder / name for name in _WEIGHTS if (folder / name).is_file())
    notes = [f"{other.name}: not read, {file.name} lies beside it" for other in others]
    tensors = open_tensors(file)
    if not any(name.startswith(_PREFIX) for name in tensors):
        return HeadTensors(tensors, notes=notes)
    for name in tensors:
        if not name.startswith(_PREFIX):
            raise ValueError(f"{name} in {file}: expected the prefix {_PREFIX} like the file's other tensors, got none")
    return HeadTensors({name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}, _PREFIX, notes)


def base_model(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return the base model's folder or hub id; a relative folder counts from the heads' folder if it is there."""
    name = config.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        return None
    beside = folder / name
    return str(beside.resolve()) if os.path.isdir(beside) else name  # False also for what can be no path


def write_heads(
    heads: MedusaHeads,
    folder: str | Path,
    *,
    base_model: str | Path,
    base_revision: str | None = None,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Write heads in the paper's layout, completely or not at all.

    A new folder appears under its name when it is complete. In an existing folder both files are written aside and
    renamed over the old ones at the end; other files are left alone.

    Args:
        heads: the heads; the projection is left out (version 2) when it is shared.
        folder: where to write; parents are made.
        base_model: hub id or folder of the base model; a relative folder is read as relative to `folder`.
        base_revision: branch, tag or commit of the base model on the hub that the heads belong to; it is fetched then.
        config: further fields for `config.json`.

    Raises:
        ValueError: NaN or Inf weights, weights of mixed or unsupported dtypes, an empty `base_model`, or a field in
            `config` that contradicts the heads or would mislead other readers (`architectures`); a `folder` whose
            `config.json` is a model's own and would be lost.
        OSError: the files could not be written; what was there before is unchanged.
    """
    folder = Path(folder).resolve()
    _refuse_foreign(folder)
    said = fields(heads, str(base_model), base_revision, config)
    tensors = {name: tensor.contiguous() for name, tensor in unpack(heads).items()}
    stored = {
        name: StoredTensor(
            name, tuple(tensor.shape), tensor.dtype, folder / _WEIGHTS[0], partial(tensors.__getitem__, name)
        )
        for name, tensor in tensors.items()
    }
    for name, *_ in examine(HeadTensors(stored)).expected():
        check_finite(stored[name], tensors[name])

    staging = folder.parent / f".{folder.name}.{secrets.token_hex(4)}.tmp"
    staging.mkdir(parents=True)
    try:
        settings, weights = staging / "config.json", staging / _WEIGHTS[0]
        settings.write_text(json.dumps(said, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, weights, metadata={"format": "pt"})
        # safetensors writes for its owner alone; a checkpoint is as readable as any new file here.
        shutil.copymode(settings, weights)
        for file in (settings, weights):
            with open(file, "rb+") as written:
                os.fsync(written.fileno())
        if folder.is_dir():
            os.replace(weights, folder / weights.name)
            os.replace(settings, folder / settings.name)
        else:
            os.rename(staging, folder)
    except SafetensorError as error:
        raise OSError(f"{folder}: the weights could not be written ({error})") from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _refuse_foreign(folder: Path) -> None:
    file = folder / "config.json"
    if file.is_file():
        old = read_json(file)
        if "medusa_num_heads" not in old or "architectures" in old:
            raise ValueError(
                f"folder: expected a new one or one of heads alone, got {folder} with a model's config.json"
            )


def fields(
    heads: MedusaHeads, base: str, revision: str | None = None, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return what the config says of heads.

    Raises:
        ValueError: see `write_heads`.
    """
    extra = extra or {}
    if not base:
        raise ValueError("base_model: expected a hub id or a folder, got an empty string")
    if "architectures" in extra:
        raise ValueError(
            "config: expected no architectures key (text-generation-inference then ignores the heads), "
            f"got {extra['architectures']!r}"
        )
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
    beyond_the_paper = {"medusa_storage": heads.storage, "medusa_parent_rank": heads.parent_rank}
    for key, value in (found | beyond_the_paper).items():
        if key in extra and extra[key] != value:
            raise ValueError(f"config: expected {key} {value!r} like the heads, got {extra[key]!r}")
    return {**extra, **found, **{key: value for key, value in beyond_the_paper.items() if value not in ("float", 0)}}
