"""Full models with heads in them, and their base model as transformers loads it."""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from medusa_decoding.checkpoints import load_base_model, read_heads, write_heads
from medusa_decoding.checkpoints.reading import stated_base_model
from medusa_decoding.heads import MedusaHeads

Tensors = dict[str, torch.Tensor]
MakeTensors = Callable[..., Tensors]
FORMS = ["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"]
MEDUSA_CONFIG = {
    "architectures": ["MedusaLlamaForCausalLM"],
    "auto_map": {
        "AutoConfig": "modeling_medusa.MedusaConfig",
        "AutoModelForCausalLM": "modeling_medusa.MedusaLlamaForCausalLM",
    },
    "medusa_num_heads": 3,
    "medusa_num_layers": 2,
    "base_model_name_or_path": "someone/elsewhere",
}


def write_model(folder: Path, model: LlamaForCausalLM, heads: Tensors, form: str, **config: Any) -> Path:
    """Write a full model in one of transformers' four forms; head 1 of a sharded one lies in both shards."""
    model.config.save_pretrained(folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, **config}))
    (folder / "modeling_medusa.py").write_text("raise RuntimeError('code of the checkpoint was run')\n")
    tensors = {**{name: tensor.clone() for name, tensor in model.state_dict().items()}, **heads}
    save: Callable[[Tensors, Path], None] = torch.save if "pytorch" in form else save_file
    if not form.endswith(".index.json"):
        save(tensors, folder / form)
        return folder
    stem, suffix = form.removesuffix(".index.json").split(".")
    shards = [f"{stem}-{part:05}-of-00003.{suffix}" for part in (1, 2, 3)]
    weight_map = {}
    for name in tensors:
        in_first = name.startswith("medusa_head.0") or name.endswith("1.0.linear.weight")
        weight_map[name] = shards[0] if in_first else shards[1] if name.startswith("medusa_head") else shards[2]
    for shard in shards:
        save({name: tensor for name, tensor in tensors.items() if weight_map[name] == shard}, folder / shard)
    (folder / form).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


@pytest.fixture
def heads(paper_tensors: MakeTensors) -> Tensors:
    return paper_tensors(3, 2, hidden=8, prefix="medusa_head.")


@pytest.fixture
def transformers_log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Caplog, with transformers' messages reaching it."""
    transformers.logging.enable_propagation()
    yield caplog
    transformers.logging.disable_propagation()


class TestReads:
    @pytest.mark.parametrize("form", FORMS)
    def test_every_head_tensor_lands_in_its_place(
        self, tmp_path: Path, tiny_llama: LlamaForCausalLM, heads: Tensors, form: str
    ) -> None:
        folder = write_model(tmp_path, tiny_llama, heads, form, **MEDUSA_CONFIG)
        read = read_heads(folder, hidden_size=8, vocab_size=11)
        assert (read.format, read.base_model, read.notes) == ("embedded", str(folder), [])
        assert stated_base_model(folder) == (str(folder), None)
        assert read.heads.w1.shape == (3, 2, 8, 8)
        assert read.heads.b1 is not None
        assert read.heads.w2 is not None
        for head in range(3):
            assert torch.equal(read.heads.w2[head], heads[f"medusa_head.{head}.2.weight"])
            for layer in range(2):
                block = f"medusa_head.{head}.{layer}.linear"
                assert torch.equal(read.heads.w1[head, layer], heads[f"{block}.weight"])
                assert torch.equal(read.heads.b1[head, layer], heads[f"{block}.bias"])

    def test_shards_without_heads_are_not_opened(
        self, tmp_path: Path, tiny_llama: LlamaForCausalLM, heads: Tensors
    ) -> None:
        write_model(tmp_path, tiny_llama, heads, "model.safetensors.index.json")
        (tmp_path / "model-00003-of-00003.safetensors").write_bytes(b"poison")
        assert read_heads(tmp_path).heads.num_heads == 3


class TestRefuses:
    def test_a_missing_tensor_is_named(self, tmp_path: Path, tiny_llama: LlamaForCausalLM, heads: Tensors) -> None:
        del heads["medusa_head.1.1.linear.bias"]
        write_model(tmp_path, tiny_llama, heads, "model.safetensors.index.json")
        with pytest.raises(ValueError, match=r"missing medusa_head\.1\.1\.linear\.bias$"):
            read_heads(tmp_path)

    def test_a_missing_shard_is_named(self, tmp_path: Path, tiny_llama: LlamaForCausalLM, heads: Tensors) -> None:
        write_model(tmp_path, tiny_llama, heads, "model.safetensors.index.json")
        (tmp_path / "model-00002-of-00003.safetensors").unlink()
        with pytest.raises(ValueError, match=r"index\.json: weight_map names model-00002"):
            read_heads(tmp_path)


