"""Checkpoints of heads written in other formats: what each can hold, what is changed for it, and what is refused.

Nothing is left out or approximated unasked: the drafts of the heads that are read back are those of the heads given.
This module does not know names of tensors or weight files, which are the formats' own.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from medusa_decoding.checkpoints import embedded, original, vllm
from medusa_decoding.checkpoints._files import own_file
from medusa_decoding.checkpoints._layout import DTYPES, unpack
from medusa_decoding.checkpoints._places import CARD, PLOT, TOKENIZER
from medusa_decoding.checkpoints._writing import save_tensors
from medusa_decoding.checkpoints.base import lm_head_weight
from medusa_decoding.files import whole_folder, write_json
from medusa_decoding.heads import MedusaHeads, Storage

Target = Literal["native", "embedded", "original-v1", "original-v2", "vllm"]

TARGETS: dict[Target, str] = {
    "native": "what this package writes itself; holds every kind of heads; not for vLLM",
    "embedded": "the base model with the heads in it, one folder; holds every kind of heads; not for vLLM",
    "original-v1": "the original project's: one projection per head (a shared lm_head is copied); not for vLLM",
    "original-v2": "the original project's: residual blocks alone, lm_head shared; not for vLLM",
    "vllm": f"for vLLM {vllm.VERSIONS} (0.33 has no Medusa any more)",
}
"""Formats by name, and what they are."""

_MEASURED = "measured.json"
CARRIED = (CARD, PLOT, _MEASURED, "medusa_tree.json")
"""Files beside heads that go with them. Calibrations and tuned trees hold for the very heads they were made with."""

# What the original project's loader makes of every checkpoint.
_ORIGINAL_HEADS = 5


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        folder: where.
        format: in which format.
        base_model: what it names as its base model.
        heads: as they were written: converted, with the projection they had.
        notes: what a user should know.
        launch: for vLLM, the shell command that serves the base model with these heads. None for other formats, and
            if vLLM would not start; the notes then say why.
    """

    folder: Path
    format: Target
    base_model: str
    heads: MedusaHeads
    notes: list[str]
    launch: str | None = None


def refusal(heads: MedusaHeads, target: Target) -> str | None:
    """Return why a format cannot hold such heads, and what can be done; None where it can."""
    if target in ("native", "embedded"):
        return None
    anywhere = "native and embedded hold it"
    if heads.parent_rank:
        return (
            f"heads: expected none whose drafts depend on their parent token for {target} ({anywhere}; heads trained "
            f"with heads.parent_rank 0 have none), got parent_rank {heads.parent_rank}"
        )
    if heads.storage != "float":
        return (
            f"heads: expected projections in floats for {target} ({anywhere}; storage float, --storage float, turns "
            f"them back), got {heads.storage}"
        )
    if heads.token_map is not None and not (target == "vllm" and heads.shared_projection):
        return (
            f"heads: expected the whole vocabulary for {target} ({anywhere}; what a trimmed one never proposes has no "
            f"projection), got {heads.num_candidates} of {heads.vocab_size} tokens"
        )
    if target == "vllm":
        return None
    if target == "original-v2" and not heads.shared_projection:
        return f"heads: expected a projection shared with lm_head for {target} (original-v1 holds own ones), got own"
    if target == "original-v2" and heads.num_layers > 1:
        return (
            f"heads: expected one residual block a head for {target} ({anywhere}; the original project's code makes "
            f"one block of several), got {heads.num_layers}"
        )
    return None


