"""Damaged, odd and hostile base models: a documented error within bounds of time and memory, or a model that works."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from limits import MIB, bounded
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from medusa_decoding import MedusaHeads, MedusaModel
from medusa_decoding.checkpoints import pretrained, write_heads
from medusa_decoding.checkpoints.pretrained import stated_sizes
from medusa_decoding.cli import main
from medusa_decoding.roofline.shapes import find_shape
from medusa_decoding.training.config import Config
from medusa_decoding.training.loop.backbone import TrainingBackbone

ODD: list[Any] = [
    None, 0, -1, 7, 10**9, 10**30, -(10**30), 1.5, float("nan"), float("inf"), 1e308, "", "8", True, [], [1], [[[]]],
    {}, {"a": 1}, "a/b", "load", "int8", "float16",
]  # fmt: skip
FIELDS = [
    "architectures", "attention_bias", "dtype", "eos_token_id", "head_dim", "hidden_act", "hidden_size", "id2label",
    "intermediate_size", "max_position_embeddings", "mlp_bias", "model_type", "num_attention_heads",
    "num_hidden_layers", "num_key_value_heads", "num_labels", "output_attentions", "pad_token_id",
    "quantization_config", "rms_norm_eps",
    "rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "sub_configs", "text_config",
    "tie_word_embeddings", "to_dict", "transformers_weights", "vocab_size", "_attn_implementation",
]  # fmt: skip
DOCUMENTED = (ValueError, FloatingPointError)


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


def train_on(base: Path, device: str = "cpu") -> None:
    model = {"name": str(base), "dtype": "float32", "quantization": "none"}
    rest = {"data": {"train": [{"path": "none"}]}, "output": {"folder": "none"}}
    TrainingBackbone.load(Config.of({"method": "medusa-1", "model": model, **rest}), torch.device(device))


WAYS: list[Callable[[Path], Any]] = [
    decode,
    lambda base: train_on(base, "meta"),
    lambda base: find_shape(str(base)),
    lambda base: stated_sizes(str(base)),
]


def within_bounds(base: Path, ways: list[Callable[[Path], Any]] = WAYS) -> list[str]:
    """Load a folder in several ways, each within bounds; return the messages."""
    said = []
    for way in ways:
        with bounded(*DOCUMENTED, seconds=3, memory=64 * MIB) as words:
            way(base)
        said += words
    assert not any("\n" in words for words in said)
    return said


def refused(base: Path) -> None:
    for way in (decode, train_on):
        with bounded(*DOCUMENTED, seconds=3, memory=64 * MIB) as words:
            way(base)
        assert words
        assert "\n" not in words[0]


@pytest.mark.parametrize("field", FIELDS)
def test_odd_values_of_a_config(base: Path, field: str) -> None:
    file = base / "config.json"
    before = file.read_text()
    for number, value in enumerate(random.Random(field).sample(ODD, 12)):
        file.write_text(before)
        change(file, **{field: value})
        within_bounds(base, [decode, WAYS[1 + number % 3]])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["default", "linear", "dynamic", "yarn", "llama3", "longrope", "unheard of"])
def test_odd_values_of_rotary_embeddings(base: Path, kind: str) -> None:
    plain = {"rope_theta": 10000.0, "rope_type": kind, "factor": 2.0, "original_max_position_embeddings": 16}
    plain |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "short_factor": [1.0, 1.0], "long_factor": [1.0, 1.0]}
    drawn = random.Random(kind)
    for field in (*plain, "attention_factor", "partial_rotary_factor", "beta_fast"):
        for value in drawn.sample([*ODD, 10**6], 5):
            change(base / "config.json", rope_parameters=plain | {field: value})
            with bounded(*DOCUMENTED, seconds=3, memory=64 * MIB):
                decode(base)


@pytest.mark.slow
@pytest.mark.parametrize(
    "field",
    [
        "pad_token_id", "eos_token_id", "no_repeat_ngram_size", "forced_bos_token_id", "sequence_bias", "max_length",
        "exponential_decay_length_penalty", "begin_suppress_tokens", "suppress_tokens", "validate", "compile_config",
        "repetition_penalty", "temperature", "do_sample", "stop_strings", "custom_generate",
    ],
)  # fmt: skip
def test_odd_values_of_a_generation_config(base: Path, field: str) -> None:
    for value in ODD:
        if (field, value) == ("no_repeat_ngram_size", True):
            continue  # transformers' own processor takes it for 1, and torch does not
        (base / "generation_config.json").write_text(json.dumps({field: value}))
        with bounded(*DOCUMENTED, seconds=3, memory=64 * MIB):
            decode(base)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "content",
    [
        None, b"", b"[1]", b'"x"', b"null", b"[" * 200_000, b'{"a":' * 100_000, b'{"model_type": "lla', b"\0" * 100,
        "{}".encode("utf-16"), b'{"a":' + b"9" * 5000 + b"}", 100_000_000,
    ],
    ids=["folder", "empty", "list", "text", "null", "deep", "deeper", "truncated", "zeros", "utf-16", "digits", "huge"],
)  # fmt: skip
def test_unreadable_settings_files_are_named(base: Path, name: str, content: bytes | int | None) -> None:
    file = base / name
    file.unlink()
    if content is None:
        file.mkdir()
    elif isinstance(content, int):
        with file.open("wb") as sparse:
            sparse.truncate(content)
    else:
        file.write_bytes(content)
    said = within_bounds(base)
    missing = name == "generation_config.json" and content is None  # a folder is not a file
    assert bool(said) != missing


def test_truncated_weights_are_refused(base: Path) -> None:
    file = base / "model.safetensors"
    whole = file.read_bytes()
    for length in (0, 1, 8, 9, 50, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        refused(base)
    for stated in (0, 1, 2**31, 2**63, 2**64 - 1, 2 * len(whole)):
        file.write_bytes(struct.pack("<Q", stated) + whole[8:])
        refused(base)


@pytest.mark.parametrize(
    "stated",
    [
        {"shape": [10**9, 10**9]}, {"dtype": "F64"}, {"dtype": "I4"}, {"data_offsets": [0, 10**12]}, {"shape": [88]},
        {"data_offsets": [-5, 0]}, {"shape": "many"},
    ],
)  # fmt: skip
def test_headers_that_contradict_the_file_are_refused(base: Path, stated: dict[str, Any]) -> None:
    file = base / "model.safetensors"
    whole = file.read_bytes()
    end = 8 + struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8:end])
    header["lm_head.weight"] |= stated
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + whole[end:])
    refused(base)


@pytest.mark.parametrize(
    "index",
    [
        {"weight_map": {"lm_head.weight": "../other/model.safetensors"}},
        {"weight_map": {"lm_head.weight": "/etc/hostname"}}, {"weight_map": {"lm_head.weight": "gone.safetensors"}},
        {"weight_map": {"lm_head.weight": 5}}, {"weight_map": [1]}, {"weight_map": {}}, {}, [],
    ],
)  # fmt: skip
def test_bad_indices_are_refused(base: Path, index: Any) -> None:
    other = base.parent / "other"
    other.mkdir()
    (base / "model.safetensors").rename(other / "model.safetensors")
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
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
    for content in ({"lm_head.weight": Opens()}, [1], {"a": tensors}, tensors | {"lm_head.weight": wide}):
        torch.save(content, file)
        refused(base)
    for damaged in (b"", b"\x80\x02c", b"PK\x03\x04" + b"\0" * 50):
        file.write_bytes(damaged)
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
        {"intermediate_size": 2**21}, {"num_attention_heads": 2**12, "head_dim": 2**12}, {"vocab_size": None},
        {"num_attention_heads": 2, "num_key_value_heads": 3}, {"num_labels": 10**9}, {"tie_word_embeddings": "x"},
    ],
)  # fmt: skip
def test_sizes_are_compared_before_memory_is_allocated(base: Path, values: dict[str, Any]) -> None:
    change(base / "config.json", **values)
    refused(base)


def test_a_wrong_vocabulary_is_refused(base: Path) -> None:
    tensors = load_file(base / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        wrong = tensors | {name: torch.zeros(13, 8)}
        save_file(wrong, base / "model.safetensors", {"format": "pt"})
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
    @pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"[" * 200_000, b"\xff" * 9, b'{"model": {"type": "BPE"}}'])
    def test_a_damaged_tokenizer_is_named(self, folder: Path, name: str, content: bytes) -> None:
        (folder / name).write_bytes(content)
        with bounded(ValueError, seconds=5, memory=64 * MIB):
            pretrained.load_tokenizer(folder)

    @pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
    def test_an_unknown_tokenizer_class_is_named(self, folder: Path, file: str) -> None:
        names = ["AutoTokenizer", "AutoModelForCausalLM", "RagRetriever", "pipeline", "logging"]
        for name in names:
            getattr(transformers, name)  # loading the name imports it, at the speed of transformers and the machine
        for value in (*ODD, *names):
            change(folder / file, tokenizer_class=value)
            with bounded(ValueError, seconds=3, memory=64 * MIB):
                assert hasattr(pretrained.load_tokenizer(folder), "encode")

    @pytest.mark.parametrize("field", ["auto_map", "added_tokens_decoder", "chat_template", "eos_token"])
    def test_odd_values_in_a_tokenizer_config(self, folder: Path, field: str) -> None:
        for value in ODD:
            change(folder / "tokenizer_config.json", **{field: value})
            with bounded(ValueError, seconds=5, memory=64 * MIB):
                pretrained.load_tokenizer(folder)


def test_commands_end_with_one_line(base: Path, capfd: pytest.CaptureFixture[str]) -> None:
    change(base / "config.json", hidden_size=10**12)
    simulate = ["simulate", "--model", str(base), "--device", "a40"]
    for command in (["tune", "--model", str(base.parent / "heads")], simulate):
        assert main(command) == 2
        said = [line for line in capfd.readouterr().err.splitlines() if "hidden_size" in line]
        assert len(said) == 1
        assert said[0].startswith("medusa: ")
