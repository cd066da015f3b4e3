"""Write the heads of a checkpoint in another format: what each format can hold, and what is converted or refused.

Nothing is dropped or approximated unless asked for: the written heads draft what the given heads draft.
"""

from __future__ import annotations

import functools
import re
import shutil
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import torch

from medusa_decoding.checkpoints import embedded, hub, original, vllm
from medusa_decoding.checkpoints.base_model import lm_head_weight
from medusa_decoding.checkpoints.layout import DTYPES, unpack
from medusa_decoding.checkpoints.pretrained import at, load_model, load_tokenizer, stated_sizes
from medusa_decoding.checkpoints.reading import FORMATS, HUB_FILES, fetch_folder, read_heads, stated_base_model
from medusa_decoding.checkpoints.tensor_files import MODEL_WEIGHTS, own_file, save_tensors
from medusa_decoding.files import whole_folder, write_json
from medusa_decoding.heads import MedusaHeads, Storage, not_finite
from medusa_decoding.options import TARGETS, VLLM_VERSIONS

Target = Literal["native", "hub", "embedded", "original-v1", "original-v2", "vllm"]

_CARD, _MEASURED = hub.CARD, "measured.json"
# Formats of this package, which hold every kind of heads.
_OWN = ("native", "hub", "embedded")
# Files that go along with heads. Calibrations and tuned trees hold only for the heads that they were made with.
_CARRIED = (_CARD, "accuracy.png", _MEASURED, "medusa_tree.json", "medusa_tree_sampling.json")
_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
_TERMS = ("LICENSE*", "NOTICE*", "USE_POLICY*")
_BASE_FILES = ["*.json", "model*.safetensors", "*.txt", "*.model", "*.jinja", *_TERMS]

# What a folder with heads may hold besides weights. A killed writer leaves lock files of `files.only_writer` and
# partial files of `files.whole_file`.
_KNOWN_FILES = (
    "config.json", "generation_config.json", ".gitattributes", ".*.lock", ".*.partial",
    *_CARRIED, *embedded.MEASURED_FILES, *_TOKENIZER, *_TERMS,
)  # fmt: skip
_PART = "-{0}-of-{0}".format("[0-9]" * 5)  # of a sharded model
_MODEL_WEIGHTS = (*MODEL_WEIGHTS, embedded.SHARD, f"model{_PART}.safetensors", f"pytorch_model{_PART}.bin")

_TGI = "text-generation-inference"
# Formats that other programs read, those that hold the most last.
_PROGRAMS: dict[str, tuple[Target, ...]] = {
    f"vLLM {VLLM_VERSIONS}": ("vllm",),
    _TGI: ("original-v2", "original-v1"),
    "TensorRT-LLM up to 1.2": ("original-v1",),
}

# What the original project's loader makes of every checkpoint.
_ORIGINAL_HEADS = 5


