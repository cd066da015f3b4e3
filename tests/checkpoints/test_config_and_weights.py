"""A config and weights of different models are refused by everything that loads a model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from medusa_decoding import MedusaHeads, MedusaModel
from medusa_decoding.checkpoints import pretrained, write_heads
from medusa_decoding.checkpoints.base_model import load_base_model
from medusa_decoding.training.config import Config
from medusa_decoding.training.loop.backbone import TrainingBackbone


@pytest.fixture
def folder(tmp_path: Path, tiny_llama: LlamaForCausalLM) -> Path:
    """A model of two layers, and heads."""
    tiny_llama.save_pretrained(tmp_path / "base")
    write_heads(MedusaHeads(8, 11, 2), tmp_path / "heads", base_model="../base")
    return tmp_path


def say(folder: Path, **values: Any) -> None:
    """Change the base model's config."""
    file = folder / "base" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def add(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Add tensors to the base model's file."""
    file = folder / "base" / "model.safetensors"
    save_file(load_file(file) | tensors, file, {"format": "pt"})


def backbone(folder: Path) -> Any:
    model = {"name": str(folder / "base"), "dtype": "float32", "quantization": "none"}
    rest = {"data": {"train": [{"path": "none"}]}, "output": {"folder": "none"}}
    return TrainingBackbone.load(Config.of({"method": "medusa-1", "model": model, **rest}), torch.device("cpu"))


def loaded(folder: Path) -> Any:
    with MedusaModel.from_pretrained(folder / "heads") as model:
        return model.base


@pytest.mark.parametrize("load", [loaded, backbone])
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_hidden_layers": 1}, r"\(1 layers\), got also model\.layers\.1\.input_layernorm\.weight, .* and 5 more"),
        ({"num_hidden_layers": 3}, r"expected every weight of LlamaForCausalLM, got none for model\.layers\.2\."),
        ({"intermediate_size": 16}, r"model\.layers\.0\.mlp\.\w+\.weight in .*: expected shape .*16.*, got \[.*12.*\]"),
        (
            {"attention_bias": True},
            r"expected every weight of LlamaForCausalLM, got none for .*self_attn\.\w_proj\.bias",
        ),
        ({"num_key_value_heads": 2}, r"self_attn\.\w_proj\.weight in .*: expected shape \[8, 8\] .*, got \[4, 8\]"),
    ],
)
def test_weights_of_another_model_are_refused(folder: Path, load: Any, values: dict[str, Any], message: str) -> None:
    say(folder, **values)
    with pytest.raises(ValueError, match=message):
        load(folder)


def test_mismatched_shapes_are_never_ignored(folder: Path) -> None:
    say(folder, intermediate_size=16)
    with pytest.raises(ValueError, match=r"expected shape .*, got"):
        pretrained.load_model(folder / "base", ignore_mismatched_sizes=True)


