"""Checkpoints of Medusa heads: recognise the format, read it with every check, write the paper's layout, and others.

One module a format. A format lists its tensors under the paper's names; the checks and the packing are shared. The
tensors are believed, a config that contradicts them is reported. This package does not know trees or the decode loop.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from huggingface_hub import snapshot_download

from medusa_decoding.checkpoints import _export, embedded, original, vllm
from medusa_decoding.checkpoints._export import TARGETS, Exported, Target
from medusa_decoding.checkpoints._files import read_json
from medusa_decoding.checkpoints._layout import (
    DTYPES,
    HeadTensors,
    Layout,
    check_base,
    disagreements,
    examine,
    pack,
)
from medusa_decoding.checkpoints._places import TOKENIZER, foreign
from medusa_decoding.checkpoints._stated import check_revision
from medusa_decoding.checkpoints.base import (
    folder_of,
    load_base_model,
    revision_of,
    stated_sizes,
    stated_vocab_size,
)
from medusa_decoding.checkpoints.original import REVISION, write_heads
from medusa_decoding.heads import MedusaHeads, Storage

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

_log = logging.getLogger(__name__)


class Format(Protocol):
    """What a format's module provides.

    Attributes:
        NAME: the format's name.
        FILES: the files that it is recognised by, in words.
    """

    NAME: str
    FILES: str

    def recognise(self, folder: Path) -> bool:
        """Return whether the folder holds this format."""
        ...

    def gather(self, folder: Path) -> HeadTensors:
        """List the heads' tensors under the paper's names."""
        ...

    def base_model(self, folder: Path, config: Mapping[str, Any]) -> str | None:
        """Return the base model's folder or hub id, if the checkpoint says."""
        ...


FORMATS: tuple[Format, ...] = (original, embedded, vllm)
"""Known formats; where several recognise a folder, the first reads it and a note says so."""

# Weights and small files, among them those a base model in the same repository needs.
_HUB_FILES = ["*.json", "*.safetensors", "medusa_lm_head.pt", "pytorch_model*.bin", "tokenizer.model"]
_BASE_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "LICENSE*", "NOTICE*", "USE_POLICY*"]
_OLDER_WEIGHTS = ["pytorch_model*.bin"]
_HUB_IGNORED = ["*/*"]


@dataclass(frozen=True)
class HeadsCheckpoint:
    """Heads and what their checkpoint says about them.

    Attributes:
        heads: in eval mode, without gradients.
        base_model: folder or hub id of the base model; None when the checkpoint does not say.
        format: name of the format, an entry's NAME in `FORMATS`.
        path: the folder that was read.
        config: content of its `config.json`, as it stands; empty without one.
        notes: what a user should know: contradictions between config and tensors, files passed over.
        base_revision: branch, tag or commit of the base model on the hub that the heads belong to; None when the
            checkpoint does not say.
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
    """Read Medusa heads from a folder or a hub repository in any known format.

    Args:
        path_or_hub_id: a folder, or else a repository on the Hugging Face hub.
        hidden_size: the base model's hidden size H, to check against.
        vocab_size: the base model's vocabulary size V, to check against. For heads with a
            shared projection or a token_map, and without a parents' term, the tensors do not say it; the default is
            then the config's, or else the base model's config's.
        dtype: float16, bfloat16 or float32; None keeps the file's. Projections in 8 bits stay as they are.
        device: where the heads go.
        revision: branch, tag or commit of a hub repository; unused for a folder.

    Returns:
        The heads and what the checkpoint says about them. Its notes are also logged as warnings.

    Raises:
        ValueError: an unknown or damaged checkpoint; a missing, extra or misshapen tensor; mixed dtypes; NaN or Inf;
            sizes other than the base model's. The message names the tensor or file, what was expected and what came.
            Names, shapes and sizes are checked before memory is taken.
        OSError: a file cannot be read.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype: expected float16, bfloat16, float32 or None, got {dtype}")
    folder = _folder(path_or_hub_id, revision)
    module, config, notes = _recognise(folder)
    found = module.gather(folder)
    layout = examine(found)
    check_base(found, layout, hidden_size, vocab_size)
    base = module.base_model(folder, config)
    if vocab_size is None:
        vocab_size = _vocab_size(layout, config, base, folder)
    heads = pack(found, layout, vocab_size, dtype, device)
    notes += [*found.notes, *disagreements(config, layout)]
    for note in notes:
        _log.warning("%s: %s", folder, note)
    return HeadsCheckpoint(heads, base, module.NAME, folder, config, notes, _revision(module, config))