@dataclass(frozen=True)
class Exported:
    """What `export` wrote.

    Attributes:
        folder: the written folder.
        format: its format.
        base_model: the base model that it names.
        heads: as written: converted, with the projection they had.
        notes: what a user should know, such as which programs cannot read it.
        launch: for vLLM, the shell command that serves the base model with these heads. None for other formats, and
            if vLLM would not start; the notes then say why.
    """

    folder: Path
    format: Target
    base_model: str
    heads: MedusaHeads
    notes: list[str]
    launch: str | None = None


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
    license: str | None = None,
    repo_id: str | None = None,
) -> Exported:
    """Write the heads of a checkpoint in another format; they draft the same tokens there.

    The model card, its figures and the trees are copied as well; figures measured with another storage are not.

    Args:
        path_or_hub_id: of the heads, in any known format.
        folder: where to write; it appears when it is complete.
        format: one of `TARGETS`.
        storage: of the projections: "int8" or "fp8" stores floats in 8 bits, "float" turns 8 bits back into floats
            (rounded in 16 bits); None keeps them.
        dtype: float16, bfloat16 or float32, of all weights of the heads that are not in 8 bits; None keeps the file's
            (if the base model's lm_head is included, the wider of the two). "embedded" copies the base model's files
            unchanged.
        base_model: hub id or folder; overrides the one that the heads name.
        base_revision: its branch, tag or commit; by default the one that the heads name, unless `base_model` overrides
            it.
        file: "pt" or "safetensors", for the original formats. The original project's code reads only the former,
            text-generation-inference the latter, with the tokenizer next to it.
        overwrite: replace a folder that holds a checkpoint of heads and nothing else.
        revision: branch, tag or commit of the heads on the hub.
        license: identifier of the heads' license for the card of "hub"; None for the one that their card names.
        repo_id: repository of the hub that the card of "hub" shows in its examples, OWNER/NAME.

    Raises:
        ValueError: heads that the format cannot hold (the message says what can be done), an unreadable checkpoint, no
            known base model or one of other sizes, a file to copy that is a link out of its folder (and of the hub's
            cache), or a `folder` that exists or that holds what is read.
        OSError: a file could not be written; a folder that was there before is unchanged.
    """
    if format not in TARGETS:
        raise ValueError(f"format: expected one of {', '.join(TARGETS)}, got {format!r}")
    if file not in ("pt", "safetensors"):
        raise ValueError(f"file: expected pt or safetensors, got {file!r}")
    out = Path(folder).expanduser().resolve()
    # The base model may be in the heads' own repository.
    files = [*HUB_FILES, *_CARRIED, *_TOKENIZER, *_TERMS, *(_BASE_FILES if format == "embedded" else [])]
    source = fetch_folder(path_or_hub_id, revision, files=files)
    _check_place(out, source, overwrite)
    stated, stated_revision = stated_base_model(source)
    base = stated if base_model is None else str(base_model)
    if base is None:
        raise ValueError(f"base_model: expected a folder or hub id, because {source} names none, got None")
    if base_revision is None and base == stated:
        base_revision = stated_revision
    local = _folder_of(base)
    if local is not None:
        base = str(local)
        _check_place(out, local, overwrite)
    # The hub is not asked about the base model that the heads name themselves, unless its weights are needed.
    sizes = stated_sizes(base, base_revision) if local is not None or base_model is not None else {}
    vocab_size = None if base_model is None else sizes.get("vocab_size")
    given = read_heads(source, hidden_size=sizes.get("hidden_size"), vocab_size=vocab_size).heads
    heads = _converted(given, storage, dtype)
    obstacle = _obstacle(heads, format, heads.storage)
    if obstacle is not None:
        wanted, got, remedy = obstacle
        raise ValueError(f"heads: expected {wanted} for {format} ({remedy}), got {got}")
    base_folder = functools.cache(lambda: fetch_folder(base, base_revision, "base_model", _BASE_FILES))
    if format == "embedded":
        sizes = stated_sizes(str(base_folder()))
    for name, size in sizes.items():
        if size != getattr(heads, name):
            raise ValueError(
                f"base_model: expected {name} {getattr(heads, name)} like the heads in {source}, got {size} in {base}"
            )

    notes: list[str] = []
    was, now = f"projections stored in {given.storage}", f"projections stored in {heads.storage}"
    if format == "vllm" and heads.token_map is not None:
        was, now = f"{heads.num_candidates} of the tokens", f"all {heads.vocab_size} tokens"
        heads = heads.remade(token_map=None)
        notes.append(
            f"vLLM {VLLM_VERSIONS} cannot read a token_map: the heads are written with the whole lm_head, so they may "
            f"propose any of {heads.vocab_size} tokens. The text is the same; the acceptance may differ"
        )
    lm_head = None
    if format in ("original-v1", "vllm") and heads.shared_projection:
        heads, lm_head = _with_lm_head(heads, base_folder(), dtype)
    if format == "embedded":
        embedded.base_files(base_folder())  # refuses a base model before anything is written
    with whole_folder(out, overwrite) as staging:
        if format == "vllm":
            write_json(staging / "config.json", vllm.fields(heads, base, base_revision), indent=2)
            save_tensors(vllm.tensors(heads, lm_head), staging / vllm.WEIGHTS)
        elif format == "embedded":
            fields = original.fields(heads, base)
            own = {key: value for key, value in fields.items() if key.startswith("medusa_") or key == "version"}
            embedded.write(staging, base_folder(), unpack(heads), own)
        elif format in _OWN:
            original.write_heads(heads, staging, base_model=base, base_revision=base_revision)
        else:
            notes += _reader_notes(heads, format, file)
            _write_original(heads, lm_head, staging, file, original.fields(heads, base, base_revision))
            if file == "safetensors":
                notes += _copy_tokenizer(Path(base) if lm_head is None else base_folder(), staging, base)
        # Last: a base model's folder may also have files of these names.
        notes += _carry(source, staging, was, now)
        if format == "hub":
            for terms in (file for kind in _TERMS for file in source.glob(kind)):
                shutil.copyfile(own_file(terms), staging / terms.name)
            notes += hub.complete(staging, heads, base, base_revision, license, repo_id)
    launch = None
    if format == "vllm":
        obstacles = vllm.obstacles(out, base, source)
        notes += obstacles
        launch = None if obstacles else vllm.launch(heads, out, base, base_revision)
    return Exported(out, format, str(out) if format == "embedded" else base, heads, notes, launch)


