"""Recognise the format of a heads checkpoint and read it with every check.

There is one module per format. A format lists its tensors under the paper's names; checks and packing are shared. The
sizes are those of the tensors, whatever the config says.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from huggingface_hub import snapshot_download

from medusa_decoding.checkpoints import embedded, original, vllm
from medusa_decoding.checkpoints.config_checks import check_revision
from medusa_decoding.checkpoints.layout import DTYPES, Layout, check_base, examine, pack
from medusa_decoding.checkpoints.original import REVISION
from medusa_decoding.checkpoints.pretrained import stated_sizes
from medusa_decoding.files import read_json_object
from medusa_decoding.gguf_files import check_gguf, find_gguf
from medusa_decoding.heads import MedusaHeads

_log = logging.getLogger(__name__)


FORMATS: tuple[ModuleType, ...] = (original, embedded, vllm)
"""Modules of the known formats. If several recognise a folder, the first one reads it and a note says so.

Each has its NAME, FILES that it is recognised by (in words), `recognise(folder)`, `gather(folder)`, which lists the
heads' tensors under the paper's names, and `base_model(folder, config)`.
"""

# Weights and small files, including those of a base model in the same repository.
HUB_FILES = [
    "*.json", "model*.safetensors", "adapter_model.safetensors", "medusa_lm_head.*", "tokenizer.model", "*.jinja",
    "*.txt",
]  # fmt: skip
_WEIGHTS = ("model*.safetensors", "adapter_model.safetensors", "medusa_lm_head.*", "*.gguf")
_OLDER_WEIGHTS = "pytorch_model*.bin"
HUB_ARGUMENTS = ("token", "cache_dir", "local_files_only")
"""Those of transformers' `from_pretrained` that every fetch from the hub needs."""


@dataclass(frozen=True)
class HeadsCheckpoint:
    """Heads and what their checkpoint says about them.

    Attributes:
        heads: in eval mode, without gradients.
        base_model: folder or hub id of the base model; None if the checkpoint does not name one.
        format: name of the format, an entry's NAME in `FORMATS`.
        path: the folder that was read.
        config: content of its `config.json`; empty without one.
        notes: what a user should know, such as files that were not read.
        base_revision: branch, tag or commit of the base model on the hub that the heads belong to; None if the
            checkpoint does not name one.
    """

    heads: MedusaHeads
    base_model: str | None
    format: str
    path: Path
    config: dict[str, Any]
    notes: list[str]
    base_revision: str | None = None


