"""Damaged and hostile base models: refused in one line, before memory of the claimed size is allocated."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from limits import MIB, bounded
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from medusa_decoding import MedusaHeads, MedusaModel
from medusa_decoding.checkpoints import pretrained, write_heads
from medusa_decoding.training.config import Config
from medusa_decoding.training.loop.backbone import TrainingBackbone


@pytest.fixture
def base(tmp_path: Path, tiny_llama: LlamaForCausalLM) -> Path:
    tiny_llama.save_pretrained(tmp_path / "base")
    write_heads(MedusaHeads(8, 11, 2), tmp_path / "heads", base_model="../base")
    return tmp_path / "base"


def change(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def decode(base: Path) -> None:
    with MedusaModel.from_pretrained(base.parent / "heads") as model:
        model.generate(torch.tensor([[3, 4, 5]]), max_new_tokens=2)


def train_on(base: Path) -> None:
    model = {"name": str(base), "dtype": "float32", "quantization": "none"}
    rest = {"data": {"train": [{"path": "none"}]}, "output": {"folder": "none"}}
    TrainingBackbone.load(Config.of({"method": "medusa-1", "model": model, **rest}), torch.device("cpu"))


def refused(base: Path) -> None:
    for way in (decode, train_on):
        with bounded(ValueError, seconds=3, memory=64 * MIB) as words:
            way(base)
        assert words
        assert "\n" not in words[0]


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("content", [b"", b"[1]", b"[" * 200_000, 100_000_000], ids=["empty", "list", "deep", "huge"])
def test_unreadable_settings_files_are_named(base: Path, name: str, content: bytes | int) -> None:
    file = base / name
    file.write_bytes(b"" if isinstance(content, int) else content)
    if isinstance(content, int):
        with file.open("wb") as sparse:
            sparse.truncate(content)
    refused(base)


def test_truncated_weights_are_refused(base: Path) -> None:
    file = base / "model.safetensors"
    whole = file.read_bytes()
    for content in (b"", whole[: len(whole) // 2], whole[:-1], struct.pack("<Q", 2**63) + whole[8:]):
        file.write_bytes(content)
        refused(base)


@pytest.mark.parametrize("stated", [{"shape": [10**9, 10**9]}, {"data_offsets": [0, 10**12]}, {"shape": [88]}])
def test_headers_that_contradict_the_file_are_refused(base: Path, stated: dict[str, Any]) -> None:
    file = base / "model.safetensors"
    whole = file.read_bytes()
    end = 8 + struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8:end])
    header["lm_head.weight"] |= stated
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + whole[end:])
    refused(base)


@pytest.mark.parametrize("shard", ["../other/model.safetensors", "/etc/hostname"])
def test_an_index_that_points_out_of_the_folder_is_refused(base: Path, shard: str) -> None:
    other = base.parent / "other"
    other.mkdir()
    (base / "model.safetensors").rename(other / "model.safetensors")
    (base / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": shard}}))
    refused(base)


def test_pickled_weights_are_read_without_making_objects(base: Path, tmp_path: Path) -> None:
    """Tensors are read, objects are never made; damaged files give another message."""

    class Opens:
        def __reduce__(self) -> Any:
            return open, (str(tmp_path / "ran"), "w")

    tensors = load_file(base / "model.safetensors")
    (base / "model.safetensors").unlink()
    refused(base)  # no weights at all
    file = base / "pytorch_model.bin"
    torch.save(tensors, file)
    decode(base)
    wide = torch.zeros(1).expand(10**5, 10**5)
    for content in ({"lm_head.weight": Opens()}, tensors | {"lm_head.weight": wide}):
        torch.save(content, file)
        refused(base)
    file.write_bytes(b"PK\x03\x04" + b"\0" * 50)
    refused(base)
    assert not (tmp_path / "ran").exists()


def test_shards_of_a_distributed_run(base: Path) -> None:
    """transformers would read these instead of the model's file, and ignore tensors that it does not know."""
    tensors = load_file(base / "model.safetensors")
    save_file(tensors | {"stray": torch.ones(2)}, base / "shard-00001-model-00001-of-00001.safetensors")
    refused(base)


@pytest.mark.parametrize(
    "values",
    [
        {"hidden_size": 10**12}, {"num_hidden_layers": 10**9}, {"num_hidden_layers": 99}, {"vocab_size": 2**24},
        {"intermediate_size": 2**21}, {"num_attention_heads": 2**12, "head_dim": 2**12}, {"num_hidden_layers": "2"},
        {"num_attention_heads": 2, "num_key_value_heads": 3}, {"num_labels": 10**9},
    ],
)  # fmt: skip
def test_sizes_are_compared_before_memory_is_allocated(base: Path, values: dict[str, Any]) -> None:
    change(base / "config.json", **values)
    refused(base)


class TestTokenizers:
    @pytest.fixture
    def folder(self, base: Path) -> Path:
        from tokenizers import Tokenizer, models

        made = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
        PreTrainedTokenizerFast(tokenizer_object=made).save_pretrained(base)
        assert len(pretrained.load_tokenizer(base)) == 2
        return base

    @pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
    def test_a_damaged_tokenizer_is_named(self, folder: Path, name: str) -> None:
        (folder / name).write_bytes(b"{")
        with pytest.raises(ValueError, match="expected a folder or hub id with a tokenizer"):
            pretrained.load_tokenizer(folder)

    @pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
    def test_a_class_of_transformers_that_is_no_tokenizer_is_never_called(self, folder: Path, file: str) -> None:
        for name in ("AutoModelForCausalLM", "pipeline"):
            change(folder / file, tokenizer_class=name)
            with pytest.raises(ValueError, match=f"tokenizer_class: expected a tokenizer, got {name}"):
                pretrained.load_tokenizer(folder)