def export_plain(
    name: str | Path, folder: str | Path, *, dtype: torch.dtype | None = None, revision: str | None = None
) -> Path:
    """Write a model without heads, such as a GGUF file, as an ordinary folder, with tokenizer and chat template.

    Args:
        name: folder, GGUF file or hub id of the model.
        folder: where to write; it appears when it is complete.
        dtype: of the weights; None for the model's own (of a GGUF file float32).
        revision: branch, tag or commit on the hub.

    Raises:
        ValueError: no such model, a damaged one, or a `folder` that exists.
        OSError: a file could not be written.
    """
    out = Path(folder).expanduser().resolve()
    if out.exists():
        raise ValueError(f"folder: expected a new one, got {out}")
    tokenizer = load_tokenizer(name, revision)
    model = load_model(name, None, dtype="auto" if dtype is None else dtype, **at(revision))
    with whole_folder(out) as staging:
        model.save_pretrained(staging)
        tokenizer.save_pretrained(staging)
    return out


def _folder_of(base_model: str) -> Path | None:
    """Return the folder that a base model's name means, or None for a hub id or a path of another machine."""
    path = Path(base_model).expanduser()
    if path.is_dir():
        return path.resolve()
    # Elsewhere a relative path would mean another folder, or a hub id.
    if base_model.startswith((".", "~")) or (not path.is_absolute() and base_model.count("/") > 1):
        raise ValueError(f"base_model: expected a hub id or a folder that exists, got {base_model!r}")
    return None


def _check_place(out: Path, read: Path, overwrite: bool) -> None:
    """Raise `ValueError` for a folder that exists, unless it may be overwritten: only heads, and not what is read."""
    if not out.exists():
        return
    if out == read or out in read.parents:
        raise ValueError(f"folder: expected another one than what is read, got {out}")
    if not overwrite:
        raise ValueError(f"folder: expected a new one (or overwrite, --overwrite), got {out}")
    if not out.is_dir() or (any(out.iterdir()) and not any(module.recognise(out) for module in FORMATS)):
        raise ValueError(f"folder: expected a checkpoint of heads to overwrite, got {out}")
    entry = unrelated_entry(out)
    if entry is not None:
        raise ValueError(f"folder: expected a checkpoint of heads alone to overwrite, got {out} with {entry} in it")


def unrelated_entry(folder: Path) -> str | None:
    """Return the name of a file or folder that does not belong to a checkpoint of heads, or None.

    A folder with heads alone in one file has no weights of a model; any other may.
    """
    known = (*_KNOWN_FILES, *(original.WEIGHTS if original.recognise(folder) else _MODEL_WEIGHTS))
    for entry in sorted(folder.iterdir()):
        if entry.is_dir():
            ours = entry.name == hub.CODE and {file.name for file in entry.iterdir()} <= {*hub.CODE_FILES}
        else:
            ours = any(fnmatchcase(entry.name, pattern) for pattern in known)
        if not ours:
            return entry.name
    return None