def find_base_model(path_or_hub_id: str | Path, *, revision: str | None = None) -> str | None:
    """Return the folder or hub id of a checkpoint's base model without reading its weights.

    Args:
        path_or_hub_id: as for `read_heads`.
        revision: as for `read_heads`.

    Raises:
        ValueError: an unknown checkpoint.
    """
    folder = _folder(path_or_hub_id, revision)
    module, config, _ = _recognise(folder)
    return module.base_model(folder, config)


def find_base_revision(
    path_or_hub_id: str | Path, *, base_model: str | Path | None = None, revision: str | None = None
) -> str | None:
    """Return the revision of its base model that a checkpoint belongs to, as `find_base_model` its name.

    Args:
        path_or_hub_id: as for `read_heads`.
        base_model: folder or hub id of the one that is asked for, if any; None comes back where it is not the one that
            the checkpoint names.
        revision: as for `read_heads`.

    Raises:
        ValueError: an unknown checkpoint.
    """
    folder = _folder(path_or_hub_id, revision)
    module, config, _ = _recognise(folder)
    recorded = _revision(module, config)
    return recorded if base_model is None else revision_of(base_model, module.base_model(folder, config), recorded)


def export(
    path_or_hub_id: str | Path,
    folder: str | Path,
    format: Target,
    *,
    storage: Storage | None = None,
    dtype: torch.dtype | None = None,
    base_model: str | Path | None = None,
    base_revision: str | None = None,
    file: Literal["pt", "safetensors"] = "pt",
    overwrite: bool = False,
    revision: str | None = None,
) -> Exported:
    """Write the heads of a checkpoint in another format; the drafts of what is written are those of what is read.

    Their model card, its figures and their tree go along; the counts of another storage do not.

    Args:
        path_or_hub_id: of the heads, in any known format.
        folder: where to write; it appears when it is complete.
        format: one of `TARGETS`.
        storage: of the projections: "int8" or "fp8" stores floats in 8 bits, "float" turns 8 bits back into the numbers
            that they stand for (in 16 bits rounded); None leaves them.
        dtype: float16, bfloat16 or float32, of all of the heads that is not in 8 bits; None keeps the file's (where the
            base model's lm_head comes in, the wider of the two). "embedded" copies the base model's files as they are.
        base_model: hub id or folder; overrides the one the heads name.
        base_revision: branch, tag or commit of it; by default the one the heads name, unless `base_model` overrides it.
        file: "pt" or "safetensors", in the original formats. The project's own code reads the former alone,
            text-generation-inference the latter, with the tokenizer beside it.
        overwrite: replace a folder that holds a checkpoint of heads and nothing else.
        revision: branch, tag or commit of the heads on the hub.

    Returns:
        What was written, with notes on who cannot read it.

    Raises:
        ValueError: heads that the format cannot hold (the message says what can be done), an unreadable checkpoint, no
            base model known or one of other sizes, a file to be copied that is a link out of its folder (and of the
            hub's cache), or a `folder` that exists or that holds what is read.
        OSError: a file could not be written; what was there before is unchanged.
    """
    if format not in TARGETS:
        raise ValueError(f"format: expected one of {', '.join(TARGETS)}, got {format!r}")
    if file not in ("pt", "safetensors"):
        raise ValueError(f"file: expected pt or safetensors, got {file!r}")
    out = Path(folder).expanduser().resolve()
    # The base model may be in the heads' own repository.
    files = [*_HUB_FILES, *_export.CARRIED, *TOKENIZER, *(_BASE_FILES if format == "embedded" else [])]
    source = _folder(path_or_hub_id, revision, files=files)
    _check_place(out, source, overwrite)
    base = find_base_model(source) if base_model is None else str(base_model)
    if base is None:
        raise ValueError(f"base_model: expected a folder or hub id, because {source} names none, got None")
    if base_revision is None:
        base_revision = find_base_revision(source, base_model=base)
    local = folder_of(base)
    if local is not None:
        base = str(local)
        _check_place(out, local, overwrite)
    # A hub is not asked about the base model that heads name themselves, unless its weights are needed.
    sizes = stated_sizes(base, base_revision) if local is not None or base_model is not None else {}
    vocab_size = None if base_model is None else sizes.get("vocab_size")
    checkpoint = read_heads(source, hidden_size=sizes.get("hidden_size"), vocab_size=vocab_size)
    heads = _export.converted(checkpoint.heads, storage, dtype)
    if format not in ("native", "embedded"):
        heads = _export.in_order(heads)
    refusal = _export.refusal(heads, format)
    if refusal is not None:
        raise ValueError(refusal)
    base_folder = functools.cache(lambda: _base_folder(base, base_revision, format))
    if format == "embedded":
        sizes = stated_sizes(str(base_folder()))
    for name, got in sizes.items():
        if got != getattr(heads, name):
            raise ValueError(
                f"base_model: expected {name} {getattr(heads, name)} like the heads in {source}, got {got} in {base}"
            )
    return _export.write(
        heads,
        out,
        format,
        base_model=base,
        base_revision=base_revision,
        base_folder=base_folder,
        dtype=dtype,
        file=file,
        source=source,
        stored_before=checkpoint.heads.storage,
        overwrite=overwrite,
    )


