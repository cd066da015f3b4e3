"""The base model that belongs to a heads checkpoint, loaded by transformers as the plain model its `model_type` names.

A Medusa-2 folder holds `medusa_head.*` tensors that the plain model has no place for. They are passed over without a
warning; any other tensor that the model has no place for is an error. This module does not know how heads are stored.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from medusa_decoding.checkpoints import pretrained
from medusa_decoding.checkpoints._files import read_json
from medusa_decoding.checkpoints._layout import DTYPES
from medusa_decoding.checkpoints.embedded import model_tensors

if TYPE_CHECKING:
    from medusa_decoding.checkpoints import HeadsCheckpoint


def lm_head_weight(folder: Path) -> torch.Tensor:
    """Return the lm_head [V, H] of a base model on disk, or its embeddings where these are the lm_head.

    Raises:
        ValueError: none there, one with a bias, one that is no tensor of floats, or an adapter, which may change it.
    """
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"base_model: expected a model with an lm_head of its own, got an adapter (merge it first) in {folder}"
        )
    wanted = ["lm_head."]
    config = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    if config.get("tie_word_embeddings"):
        wanted.append("model.embed_tokens.")
    for prefix in wanted:
        found = model_tensors(folder, prefix)
        stored = found.pop(f"{prefix}weight", None)
        if found:
            raise ValueError(f"base_model: expected a plain lm_head, got {', '.join(sorted(found))} in {folder}")
        if stored is None:
            continue
        if stored.dtype not in DTYPES:
            raise ValueError(f"base_model: expected an lm_head of floats, got {stored.dtype} in {folder}")
        return stored.load()
    raise ValueError(f"base_model: expected a model with an lm_head in its weight files, got none in {folder}")


def load_base_model(
    checkpoint: HeadsCheckpoint, base_model: str | Path | None = None, **kwargs: Any
) -> PreTrainedModel:
    """Load the base model of a heads checkpoint.

    A folder with an adapter of peft (as training leaves it beside a quantised model) stands for the model that the
    adapter names, with the adapter in it.

    The config's `model_type` decides the class, as with `AutoModelForCausalLM`; `architectures` such as
    MedusaLlamaForCausalLM and an `auto_map` are ignored.

    Args:
        checkpoint: what `read_heads` returned.
        base_model: folder or hub id; overrides the checkpoint's own, with its revision.
        kwargs: for transformers' `from_pretrained`, such as a `quantization_config` (which a model saved quantised does
            not need).

    Returns:
        The model, an instance of transformers' own class.

    Raises:
        ValueError: no base model known, a `model_type` that transformers does not have as a causal language model, a
            hidden size or vocabulary other than the heads', weights that the files lack, `trust_remote_code=True`, or
            `load_in_4bit` and `load_in_8bit`, which transformers 5 takes in a `quantization_config` alone.
    """
    path = checkpoint.base_model if base_model is None else base_model
    if path is None:
        raise ValueError(f"base_model: expected a folder or hub id, because {checkpoint.path} names none, got None")
    if kwargs.pop("trust_remote_code", False):
        raise ValueError("trust_remote_code: expected False, got True: code that comes with a checkpoint is never run")
    for name in ("load_in_4bit", "load_in_8bit"):
        if kwargs.pop(name, False):
            raise ValueError(f"{name}: expected quantization_config=BitsAndBytesConfig({name}=True), got {name}=True")
    adapter = _adapter(path)
    revision = revision_of(path, checkpoint.base_model, checkpoint.base_revision)
    if adapter is not None:
        path, revision = adapter["base_model_name_or_path"], adapter.get("revision")
    if revision is not None:
        kwargs.setdefault("revision", revision)
    config = kwargs.pop("config", None)
    if config is None:
        config, kwargs = pretrained.read_config(path, **kwargs)
    heads = checkpoint.heads
    for name, wanted in (("hidden_size", heads.hidden_size), ("vocab_size", heads.vocab_size)):
        got = getattr(config, name, None)
        if got != wanted:
            raise ValueError(
                f"base_model: expected {name} {wanted} like the heads in {checkpoint.path}, got {got} in {path}"
            )
    model = pretrained.load_model(path, config, **kwargs)
    if adapter is not None:
        pretrained.load_adapter(model, adapter["folder"])
    return model


def _adapter(path: str | Path) -> dict[str, Any] | None:
    """Return an adapter's config with its folder, or None where the path is no folder of an adapter alone."""
    folder = Path(path).expanduser()
    file = folder / "adapter_config.json"
    if not file.is_file() or any(folder.glob("model*.safetensors")):
        return None
    found = read_json(file)
    name = found.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{file}: expected base_model_name_or_path of the adapter's model, got {name!r}")
    return found | {"folder": folder}


def revision_of(base_model: str | Path, named: str | None, recorded: str | None) -> str | None:
    """Return the recorded revision for a base model if it is the one that the heads name, else None."""
    return recorded if str(base_model) == named else None


def folder_of(base_model: str) -> Path | None:
    """Return the folder that a base model's name stands for, or None for a hub id or a path of another machine.

    Raises:
        ValueError: a relative path that is no folder: from elsewhere it would be another one, or a hub id.
    """
    path = Path(base_model).expanduser()
    if path.is_dir():
        return path.resolve()
    if base_model.startswith((".", "~")) or (not path.is_absolute() and base_model.count("/") > 1):
        raise ValueError(f"base_model: expected a hub id or a folder that exists, got {base_model!r}")
    return None


def stated_sizes(base_model: str, revision: str | None = None) -> dict[str, int]:
    """Return hidden_size and vocab_size as far as a base model's config has them; none where it cannot be had."""
    try:
        config = pretrained.read_file(base_model, **pretrained.at(revision))
    except ValueError:
        return {}
    sizes = {name: config.get(name) for name in ("hidden_size", "vocab_size")}
    return {name: size for name, size in sizes.items() if isinstance(size, int)}


def stated_vocab_size(base_model: str, revision: str | None = None) -> int | None:
    """Return the vocabulary size in a base model's config; None where it cannot be had."""
    return stated_sizes(base_model, revision).get("vocab_size")