def read_heads(
    path_or_hub_id: str | Path,
    *,
    hidden_size: int | None = None,
    vocab_size: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    revision: str | None = None,
) -> HeadsCheckpoint:
    """Read Medusa heads from a folder or a hub repository in any known format; log the result's notes as warnings.

    Args:
        path_or_hub_id: a folder, or else a repository on the Hugging Face hub.
        hidden_size: the base model's hidden size H, to check against.
        vocab_size: the base model's vocabulary size V, to check against. By default the tensors tell it if a projection
            or a parents' term has V rows, otherwise the config does, or else the base model's config.
        dtype: float16, bfloat16 or float32; None keeps the file's. Projections in 8 bits stay as they are.
        device: where the heads go.
        revision: branch, tag or commit of a hub repository; unused for a folder.

    Raises:
        ValueError: an unknown or damaged checkpoint; a missing, extra or misshapen tensor; mixed dtypes; NaN or Inf;
            sizes other than the base model's. The message names the tensor or file. Names, shapes and sizes are checked
            before memory is taken.
        OSError: a file cannot be read.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype: expected float16, bfloat16, float32 or None, got {dtype}")
    folder = fetch_folder(path_or_hub_id, revision)
    module, config, notes = _recognise(folder)
    found = module.gather(folder)
    layout = examine(found)
    check_base(found, layout, hidden_size, vocab_size)
    base = module.base_model(folder, config)
    if vocab_size is None:
        vocab_size = _vocab_size(layout, config, base, folder)
    heads = pack(found, layout, vocab_size, dtype, device)
    notes += found.notes
    for note in notes:
        _log.warning("%s: %s", folder, note)
    return HeadsCheckpoint(heads, base, module.NAME, folder, config, notes, _revision(module, config))


def stated_base_model(folder: Path) -> tuple[str | None, str | None]:
    """Return the folder or hub id of a checkpoint's base model, and its revision, if the checkpoint names them.

    A model without heads is its own base model.
    """
    if is_plain(folder):
        return str(folder), None
    module, config, _ = _recognise(folder)
    return module.base_model(folder, config), _revision(module, config)


def is_plain(folder: Path, gguf_file: str | None = None) -> bool:
    """Return whether a folder holds a model without heads: a config that names a model and no heads, or a GGUF file.

    `folder` may be a GGUF file; `gguf_file` names one in the folder.
    """
    config_file = folder / "config.json"
    if any(module.recognise(folder) for module in FORMATS):
        return False
    if gguf_file is not None and (folder / gguf_file).is_file():
        return True
    if not config_file.is_file():
        return find_gguf(folder) is not None
    config = read_json_object(config_file)
    return config.get("model_type") not in (None, "", "medusa") and not any(key.startswith("medusa_") for key in config)


def without_heads(folder: Path) -> str:
    """Return a sentence about a model without heads: what it is, and how to train some."""
    return f"{folder} is a model without Medusa heads (`medusa train --init {folder} DATA` begins to train some)"


def _revision(module: ModuleType, config: Mapping[str, Any]) -> str | None:
    revision = config.get(REVISION)
    return revision if isinstance(revision, str) and revision and module is not embedded else None


def fetch_folder(
    path_or_hub_id: str | Path,
    revision: str | None,
    name: str = "path_or_hub_id",
    files: list[str] = HUB_FILES,
    **hub: Any,
) -> Path:
    """Return the folder of a checkpoint; of one on the hub, the files that match the patterns are fetched.

    Weights in `pytorch_model*.bin` are fetched from repositories that have no others. `hub` are `HUB_ARGUMENTS`.

    A GGUF file is returned itself, also that of an installed package. Any other name that is neither a folder nor a
    repository within reach is a `ValueError`.
    """
    if not isinstance(path_or_hub_id, (str, Path)):
        got = type(path_or_hub_id).__name__
        remedy = " (write_heads writes heads that are in memory)" if isinstance(path_or_hub_id, MedusaHeads) else ""
        raise ValueError(f"{name}: expected a folder or hub id, got {got}{remedy}")
    path = Path(path_or_hub_id).expanduser()
    if path.is_dir():
        return path.resolve()
    file = find_gguf(path_or_hub_id)
    if file is not None:
        check_gguf(file)
        return file.resolve()
    if path.exists():
        raise ValueError(f"{name}: expected a checkpoint's folder or a hub id, got the file {path}")
    if isinstance(path_or_hub_id, Path):
        raise ValueError(f"{name}: expected an existing folder, got {path}")
    check_revision(revision)
    try:
        for wanted in (files, [*files, _OLDER_WEIGHTS]):
            folder = Path(
                snapshot_download(
                    path_or_hub_id, revision=revision, allow_patterns=wanted, ignore_patterns="*/*", **hub
                )
            )
            if any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
                break
        return folder
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name}: expected an existing folder or a hub repository within reach, got {path_or_hub_id!r} "
            f"({type(error).__name__}: {error})"
        ) from error


def _recognise(folder: Path) -> tuple[ModuleType, dict[str, Any], list[str]]:
    fitting = [module for module in FORMATS if module.recognise(folder)]
    if not fitting and is_plain(folder):
        raise ValueError(f"expected a checkpoint of Medusa heads, but {without_heads(folder)}")
    if not fitting:
        found = ", ".join(sorted(entry.name for entry in folder.iterdir())) or "nothing"
        known = "; ".join(f"{module.NAME} ({module.FILES})" for module in FORMATS)
        raise ValueError(
            f"{folder}: expected a checkpoint of Medusa heads, one of: {known}; got a folder with: {found}"
        )
    notes = [f"also recognised as {other.NAME}; read as {fitting[0].NAME}" for other in fitting[1:]]
    config_file = folder / "config.json"
    if not config_file.is_file():
        return fitting[0], {}, [*notes, "config.json: none in the folder; the base model is unknown"]
    return fitting[0], read_json_object(config_file), notes


def _vocab_size(layout: Layout, config: Mapping[str, Any], base: str | None, folder: Path) -> int:
    if layout.vocab_size is not None:
        return layout.vocab_size
    size = config.get("vocab_size")
    if type(size) is int and 0 < size < 2**31:  # True is an int, too
        return size
    size = None if base is None else stated_sizes(base, _revision(original, config)).get("vocab_size")
    if size is None:
        raise ValueError(
            f"vocab_size: expected the base model's, because neither the tensors, nor config.json in {folder}, nor the "
            f"config of the base model {base!r} say it, got None"
        )
    return size