def _base_folder(base: str, revision: str | None, target: Target) -> Path:
    """Return the folder of a base model with its weights, fetched if need be."""
    folder = _folder(base, revision, "base_model", _BASE_FILES)
    if target == "embedded" or Path(base).is_dir() or any(folder.glob("*.safetensors")):
        return folder
    # An older repository, in which nothing is held twice.
    return _folder(base, revision, "base_model", [*_BASE_FILES, *_OLDER_WEIGHTS])


def _check_place(out: Path, read: Path, overwrite: bool) -> None:
    """Refuse a folder that would be lost: one that exists, is no checkpoint of heads alone, or holds what is read."""
    if not out.exists():
        return
    if out == read or out in read.parents:
        raise ValueError(f"folder: expected another one than what is read, got {out}")
    if not overwrite:
        raise ValueError(f"folder: expected a new one (or overwrite, --overwrite), got {out}")
    if not out.is_dir() or (any(out.iterdir()) and not any(module.recognise(out) for module in FORMATS)):
        raise ValueError(f"folder: expected a checkpoint of heads to overwrite, got {out}")
    entry = foreign(out)
    if entry is not None:
        raise ValueError(f"folder: expected a checkpoint of heads alone to overwrite, got {out} with {entry} in it")


def _revision(module: Format, config: Mapping[str, Any]) -> str | None:
    revision = config.get(REVISION)
    return revision if isinstance(revision, str) and revision and module is not embedded else None


def _folder(
    path_or_hub_id: str | Path,
    revision: str | None,
    name: str = "path_or_hub_id",
    files: list[str] = _HUB_FILES,
) -> Path:
    if not isinstance(path_or_hub_id, (str, Path)):
        got = type(path_or_hub_id).__name__
        remedy = " (write_heads writes heads that are in memory)" if isinstance(path_or_hub_id, MedusaHeads) else ""
        raise ValueError(f"{name}: expected a folder or hub id, got {got}{remedy}")
    path = Path(path_or_hub_id).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise ValueError(f"{name}: expected a checkpoint's folder or a hub id, got the file {path}")
    if isinstance(path_or_hub_id, Path):
        raise ValueError(f"{name}: expected an existing folder, got {path}")
    check_revision(revision)
    try:
        snapshot = snapshot_download(
            path_or_hub_id, revision=revision, allow_patterns=files, ignore_patterns=_HUB_IGNORED
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name}: expected an existing folder or a hub repository within reach, got {path_or_hub_id!r} "
            f"({type(error).__name__}: {error})"
        ) from error
    return Path(snapshot)


def _recognise(folder: Path) -> tuple[Format, dict[str, Any], list[str]]:
    fitting = [module for module in FORMATS if module.recognise(folder)]
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
    return fitting[0], read_json(config_file), notes


def _vocab_size(layout: Layout, config: Mapping[str, Any], base: str | None, folder: Path) -> int:
    if layout.vocab_size is not None:
        return layout.vocab_size
    size = config.get("vocab_size")
    if type(size) is int and 0 < size < 2**31:  # True is an int, too
        return size
    size = None if base is None else stated_vocab_size(base, _revision(original, config))
    if size is None:
        raise ValueError(
            f"vocab_size: expected the base model's, because neither the tensors, nor config.json in {folder}, nor the "
            f"config of the base model {base!r} say it, got None"
        )
    return size