def converted(heads: MedusaHeads, storage: Storage | None, dtype: torch.dtype | None) -> MedusaHeads:
    """Return heads with projections stored otherwise, and weights of another dtype.

    Projections in 8 bits become the floats that they stand for: in float32 those very numbers, in 16 bits rounded.

    Raises:
        ValueError: an unknown storage or dtype, a shared projection to be stored in 8 bits, 8 bits of another kind, or
            numbers too large for the dtype.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype: expected float16, bfloat16, float32 or None, got {dtype}")
    if storage not in (None, "float", "int8", "fp8"):
        raise ValueError(f"storage: expected 'float', 'int8', 'fp8' or None, got {storage!r}")
    found = _stored(heads, storage, heads.w1.dtype if dtype is None else dtype)
    for name, weight in unpack(found).items():
        # In 8 bits nothing has been converted.
        if weight.is_floating_point() and weight.element_size() > 1 and not bool(weight.isfinite().all()):
            raise ValueError(f"dtype: expected one that holds {name}, got {dtype}, in which it is not finite")
    return found


def _stored(heads: MedusaHeads, storage: Storage | None, dtype: torch.dtype) -> MedusaHeads:
    if storage in (None, heads.storage):
        return heads.to(dtype)
    if storage is not None and storage != "float":
        # From the weights as they were given: two roundings are one too many.
        return heads.quantized(storage).to(dtype)
    found = heads.remade(dtype=dtype)
    stored, scale, floats = heads.get_buffer("w2"), heads.get_buffer("w2_scale"), found.get_parameter("w2")
    for head in range(heads.num_heads):
        floats[head] = stored[head].float() * scale[head, :, None]
    return found


def in_order(heads: MedusaHeads) -> MedusaHeads:
    """Return heads whose token_map holds every token without it: their rows in the order of the vocabulary.

    vLLM's format and the original ones have no such map. Others come back as they are.
    """
    mapped = heads.token_map
    if mapped is None or len(mapped) != heads.vocab_size or heads.storage != "float" or heads.parent_rank:
        return heads
    found = heads.remade(token_map=None)
    if not heads.shared_projection:
        found.get_parameter("w2")[:, mapped] = heads.get_parameter("w2")
    return found


def write(
    heads: MedusaHeads,
    folder: Path,
    target: Target,
    *,
    base_model: str,
    base_revision: str | None,
    base_folder: Callable[[], Path],
    dtype: torch.dtype | None,
    file: Literal["pt", "safetensors"],
    source: Path,
    stored_before: Storage,
    overwrite: bool,
) -> Exported:
    """Write heads in a format, with the files that go with them.

    Args:
        heads: that the format can hold, see `refusal`; NaN or Inf are refused by who read them.
        folder: where to; it appears whole or not at all.
        target: the format.
        base_model: what the config names as the base model.
        base_revision: of it, or None.
        base_folder: returns the folder of the base model, fetched if need be; asked where its weights are needed.
        dtype: that was asked for, or None.
        file: of the original formats: `.pt` is what the project's own code reads.
        source: folder whose card, figures and tree go along.
        stored_before: how projections are stored there.
        overwrite: replace the folder.
    """
    notes: list[str] = []
    lm_head = None
    was, now = f"projections stored in {stored_before}", f"projections stored in {heads.storage}"
    if target == "vllm" and heads.token_map is not None:
        was, now = f"{heads.num_candidates} of the tokens", f"all {heads.vocab_size} tokens"
        heads = heads.remade(token_map=None)
        notes.append(
            f"vLLM {vllm.VERSIONS} cannot read a token_map: the heads are written with the whole lm_head, so they may "
            f"propose any of {heads.vocab_size} tokens. The text is the same; the acceptance may differ"
        )
    if target in ("original-v1", "vllm") and heads.shared_projection:
        heads, lm_head = _with_lm_head(heads, base_folder(), dtype)
    base = base_folder() if target == "embedded" else None
    if base is not None:
        embedded.base_files(base)
    with whole_folder(folder, overwrite) as staging:
        if target == "vllm":
            write_json(staging / "config.json", vllm.fields(heads, base_model, base_revision), indent=2)
            save_tensors(vllm.tensors(heads, lm_head), staging / vllm.WEIGHTS)
        elif base is not None:
            said = original.fields(heads, base_model)
            own = {key: value for key, value in said.items() if key.startswith("medusa_") or key == "version"}
            embedded.write(staging, base, unpack(heads), own)
        elif target == "native":
            original.write_heads(heads, staging, base_model=base_model, base_revision=base_revision)
        else:
            notes += _for_original(heads, target, file)
            _write_original(heads, lm_head, staging, file, original.fields(heads, base_model, base_revision))
            if file == "safetensors":
                known = Path(base_model) if lm_head is None else base_folder()
                notes += _copy_tokenizer(known, staging, base_model)
        # Last: a base model's folder may have files of these names, too.
        notes += _carry(source, staging, was, now)
    launch = None
    if target == "vllm":
        obstacles = vllm.obstacles(folder, base_model, source)
        notes += obstacles
        launch = None if obstacles else vllm.launch(heads, folder, base_model, base_revision)
    return Exported(folder, target, base_model if base is None else str(folder), heads, notes, launch)


def _with_lm_head(heads: MedusaHeads, base: Path, dtype: torch.dtype | None) -> tuple[MedusaHeads, torch.Tensor]:
    """Return heads and the base model's lm_head in one dtype: the one asked for, or else one that rounds neither."""
    weight = lm_head_weight(base)
    if weight.shape != (heads.vocab_size, heads.hidden_size):
        raise ValueError(
            f"base_model: expected an lm_head [{heads.vocab_size}, {heads.hidden_size}] like the heads, got "
            f"{list(weight.shape)} in {base}"
        )
    common = torch.promote_types(heads.w1.dtype, weight.dtype) if dtype is None else dtype
    if not bool(weight.isfinite().all()):
        raise ValueError(f"base_model: expected a finite lm_head, got NaN or Inf in {base}")
    weight = weight.to(common)
    if not bool(weight.isfinite().all()):
        raise ValueError(f"dtype: expected one that holds lm_head, got {common}, in which it is not finite")
    return heads.to(common), weight


