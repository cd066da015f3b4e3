"""Malicious checkpoints: refused by name and cheaply, before memory of the claimed size is allocated."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from limits import MIB, bounded
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from medusa_decoding import MedusaModel
from medusa_decoding.checkpoints import read_heads

HIDDEN, VOCAB = 8, 11
PT, SAFE = "medusa_lm_head.pt", "medusa_lm_head.safetensors"
Tensors = dict[str, torch.Tensor]
BLOCK = {"0.0.linear.weight": torch.ones(HIDDEN, HIDDEN)}
WHOLE = BLOCK | {"0.1.weight": torch.ones(VOCAB, HIDDEN)}


def pt(tensors: Any) -> Callable[[Path], None]:
    return lambda folder: torch.save(tensors, folder / PT)


def safe(tensors: Tensors) -> Callable[[Path], None]:
    return lambda folder: save_file(tensors, folder / SAFE)


def header(content: bytes | dict[str, Any], length: int | None = None, size: int = 0) -> Callable[[Path], None]:
    """Write a safetensors file by hand: a header of a stated length, and `size` sparse bytes."""

    def write(folder: Path) -> None:
        text = content if isinstance(content, bytes) else json.dumps(content).encode()
        with open(folder / SAFE, "wb") as file:
            file.write(struct.pack("<Q", len(text) if length is None else length) + text)
            file.truncate(file.tell() + size)

    return write


def float32(shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


def named(heads: int, block: torch.Tensor, projection: torch.Tensor) -> Tensors:
    return {f"{k}.0.linear.weight": block for k in range(heads)} | {f"{k}.1.weight": projection for k in range(heads)}


def vllm(tensors: Tensors, **config: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        save_file(tensors, folder / "model.safetensors")
        sizes = {"model_type": "medusa", "hidden_size": HIDDEN, "vocab_size": VOCAB}
        (folder / "config.json").write_text(json.dumps(sizes | config))

    return write


def index(weight_map: Any) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    return write


def config(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        save_file(WHOLE, folder / SAFE)
        (folder / "config.json").write_text(text)

    return write


def expanded(*shape: int) -> torch.Tensor:
    return torch.zeros(1).expand(*shape)


HOSTILE: dict[str, tuple[Callable[[Path], None], str]] = {
    "views of one number": (
        pt(named(2, expanded(8192, 8192), expanded(VOCAB, 8192))),
        rf"{PT}: 0\.0\.linear\.weight: expected 268435456 bytes of values, got 4 ",
    ),
    "a sparse tensor": (
        pt({"0.0.linear.weight": torch.eye(8).to_sparse()}),
        rf"{PT}: 0\.0\.linear\.weight: expected a plain tensor, got a sparse",
    ),
    "a name of head and block 999": (
        safe({"999.999.linear.weight": torch.ones(1, 1)}),
        r"expected the tensors of complete heads, got missing at least 0\.0\.linear\.weight, .* and 97 more",
    ),
    "a header of 8 exabytes": (header(b"{}", 2**63 - 1), rf"{SAFE}: expected a safetensors file"),
    "a shape of terabytes": (
        header({"0.0.linear.weight": float32([2**20, 2**20], 0, 256)}, size=256),
        rf"{SAFE}: expected a safetensors file",
    ),
    "a token_map of negative ids": (
        safe(BLOCK | {"token_map": torch.tensor([-1, 3])}),
        r"token_map: expected ids in \[0, 11\), got -1 to 3",
    ),
    "vllm: a name twice": (
        vllm(
            {"blocks.0.layers.0.weight": torch.ones(8, 8), "medusa_heads.blocks.0.layers.0.weight": torch.ones(8, 8)}
            | {"lm_heads.0.weight": torch.ones(11, 8)}
        ),
        r"expected each name once, with or without medusa_heads\., got blocks\.0\.layers\.0\.weight twice",
    ),
    "a shard elsewhere": (
        index({"medusa_head.0.0.linear.weight": "../secret.safetensors"}),
        "names of files beside it",
    ),
    "a config nested deeply": (config("[" * 200_000), r"config\.json: expected JSON"),
}


@pytest.fixture
def base(tmp_path: Path, tiny_llama: LlamaForCausalLM) -> Path:
    tiny_llama.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def folder(tmp_path: Path, base: Path) -> Path:
    """A folder whose config names a base model."""
    target = tmp_path / "heads"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({"base_model_name_or_path": str(base)}))
    return target


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_heads_are_refused_at_no_cost(folder: Path, base: Path, case: str) -> None:
    write, message = HOSTILE[case]
    write(folder)
    for read in (
        lambda: read_heads(folder, vocab_size=VOCAB),
        lambda: MedusaModel.from_pretrained(folder, base),
    ):
        with bounded(ValueError, seconds=2, memory=128 * MIB) as said:
            read()
        assert said, "read without a word"
        assert re.search(message, said[0]), said[0][:400]
        assert len(said[0]) < 1000


def test_sizes_are_compared_with_the_base_model_before_allocation(folder: Path) -> None:
    """The file really holds 1 GiB of zeros, but is sparse on disk."""
    side = 8192
    names = {f"{k}.0.linear.weight": float32([side, side], 4 * k * side**2, 4 * (k + 1) * side**2) for k in range(4)}
    header(names, size=16 * side**2)(folder)
    for base_model in (None, folder.parent / "base"):
        with bounded(ValueError, seconds=2, memory=128 * MIB) as said:
            MedusaModel.from_pretrained(folder, base_model)
        assert re.search(r"0\.0\.linear\.weight in .*expected hidden size 8 \(the base model's\), got 8192", said[0])


@pytest.mark.parametrize("size", [10**30, -1, "11"])
def test_a_wrong_vocabulary_size_in_the_config_is_ignored(folder: Path, base: Path, size: Any) -> None:
    """Heads that share lm_head: a wrong number does not become V, and allocates nothing."""
    save_file(BLOCK, folder / SAFE)
    (folder / "config.json").write_text(json.dumps({"vocab_size": size, "base_model_name_or_path": str(base)}))
    with bounded(seconds=1, memory=64 * MIB):
        read = read_heads(folder)
    assert read.heads.vocab_size == VOCAB
    with bounded(seconds=5):
        model = MedusaModel.from_pretrained(folder)
    assert model.heads is not None
    assert model.heads.vocab_size == VOCAB


@pytest.mark.parametrize("name", ["a" * 5000, "a\0b", "/dev/zero"])
def test_an_invalid_base_model_name_is_refused(folder: Path, name: str) -> None:
    save_file(BLOCK, folder / SAFE)
    (folder / "config.json").write_text(json.dumps({"base_model_name_or_path": name}))
    with bounded(ValueError, seconds=2) as said:
        read_heads(folder)
    assert said[0].startswith("vocab_size: expected the base model's")


BESIDE = {
    "medusa_tree.json": "[[NaN]]",
    "calibration.json": '{"accuracy": [[NaN]]}',
    "measured.json": '{"accuracy": {"hits": 1}}',
    "tuning.json": '{"cases": [[]]}',
}


@pytest.mark.parametrize("name", BESIDE)
def test_hostile_files_next_to_heads(folder: Path, name: str) -> None:
    """Measurements are ignored with a warning; a tree is refused."""
    save_file(WHOLE, folder / SAFE)
    (folder / name).write_text(BESIDE[name])
    with bounded(*([ValueError] if name == "medusa_tree.json" else []), seconds=3) as said:
        MedusaModel.from_pretrained(folder).free()
    assert bool(said) == (name == "medusa_tree.json")
