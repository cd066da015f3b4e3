"""MedusaModel.from_pretrained: heads with their base, an overriding base, the checkpoint's tree, refusals."""

import json
import shutil

import pytest
import torch
from models import VOCAB, heads_for, prompts, tiny, transformers_greedy

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.checkpoints import write_heads


@pytest.fixture
def folders(tmp_path):
    model = tiny()
    model.save_pretrained(tmp_path / "base")
    write_heads(heads_for(model, shared=True), tmp_path / "heads", base_model="../base")
    return tmp_path


@pytest.mark.parametrize("dtype", ["auto", torch.bfloat16, "float32"])
def test_base_and_heads_in_one_dtype(folders, dtype):
    with MedusaModel.from_pretrained(folders / "heads", dtype=dtype) as model:
        wanted = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
        assert model.heads.w1.dtype == model.backbone.dtype == wanted
        [row] = prompts(1, [7])
        got = model.generate(row[None], max_new_tokens=10).sequences[0, 7:].tolist()
        assert not model.base.training
    assert got == transformers_greedy(model.base, row, 10) or dtype is torch.bfloat16


def test_a_missing_base_model_may_be_overridden(folders):
    config = json.loads((folders / "heads" / "config.json").read_text())
    for name in ("vocab_size", "hidden_size"):
        config.pop(name, None)
    config["base_model_name_or_path"] = "../gone"
    (folders / "heads" / "config.json").write_text(json.dumps(config))
    with MedusaModel.from_pretrained(folders / "heads", folders / "base", dtype="float32") as model:
        assert model.heads.vocab_size == VOCAB


def test_the_checkpoints_tree_is_the_default_and_may_be_overridden(folders):
    Tree.chain(2).save(folders / "heads" / "medusa_tree.json")
    with MedusaModel.from_pretrained(folders / "heads") as model:
        assert model.tree == Tree.chain(2)
    with MedusaModel.from_pretrained(folders / "heads", tree=Tree.chain(3)) as model:
        assert model.tree == Tree.chain(3)


def test_remote_code_is_refused(folders):
    with pytest.raises(ValueError, match="trust_remote_code: expected False"):
        MedusaModel.from_pretrained(folders / "heads", trust_remote_code=True)


def test_heads_of_another_model_are_refused(folders):
    other = tiny(hidden_size=64, head_dim=16)
    shutil.rmtree(folders / "base")
    other.save_pretrained(folders / "base")
    with pytest.raises(ValueError, match=r"expected hidden size 64 \(the base model's\), got 32"):
        MedusaModel.from_pretrained(folders / "heads")