def _for_original(heads: MedusaHeads, target: Target, file: Literal["pt", "safetensors"]) -> list[str]:
    """Return what a user should know of the readers of the original formats."""
    lost = "accepts none of their drafts" if target == "original-v2" else "passes over their biases"
    notes = [f"not for vLLM, which takes this folder without an error but {lost}: --format vllm is for it"]
    if heads.num_layers > 1:
        notes.append(
            "the original project's code makes one residual block of several and misreads these heads; "
            "text-generation-inference and TensorRT-LLM read them as they are"
        )
    if file == "safetensors":  # which that code does not read
        return notes
    count = heads.num_heads
    if count != _ORIGINAL_HEADS:
        kind = f"head {count + 1} on: random numbers" if count < _ORIGINAL_HEADS else "those beyond are left out"
        notes.append(
            f"the original project's loader makes {_ORIGINAL_HEADS} heads whatever config.json says, and these are "
            f"{count} ({kind}, without a word)"
        )
    if target == "original-v2":
        notes.append(
            "the original project's class of version 1.0 has a projection a head, which is not in this layout, and "
            "begins it with random numbers without a word; it reads original-v1, text-generation-inference both"
        )
    return notes


def _copy_tokenizer(base: Path, staging: Path, base_model: str) -> list[str]:
    """Copy the base model's tokenizer to where text-generation-inference looks for it, or return a note."""
    files = [base / name for name in TOKENIZER if (base / name).is_file()]
    for file in files:
        shutil.copyfile(own_file(file), staging / file.name)
    if files:
        return []
    return [
        f"text-generation-inference looks for the tokenizer beside these heads: copy the files of {base_model} there "
        "(tokenizer.json, tokenizer_config.json and the like)"
    ]


def _carry(source: Path, staging: Path, was: str, now: str) -> list[str]:
    """Copy the files that go along; return notes on those that do not hold any more.

    Args:
        source: folder of the heads that were read.
        staging: folder of the heads that are written.
        was: what the former have that the figures beside them depend on.
        now: what the latter have instead; the same if nothing has changed.
    """
    for name in CARRIED:
        file = source / name
        if not file.is_file() or (name == _MEASURED and was != now):
            continue
        own_file(file)
        if name == CARD and was != now:
            (staging / name).write_bytes(_marked(file.read_bytes(), was, now))
        else:
            shutil.copyfile(file, staging / name)
    if was != now and any((source / name).is_file() for name in (CARD, _MEASURED)):
        return [
            f"what was measured is of heads with {was}, and these have {now}: {_MEASURED} is left out, and {CARD} says "
            "so if there is one"
        ]
    return []


def _marked(card: bytes, was: str, now: str) -> bytes:
    """Return a model card that says, below its front matter, of which heads its figures are."""
    said = f"> The heads here have {now}. All figures below are of heads with {was}.\n\n"
    front = re.match(rb"---\r?\n.*?\n---\r?\n\s*", card, re.DOTALL)
    end = 0 if front is None else front.end()
    return card[:end] + said.encode() + card[end:]


def _write_original(
    heads: MedusaHeads,
    lm_head: torch.Tensor | None,
    staging: Path,
    file: Literal["pt", "safetensors"],
    fields: dict[str, Any],
) -> None:
    tensors = unpack(heads)
    if lm_head is not None:
        tensors |= {f"{head}.{heads.num_layers}.weight": lm_head for head in range(heads.num_heads)}
        del fields["version"]
    if heads.b1 is None:
        # Its code has biases, and would begin them with random numbers where a file has none.
        zeros = torch.zeros(heads.hidden_size, dtype=heads.w1.dtype)
        names = [f"{head}.{layer}.linear.bias" for head in range(heads.num_heads) for layer in range(heads.num_layers)]
        tensors |= {name: zeros.clone() for name in names}
    write_json(staging / "config.json", fields, indent=2)
    save_tensors(tensors, staging / f"medusa_lm_head.{file}")