def _obstacle(heads: MedusaHeads, target: Target, storage: Storage) -> tuple[str, str, str] | None:
    """Return what a format expects of heads with this storage, what it would get, and what can be done, or None.

    Everything that says which heads a format can hold asks here.
    """
    if target in _OWN:
        return None
    anywhere = "native and embedded hold it"
    if heads.root_rank:
        remedy = f"{anywhere}; those trained with heads.root_rank 0 do not have it"
        return "heads whose only input is the hidden state", f"root_rank {heads.root_rank}", remedy
    if heads.feature_layers:
        remedy = f"{anywhere}; those trained with heads.feature_layers [] do not read them"
        return "heads that read the last hidden state alone", f"feature_layers {list(heads.feature_layers)}", remedy
    if heads.parent_rank:
        remedy = f"{anywhere}; those trained with heads.parent_rank 0 do not"
        return "heads whose drafts do not depend on their parent token", f"parent_rank {heads.parent_rank}", remedy
    if storage != "float":
        return "projections in floats", storage, f"{anywhere}; storage float, --storage float, turns them back"
    if heads.token_map is not None and not (target == "vllm" and heads.shared_projection):
        remedy = f"{anywhere}; what a trimmed one never proposes has no projection"
        return "the whole vocabulary", f"{heads.num_candidates} of {heads.vocab_size} tokens", remedy
    if target == "original-v2" and not heads.shared_projection:
        return "a projection shared with lm_head", "own", "original-v1 holds own ones"
    if target == "original-v2" and heads.num_layers > 1:
        remedy = f"{anywhere}; the original project's code makes one block of several"
        return "one residual block per head", str(heads.num_layers), remedy
    return None


@dataclass(frozen=True)
class Reader:
    """Another program, and whether it can read some heads.

    Attributes:
        program: its name and versions.
        options: arguments of `medusa export` that write the heads for it, or None if it cannot read them.
        reason: why it cannot; empty if it can.
    """

    program: str
    options: str | None
    reason: str = ""


def readers(heads: MedusaHeads, storage: Storage | None = None) -> list[Reader]:
    """Return which other programs can read such heads, stored as they are or with another `storage`.

    The weights do not matter: they may be on the meta device.
    """
    storage, found = storage or heads.storage, []
    for program, targets in _PROGRAMS.items():
        obstacles = [(target, _obstacle(heads, target, "float")) for target in targets]
        fitting = next((target for target, obstacle in obstacles if obstacle is None), None)
        if fitting is None:
            # Of the formats, the last one can hold the most.
            wanted, got, _ = obstacles[-1][1] or ("", "", "")
            found.append(Reader(program, None, f"it reads {wanted}, these have {got}"))
        else:
            floats = "" if storage == "float" else " --storage float"
            file = " --file safetensors" if program == _TGI else ""
            found.append(Reader(program, f"--format {fitting}{file}{floats}"))
    return found


def _converted(heads: MedusaHeads, storage: Storage | None, dtype: torch.dtype | None) -> MedusaHeads:
    """Return heads with another storage of the projections and another dtype, or raise `ValueError`."""
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype: expected float16, bfloat16, float32 or None, got {dtype}")
    if storage not in (None, "float", "int8", "fp8"):
        raise ValueError(f"storage: expected 'float', 'int8', 'fp8' or None, got {storage!r}")
    wanted = heads.w1.dtype if dtype is None else dtype
    if storage in (None, heads.storage):
        found = heads.to(wanted)
    elif storage == "float":
        found = heads.remade(dtype=wanted)
        stored, scale, floats = heads.get_buffer("w2"), heads.get_buffer("w2_scale"), found.get_parameter("w2")
        for head in range(heads.num_heads):
            floats[head] = stored[head].float() * scale[head, :, None]
    else:
        # Quantised before the conversion, so that weights are rounded once.
        found = heads.quantized(storage).to(wanted)
    # Weights in 8 bits have not been converted.
    names = not_finite({name: weight for name, weight in unpack(found).items() if weight.dtype in DTYPES})
    if names:
        raise ValueError(f"dtype: expected one that holds {names[0]}, got {dtype}, in which it is not finite")
    return found


