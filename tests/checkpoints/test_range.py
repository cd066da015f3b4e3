"""Weights that are finite in the file must be finite in the dtype that they are loaded in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from medusa_decoding import MedusaHeads, MedusaModel, medusa_generate
from medusa_decoding.checkpoints import pretrained, write_heads

LARGE = 3e38
"""Finite in bfloat16 and float32, infinite in float16, whose largest number is 65504."""


@pytest.fixture
def base(tmp_path: Path, tiny_llama: LlamaForCausalLM) -> Path:
    tiny_llama.to(torch.bfloat16).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def heads_with(folder: Path, name: str) -> Path:
    """Write heads in bfloat16 of which one weight is large."""
    heads = MedusaHeads(8, 11, 2, parent_rank=2, root_rank=2, dtype=torch.bfloat16)
    with torch.no_grad():
        heads.get_parameter(name).view(-1)[-1] = -LARGE if name == "b1" else LARGE
    write_heads(heads, folder / "heads", base_model="../base")
    return folder / "heads"


@pytest.mark.parametrize("name", ["w1", "b1", "parent_mix", "root_up"])
def test_heads_that_become_infinite_are_refused(tmp_path: Path, base: Path, name: str) -> None:
    heads = heads_with(tmp_path, name)
    with pytest.raises(ValueError, match=rf"heads: expected .* finite in .*float16, got larger .* {name};"):
        MedusaModel.from_pretrained(heads, dtype=torch.float16)
    for dtype in (torch.bfloat16, torch.float32):
        with MedusaModel.from_pretrained(heads, dtype=dtype) as model:
            assert model.heads is not None
            assert model.heads.get_parameter(name).abs().max() == torch.tensor(LARGE, dtype=torch.bfloat16)


def test_generate_of_transformers_refuses_infinite_heads_and_stays_unpatched(tmp_path: Path, base: Path) -> None:
    heads = heads_with(tmp_path, "w2")
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float16)
    own = [type(layer.self_attn) for layer in model.model.layers]
    with pytest.raises(ValueError, match=r"heads: expected weights that are finite in .*float16"):
        model.generate(torch.tensor([[3, 4]]), max_new_tokens=2, custom_generate=medusa_generate, heads=heads)
    assert [type(layer.self_attn) for layer in model.model.layers] == own


@pytest.mark.parametrize("name", ["lm_head.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_base_model_that_becomes_infinite_is_refused(tmp_path: Path, base: Path, name: str) -> None:
    """Heads may share its lm_head; and a token whose logit is always minus infinity would never be written."""
    tensors = load_file(base / "model.safetensors")
    tensors[name].view(-1)[0] = -LARGE
    save_file(tensors, base / "model.safetensors", {"format": "pt"})
    write_heads(MedusaHeads(8, 11, 2, shared_projection=True), tmp_path / "heads", base_model="../base")
    with pytest.raises(ValueError, match=rf"expected weights that are finite in float16, got larger ones in {name}"):
        MedusaModel.from_pretrained(tmp_path / "heads", dtype=torch.float16)
    with MedusaModel.from_pretrained(tmp_path / "heads") as model:
        assert model.base.dtype == torch.bfloat16


def test_weights_of_other_dtypes_are_not_checked(tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some quantisations store weights as 8-bit floats, which PyTorch has no minimum or maximum for, or empty ones."""
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float16)
    model.eight = torch.nn.Parameter(torch.ones(3).to(torch.float8_e4m3fn), requires_grad=False)
    model.none = torch.nn.Parameter(torch.empty(0, 3, dtype=torch.float16), requires_grad=False)
    report = {"missing_keys": [], "mismatched_keys": [], "unexpected_keys": []}
    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", lambda *args, **kwargs: (model, report))
    assert pretrained.load_model(base, dtype=torch.float16) is model
    with torch.no_grad():
        model.model.norm.weight[0] = torch.inf
    with pytest.raises(ValueError, match=r"finite in float16, got larger ones in model\.norm\.weight"):
        pretrained.load_model(base, dtype=torch.float16)