def test_extra_tensors_of_old_checkpoints_are_accepted(folder: Path, tiny_llama: LlamaForCausalLM) -> None:
    add(folder, {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": torch.ones(2) for layer in (0, 1)})
    add(folder, {"medusa_head.0.0.linear.weight": torch.ones(8, 8)})
    tokens = torch.tensor([[3, 4, 5]])
    for load in (loaded, backbone):
        found = load(folder)
        assert torch.equal(getattr(found, "causal", found)(tokens).logits, tiny_llama(tokens).logits)


class TestNamesOfWeights:
    """As transformers reads them: with or without the decoder's prefix, tied embeddings under either name."""

    @pytest.fixture
    def tied(self, folder: Path, tiny_llama: LlamaForCausalLM) -> LlamaForCausalLM:
        """The base model with tied embeddings, written by its decoder alone: names without the prefix."""
        tiny_llama.config.tie_word_embeddings = True
        tiny_llama.tie_weights()
        (folder / "base" / "model.safetensors").unlink()
        tiny_llama.model.save_pretrained(folder / "base", max_shard_size="1KB")
        assert len(list((folder / "base").glob("model-*.safetensors"))) > 1
        return tiny_llama

    @pytest.mark.parametrize("kind", ["shards", "bin", "some prefixes", "as lm_head", "both names", "two prefixes"])
    def test_names_that_transformers_accepts_are_loaded(self, folder: Path, tied: LlamaForCausalLM, kind: str) -> None:
        base = folder / "base"
        tensors: dict[str, Any] = {}
        for file in sorted(base.glob("model-*.safetensors")):
            tensors |= load_file(file)
        assert "embed_tokens.weight" in tensors
        changed = {
            "bin": tensors,
            "some prefixes": {f"model.{key}" if ".1." in key else key: tensor for key, tensor in tensors.items()},
            "as lm_head": {key.replace("embed_tokens", "lm_head"): tensor for key, tensor in tensors.items()},
            "both names": tensors | {"lm_head.weight": tensors["embed_tokens.weight"].clone()},
            "two prefixes": {f"model.model.{key}": tensor for key, tensor in tensors.items()},
        }.get(kind)
        if changed is not None:
            for file in base.glob("model*.safetensors*"):
                file.unlink()
            if kind == "bin":
                torch.save(changed, base / "pytorch_model.bin")
            else:
                save_file(changed, base / "model.safetensors", {"format": "pt"})
        tokens = torch.tensor([[3, 4, 5]])
        assert torch.equal(loaded(folder)(tokens).logits, tied(tokens).logits)

    def test_without_an_lm_head_that_is_not_tied_they_are_refused(self, folder: Path, tied: LlamaForCausalLM) -> None:
        say(folder, tie_word_embeddings=False)
        with pytest.raises(ValueError, match=r"every weight of LlamaForCausalLM, got none for lm_head\.weight$"):
            loaded(folder)


class TestAdapters:
    @pytest.fixture
    def adapter(self, folder: Path, tiny_llama: LlamaForCausalLM) -> Path:
        """An adapter of the model's two layers, whose numbers are not zero."""
        torch.manual_seed(0)
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
        wrapped: Any = peft.get_peft_model(tiny_llama, config)
        wrapped.peft_config["default"].base_model_name_or_path = str(folder / "base")
        wrapped.save_pretrained(folder / "adapter")
        tiny_llama.config.save_pretrained(folder / "adapter")
        write_heads(MedusaHeads(8, 11, 2), folder / "adapted", base_model="../adapter")
        return folder / "adapter"

    @pytest.mark.parametrize("kind", ["dora", "bin"])
    def test_what_peft_writes_is_loaded(self, folder: Path, tiny_llama: LlamaForCausalLM, kind: str) -> None:
        torch.manual_seed(0)
        config = peft.LoraConfig(
            r=2, target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM", use_dora=kind == "dora"
        )
        wrapped: Any = peft.get_peft_model(tiny_llama, config).eval()
        for name, parameter in wrapped.named_parameters():
            if "magnitude" in name:
                torch.nn.init.uniform_(parameter)
        wrapped.peft_config["default"].base_model_name_or_path = str(folder / "base")
        wrapped.save_pretrained(folder / "adapter")
        if kind == "bin":  # as peft wrote adapters before 0.7
            file = folder / "adapter" / "adapter_model.safetensors"
            torch.save(load_file(file), file.with_suffix(".bin"))
            file.unlink()
        ids = torch.tensor([[1, 2, 3]])
        found = load_base_model(None, folder / "adapter")
        torch.testing.assert_close(found(ids).logits, wrapped(ids).logits)

    def test_an_adapter_with_embeddings_of_a_larger_vocabulary_is_refused(self, folder: Path, adapter: Path) -> None:
        file = adapter / "adapter_model.safetensors"
        save_file(load_file(file) | {"base_model.model.lm_head.weight": torch.ones(13, 8)}, file)
        with pytest.raises(ValueError, match=r"lm_head\.weight in .*: expected shape \[11, 8\] .* got \[13, 8\]"):
            MedusaModel.from_pretrained(folder / "adapted")

    def test_an_adapter_of_more_layers_is_refused(self, folder: Path, adapter: Path) -> None:
        file = adapter / "adapter_model.safetensors"
        tensors = load_file(file)
        save_file(tensors | {key.replace(".1.", ".2."): tensors[key].clone() for key in tensors if ".1." in key}, file)
        with pytest.raises(ValueError, match=r"expected an adapter of its base model, got also .*layers\.2\."):
            MedusaModel.from_pretrained(folder / "adapted")

    @pytest.mark.parametrize("beside", [False, True])
    def test_an_adapter_of_fewer_layers_is_refused(self, folder: Path, adapter: Path, beside: bool) -> None:
        """Also if the adapter is in the folder of its model, where transformers finds it by itself."""
        file = adapter / "adapter_model.safetensors"
        save_file({key: tensor for key, tensor in load_file(file).items() if ".1." not in key}, file)
        if beside:
            (folder / "base" / "model.safetensors").rename(adapter / "model.safetensors")
        message = r"expected every weight of the adapter, got none for .*layers\.1\."
        if beside and transformers.__version__.startswith("5.17."):  # which looks for it where it was told not to
            message = "expected weights that fit LlamaForCausalLM, .*Can't find 'adapter_config.json'"
        with pytest.raises(ValueError, match=message):
            MedusaModel.from_pretrained(folder / "adapted")

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"r": 10**9}, "expected a rank from 1 to 2 as in the adapter's weights, got 1000000000"),
            ({"rank_pattern": {"q_proj": 10**9}}, "expected a rank from 1 to 2"),
            ({"megatron_config": {"a": 1}, "megatron_core": "evil"}, "expected no megatron_config"),
        ],
    )
    def test_an_adapter_whose_config_does_not_fit_its_weights_is_refused(
        self, folder: Path, adapter: Path, values: dict[str, Any], message: str
    ) -> None:
        file = adapter / "adapter_config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | values))
        with pytest.raises(ValueError, match=message):
            MedusaModel.from_pretrained(folder / "adapted")


def test_a_model_partly_in_the_hubs_cache_is_fetched(folder: Path) -> None:
    """A download that was stopped leaves an index without its shards: the rest is fetched."""
    cached = folder / "hub" / "models--someone--base"
    snapshot = cached / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(snapshot.name)
    (snapshot / "config.json").write_bytes((folder / "base" / "config.json").read_bytes())
    missing = "model-00001-of-00002.safetensors"
    index = {"metadata": {}, "weight_map": {"lm_head.weight": missing}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"weights that fit LlamaForCausalLM, got someone/base \(OSError") as refused:
        pretrained.load_model("someone/base", cache_dir=folder / "hub", local_files_only=True)
    assert "weight_map" not in str(refused.value)


def test_a_missing_library_of_a_quantisation_is_named(folder: Path) -> None:
    say(folder, quantization_config={"quant_method": "gptq", "bits": 8})
    with pytest.raises(ModuleNotFoundError, match="optimum"):
        loaded(folder)