class TestBaseModel:
    @pytest.mark.parametrize("form", FORMS)
    def test_the_base_equals_the_plain_model_and_loads_without_warnings(
        self,
        tmp_path: Path,
        tiny_llama: LlamaForCausalLM,
        heads: Tensors,
        form: str,
        transformers_log: pytest.LogCaptureFixture,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        checkpoint = read_heads(write_model(tmp_path, tiny_llama, heads, form, **MEDUSA_CONFIG))
        with warnings.catch_warnings(), transformers_log.at_level(logging.WARNING):
            warnings.simplefilter("error")
            model = load_base_model(checkpoint, dtype=torch.float32)
        assert [record.getMessage() for record in transformers_log.records] == []
        assert "medusa_head" not in capfd.readouterr().err
        assert type(model) is LlamaForCausalLM
        tokens = torch.tensor([[3, 0, 10, 7]])
        assert torch.equal(model(tokens).logits, tiny_llama(tokens).logits)

    def test_plain_transformers_warns_about_the_heads(
        self, tmp_path: Path, tiny_llama: LlamaForCausalLM, heads: Tensors, transformers_log: pytest.LogCaptureFixture
    ) -> None:
        """The control of the test above: its log would show the warning."""
        write_model(tmp_path, tiny_llama, heads, "model.safetensors")
        LlamaForCausalLM.from_pretrained(tmp_path)
        assert "medusa_head" in transformers_log.text

    def test_arguments_reach_transformers(self, tmp_path: Path, tiny_llama: LlamaForCausalLM, heads: Tensors) -> None:
        checkpoint = read_heads(write_model(tmp_path, tiny_llama, heads, "model.safetensors"))
        model = load_base_model(checkpoint, dtype=torch.bfloat16, attn_implementation="eager", rms_norm_eps=0.25)
        assert model.dtype == torch.bfloat16
        assert model.config._attn_implementation == "eager"
        assert model.config.rms_norm_eps == 0.25

    def test_code_of_the_checkpoint_is_never_run(
        self, tmp_path: Path, tiny_llama: LlamaForCausalLM, heads: Tensors
    ) -> None:
        checkpoint = read_heads(write_model(tmp_path, tiny_llama, heads, "model.safetensors", **MEDUSA_CONFIG))
        with pytest.raises(ValueError, match="trust_remote_code: expected False, got True"):
            load_base_model(checkpoint, trust_remote_code=True)
        unknown = MEDUSA_CONFIG | {"model_type": "medusa_llama"}
        write_model(tmp_path, tiny_llama, heads, "model.safetensors", **unknown)
        with pytest.raises(ValueError, match=r"expected a model_type .*got 'medusa_llama'; its own code .*never run"):
            load_base_model(checkpoint)

    @pytest.mark.parametrize("model_type", ["vit", None])
    def test_a_folder_without_a_language_model_is_refused(
        self, tmp_path: Path, tiny_llama: LlamaForCausalLM, heads: Tensors, model_type: str | None
    ) -> None:
        folder = write_model(tmp_path, tiny_llama, heads, "model.safetensors", model_type=model_type)
        with pytest.raises(ValueError, match=f"expected a model_type .*got {model_type!r}"):
            load_base_model(read_heads(folder))

    @pytest.mark.parametrize(("hidden", "vocab"), [(8, 12), (6, 11)])
    def test_heads_of_another_model_are_refused(
        self, tmp_path: Path, tiny_llama: LlamaForCausalLM, hidden: int, vocab: int
    ) -> None:
        tiny_llama.save_pretrained(tmp_path / "base")
        write_heads(MedusaHeads(hidden, vocab, 2), tmp_path / "heads", base_model="../base")
        name, wanted, got = ("vocab_size", vocab, 11) if hidden == 8 else ("hidden_size", hidden, 8)
        with pytest.raises(ValueError, match=f"base_model: expected {name} {wanted} like the heads .*got {got} in"):
            load_base_model(read_heads(tmp_path / "heads"))

    def test_the_base_of_a_heads_only_folder_may_be_overridden(
        self, tmp_path: Path, tiny_llama: LlamaForCausalLM
    ) -> None:
        tiny_llama.save_pretrained(tmp_path / "base")
        write_heads(MedusaHeads(8, 11, 2), tmp_path / "heads", base_model="../base")
        write_heads(MedusaHeads(8, 11, 2), tmp_path / "lost", base_model="../gone")
        tokens = torch.tensor([[1, 2, 3]])
        expected = tiny_llama(tokens).logits
        assert torch.equal(load_base_model(read_heads(tmp_path / "heads"))(tokens).logits, expected)
        assert torch.equal(load_base_model(read_heads(tmp_path / "lost"), tmp_path / "base")(tokens).logits, expected)

    def test_an_unknown_base_model_is_an_error(self, tmp_path: Path, paper_tensors: MakeTensors) -> None:
        save_file(paper_tensors(), tmp_path / "medusa_lm_head.safetensors")
        with pytest.raises(ValueError, match="base_model: expected a folder or hub id"):
            load_base_model(read_heads(tmp_path))