def _with_lm_head(heads: MedusaHeads, base: Path, dtype: torch.dtype | None) -> tuple[MedusaHeads, torch.Tensor]:
    """Return heads and the base model's lm_head in `dtype`, or in the wider dtype of the two."""
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


def _reader_notes(heads: MedusaHeads, target: Target, file: Literal["pt", "safetensors"]) -> list[str]:
    """Return notes on how other programs read the original formats; docs/export.md has more on each."""
    lost = "accepts none of their drafts" if target == "original-v2" else "passes over their biases"
    notes = [f"not for vLLM, which takes this folder without an error but {lost}: --format vllm is for it"]
    misread = {
        "several residual blocks per head": heads.num_layers > 1,
        f"other than {_ORIGINAL_HEADS} heads": file == "pt" and heads.num_heads != _ORIGINAL_HEADS,
        "a shared projection": file == "pt" and target == "original-v2",
    }
    if any(misread.values()):
        which = " and ".join(name for name, found in misread.items() if found)
        notes.append(
            f"the original project's code misreads heads with {which} without a word; text-generation-inference and "
            "TensorRT-LLM read them as they are"
        )
    return notes


def _copy_tokenizer(base: Path, staging: Path, base_model: str) -> list[str]:
    """Copy the base model's tokenizer, which text-generation-inference looks for here, or return a note."""
    files = [base / name for name in _TOKENIZER if (base / name).is_file()]
    for file in files:
        shutil.copyfile(own_file(file), staging / file.name)
    if files:
        return []
    return [
        f"text-generation-inference looks for the tokenizer beside these heads: copy the files of {base_model} there "
        "(tokenizer.json, tokenizer_config.json and the like)"
    ]


def _carry(source: Path, staging: Path, was: str, now: str) -> list[str]:
    """Copy card, figures and tree. Return a note if the figures are of heads that `was` describes, not `now`."""
    for name in _CARRIED:
        if (source / name).is_file() and (name != _MEASURED or was == now):
            shutil.copyfile(own_file(source / name), staging / name)
    if was == now or not any((source / name).is_file() for name in (_CARD, _MEASURED)):
        return []
    card = staging / _CARD
    if card.is_file():
        card.write_bytes(_marked(card.read_bytes(), was, now))
    return [
        f"the figures are of heads with {was}, and these have {now}: {_MEASURED} is left out, and {_CARD} says so if "
        "there is one"
    ]


def _marked(card: bytes, was: str, now: str) -> bytes:
    """Return a model card that states, below its front matter, which heads its figures are of."""
    note = f"> The heads here have {now}. All figures below are of heads with {was}.\n\n"
    front = re.match(rb"---\r?\n.*?\n---\r?\n\s*", card, re.DOTALL)
    end = 0 if front is None else front.end()
    return card[:end] + note.encode() + card[end:]


def _write_original(
    heads: MedusaHeads, lm_head: torch.Tensor | None, staging: Path, file: str, fields: dict[str, Any]
) -> None:
    tensors = unpack(heads)
    if lm_head is not None:
        tensors |= {f"{head}.{heads.num_layers}.weight": lm_head for head in range(heads.num_heads)}
        del fields["version"]
    if heads.b1 is None:
        # The original project's code would start missing biases with random numbers.
        zeros = torch.zeros(heads.hidden_size, dtype=heads.w1.dtype)
        names = [f"{head}.{layer}.linear.bias" for head in range(heads.num_heads) for layer in range(heads.num_layers)]
        tensors |= {name: zeros.clone() for name in names}
    write_json(staging / "config.json", fields, indent=2)
    save_tensors(tensors, staging / f"medusa_lm_head.{file}")
