"""Load the base model of a heads checkpoint, or only its lm_head.

transformers loads it as the plain model that its `model_type` names. The `medusa_head.*` tensors of a Medusa-2 folder
are ignored; any other tensor that the model has no place for is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from medusa_decoding.checkpoints import pretrained
from medusa_decoding.checkpoints.layout import DTYPES
from medusa_decoding.checkpoints.reading import HeadsCheckpoint
from medusa_decoding.checkpoints.tensor_files import model_tensors
from medusa_decoding.files import read_json_object


def lm_head_weight(folder: Path) -> torch.Tensor:
    """Return the lm_head [V, H] of a base model on disk, or its embeddings if they serve as lm_head.

    An adapter, which may change it, is a `ValueError`.
    """
    if (folder / "adapter_config.json").is_file():
        raise ValueError(
            f"base_model: expected a model with an lm_head of its own, got an adapter (merge it first) in {folder}"
        )
    wanted = ["lm_head."]
    config = read_json_object(folder / "config.json") if (folder / "config.json").is_file() else {}
    if config.get("tie_word_embeddings", True):  # Gemma's files leave it to the default of its class
        wanted += ["model.embed_tokens.", "embed_tokens."]
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
    raise ValueError(f"base_model: the weight files of {folder} have no lm_head")


def load_base_model(
    checkpoint: HeadsCheckpoint | None, base_model: str | Path | None = None, **kwargs: Any
) -> PreTrainedModel:
    """Load the base model of a heads checkpoint, as an instance of transformers' own class.

    For a folder with a peft adapter alone, as training writes for a quantised model, the model that the adapter names
    is loaded, and the adapter into it. The config's `model_type` decides the class, as with `AutoModelForCausalLM`;
    `architectures` (such as MedusaLlamaForCausalLM) and `auto_map` are ignored.

    Args:
        checkpoint: what `read_heads` returned; None for a model without heads.
        base_model: folder or hub id; overrides the checkpoint's own and its revision.
        kwargs: for transformers' `from_pretrained`, such as a `quantization_config` (not needed for a model that was
            saved quantised).

    Raises:
        ValueError: no known base model, a `model_type` that transformers does not have as a causal language model,
            another hidden size or vocabulary than the heads', missing weights, `trust_remote_code=True`, or
            `load_in_4bit` and `load_in_8bit`, which transformers 5 takes only in a `quantization_config`.
    """
    path, revision = base_model, None
    if checkpoint is not None:
        path = checkpoint.base_model if base_model is None else base_model
        revision = checkpoint.base_revision if str(path) == checkpoint.base_model else None
        if path is None:
            raise ValueError(f"base_model: expected a folder or hub id, because {checkpoint.path} names none, got None")
    if not isinstance(path, (str, Path)):
        raise ValueError(f"base_model: expected a folder, a hub id or a loaded model, got {type(path).__name__}")
    if kwargs.pop("trust_remote_code", False):
        raise ValueError("trust_remote_code: expected False, got True: code that comes with a checkpoint is never run")
    for name in ("load_in_4bit", "load_in_8bit"):
        if kwargs.pop(name, False):
            raise ValueError(f"{name}: expected quantization_config=BitsAndBytesConfig({name}=True), got {name}=True")
    adapter = _adapter(path)
    if adapter is not None:
        path, revision = adapter["base_model_name_or_path"], adapter.get("revision")
    if revision is not None:
        kwargs.setdefault("revision", revision)
    config = kwargs.pop("config", None)
    if config is None:
        config, kwargs = pretrained.read_config(path, **kwargs)
    for name in ("hidden_size", "vocab_size"):
        got = getattr(config, name, None)
        if checkpoint is not None and got != (wanted := getattr(checkpoint.heads, name)):
            raise ValueError(
                f"base_model: expected {name} {wanted} like the heads in {checkpoint.path}, got {got} in {path}"
            )
    model = pretrained.load_model(path, config, **kwargs)
    if adapter is not None:
        pretrained.load_adapter(model, adapter["folder"])
    return model


def _adapter(path: str | Path) -> dict[str, Any] | None:
    """Return an adapter's config and folder, or None if the path is not a folder with an adapter alone."""
    folder = Path(path).expanduser()
    file = folder / "adapter_config.json"
    if not file.is_file() or any(folder.glob("model*.safetensors")):
        return None
    found = read_json_object(file)
    name = found.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{file}: expected base_model_name_or_path of the adapter's model, got {name!r}")
    return found | {"folder": folder}
