"""vLLM's folder of Medusa heads: `config.json` with `model_type` medusa beside `model.safetensors`.

    blocks.{h}.layers.{l}.weight, .bias     residual block l of head h; vLLM reads biases with `medusa_fc_bias` alone
    lm_heads.{h}.weight                     its own projection, or with `original_lm_head` one for all: lm_head.weight

vLLM 0.28 to 0.32 load such folders, without the `token_map` of a trimmed vocabulary, so that is neither written nor
read. vLLM silently ignores names that it does not know, so this module refuses them.
"""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import torch

from medusa_decoding.checkpoints.layout import NUMBER, TOKEN_MAP, HeadTensors, unpack
from medusa_decoding.checkpoints.original import REVISION, base_model
from medusa_decoding.checkpoints.tensor_files import StoredTensor, open_tensors
from medusa_decoding.checks import shown
from medusa_decoding.files import read_json_object
from medusa_decoding.heads import MedusaHeads

__all__ = ["FILES", "NAME", "base_model", "fields", "gather", "launch", "obstacles", "recognise", "tensors"]

NAME = "vllm"
FILES = "model.safetensors beside a config.json with model_type medusa"
WEIGHTS = "model.safetensors"

_PREFIX = "medusa_heads."
_BLOCK = re.compile(rf"blocks\.{NUMBER}\.layers\.{NUMBER}\.(weight|bias)")
_OWN = re.compile(rf"lm_heads\.{NUMBER}\.weight")
_SHARED = "lm_head.weight"
# vLLM looks at the folder's path first, even if the method is given (config/speculative.py of 0.32).
_OTHER_METHODS = ("eagle-", "eagle3", "dflash", "dspark")


def recognise(folder: Path) -> bool:
    """Return whether the folder holds heads as vLLM reads them."""
    config = folder / "config.json"
    return (folder / WEIGHTS).is_file() and config.is_file() and read_json_object(config).get("model_type") == "medusa"


def gather(folder: Path) -> HeadTensors:
    """List the heads' tensors under the paper's names."""
    config = read_json_object(folder / "config.json")
    stored: dict[str, StoredTensor] = {}
    for full, tensor in open_tensors(folder / WEIGHTS).items():
        name = full.replace(_PREFIX, "")
        if name in stored:
            raise ValueError(f"{tensor.file}: expected each name once, with or without {_PREFIX}, got {name} twice")
        stored[name] = tensor
    blocks = {name: match for name in stored if (match := _BLOCK.fullmatch(name))}
    heads = sorted({int(match[1]) for match in blocks.values()})
    layers = 1 + max((int(match[2]) for match in blocks.values()), default=0)
    found = {f"{match[1]}.{match[2]}.linear.{match[3]}": stored[name] for name, match in blocks.items()}
    projections = {f"{match[1]}.{layers}.weight": stored[name] for name in stored if (match := _OWN.fullmatch(name))}
    shared = stored.get(_SHARED)
    if config.get("original_lm_head"):
        shared = shared or stored.get("lm_heads.0.weight")
        projections = {f"{head}.{layers}.weight": shared for head in heads if shared is not None}
        known = {*blocks, _SHARED, "lm_heads.0.weight", TOKEN_MAP}
    else:
        known = {*blocks, *(name for name in stored if _OWN.fullmatch(name)), TOKEN_MAP}
    for name, tensor in stored.items():
        if name not in known:
            raise ValueError(f"{tensor.name[:99]} in {tensor.file}: expected names that vLLM reads, got another")
    if not projections:
        wanted = _SHARED if config.get("original_lm_head") else "lm_heads.0.weight"
        raise ValueError(f"{folder / WEIGHTS}: the projection {wanted} is missing")
    size, whole = config.get("truncated_vocab_size"), config.get("vocab_size")
    if size not in (None, whole):
        raise ValueError(
            f"truncated_vocab_size: expected the whole vocabulary of {whole}, got {shown(size)} in {folder}"
        )
    return HeadTensors({**found, **projections})


def tensors(heads: MedusaHeads, lm_head: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Return the tensors of heads by vLLM's names, with the base model's lm_head [V, H] if the heads share it.

    Projections are floats, and there is no root input, no parents' term and no token_map.
    """
    named = {}
    for name, tensor in unpack(heads).items():
        name = re.sub(r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name)
        named[re.sub(r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight", name)] = tensor
    if lm_head is not None:
        named[_SHARED] = lm_head
    return named


def fields(heads: MedusaHeads, base: str, revision: str | None) -> dict[str, Any]:
    """Return the config of heads.

    vLLM reads any key that contains "num" and "heads" as the number of heads, so there is only one such key.
    """
    origin = {"base_model_name_or_path": base} | ({} if revision is None else {REVISION: revision})
    return origin | {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": heads.hidden_size,
        "vocab_size": heads.vocab_size,
        "num_heads": heads.num_heads,
        "num_hidden_layers": heads.num_layers,
        "truncated_vocab_size": None,
        "medusa_fc_bias": heads.b1 is not None,
        "original_lm_head": heads.shared_projection,
    }


def launch(heads: MedusaHeads, folder: Path, base: str, revision: str | None) -> str:
    """Return the shell command that serves a base model with the heads in a folder.

    vLLM makes `num_speculative_tokens` heads, whatever the folder's config says.
    """
    speculation = {"method": "medusa", "model": str(folder), "num_speculative_tokens": heads.num_heads}
    at = [] if revision is None else ["--revision", revision]
    return shlex.join(["vllm", "serve", base, *at, "--speculative-config", json.dumps(speculation)])


def obstacles(folder: Path, base: str, source: Path) -> list[str]:
    """Return why vLLM cannot serve a base model with the heads that are written from `source` to `folder`."""
    found = [
        f"vLLM takes a folder with {method!r} in its path for heads of another kind: name another one"
        for method in _OTHER_METHODS
        if method in str(folder).lower()
    ][:1]
    if (Path(base) / "adapter_config.json").is_file():
        found.append(f"vLLM does not serve an adapter, such as {base}: merge it, and name the result by --base-model")
    elif Path(base) == source:
        found.append(f"vLLM does not serve a model with heads in it, such as {base}: name one without by --base-model")
    return found
