"""MedusaModel.from_pretrained: heads with their base, an overriding base, which tree is used and why, refusals."""

import json
import shutil

import pytest
import torch
from models import VOCAB, heads_for, prompts, tiny, transformers_greedy

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.checkpoints import write_heads
from medusa_decoding.generation.tree_choice import GIVEN, UNTUNED, TreeChoice


@pytest.fixture
def folders(tmp_path):
    model = tiny()
    model.save_pretrained(tmp_path / "base")
    write_heads(heads_for(model, shared=True), tmp_path / "heads", base_model="../base")
    return tmp_path


def test_the_older_name_of_dtype_is_read(folders):
    with MedusaModel.from_pretrained(folders / "heads", torch_dtype=torch.bfloat16) as model:
        assert model.heads.w1.dtype == model.backbone.dtype == torch.bfloat16


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


def test_the_checkpoints_tree_is_a_candidate_and_may_be_overridden(folders):
    Tree.chain(2).save(folders / "heads" / "medusa_tree.json")
    with MedusaModel.from_pretrained(folders / "heads") as model:
        assert model.tree_choice() == TreeChoice("auto", UNTUNED)
        assert [tree.num_nodes for tree in model._adaptive().trees] == [1, 3, 4, 8, 16, 32, 64]
        assert model._adaptive().trees[1] == Tree.chain(2)
    with MedusaModel.from_pretrained(folders / "heads", tree=Tree.chain(3)) as model:
        assert model.tree_choice(4, 1000) == TreeChoice(Tree.chain(3), GIVEN)


def test_generations_that_sample_have_a_candidate_of_their_own(folders):
    """What "auto" learns about sampled texts is kept apart; without a tree for sampling the other one serves."""
    for name, tree in (("medusa_tree.json", Tree.chain(2)), ("medusa_tree_sampling.json", Tree([[0], [1]]))):
        tree.save(folders / "heads" / name)
        with MedusaModel.from_pretrained(folders / "heads") as model:
            assert model._adaptive().trees[1] == Tree.chain(2)
            assert model._adaptive(sample=True).trees[1] == tree
            for sample in (False, True):
                model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=6, do_sample=sample)
            assert [model._policies["auto", True, sample].trees[1] for sample in (False, True)] == [Tree.chain(2), tree]


def test_a_checkpoints_tree_that_does_not_fit_is_named(folders):
    Tree.chain(5).save(folders / "heads" / "medusa_tree.json")
    with pytest.raises(ValueError, match=r"medusa_tree.json: tree: path .* has depth 5, expected at most 4"):
        MedusaModel.from_pretrained(folders / "heads")


def test_remote_code_is_refused(folders):
    with pytest.raises(ValueError, match="trust_remote_code: expected False"):
        MedusaModel.from_pretrained(folders / "heads", trust_remote_code=True)


def test_heads_of_another_model_are_refused(folders):
    other = tiny(hidden_size=64, head_dim=16)
    shutil.rmtree(folders / "base")
    other.save_pretrained(folders / "base")
    with pytest.raises(ValueError, match=r"expected hidden size 64 \(the base model's\), got 32"):
        MedusaModel.from_pretrained(folders / "heads")


class TestAModelWithoutHeads:
    @pytest.mark.parametrize("tree", [None, "auto", Tree([]).with_lookup(4)])
    def test_it_decodes_plainly_with_a_warning(self, folders, caplog, tree):
        with MedusaModel.from_pretrained(folders / "base", dtype="float32", tree=tree) as model:
            assert model.heads is None
            [row] = prompts(1, [7])
            got = model.generate(row[None], max_new_tokens=10).sequences[0, 7:].tolist()
        assert got == transformers_greedy(model.base, row, 10)
        [said] = [line for line in caplog.messages if "without Medusa heads" in line]
        assert f"`medusa train --init {folders / 'base'} DATA`" in said

    def test_a_tree_of_heads_is_refused_before_the_model_is_loaded(self, folders):
        (folders / "base" / "model.safetensors").unlink()
        with pytest.raises(ValueError, match=r"^tree: .* because the model has no heads, got .*\(path \[0\]\)"):
            MedusaModel.from_pretrained(folders / "base", tree=Tree.chain(2))

    @pytest.mark.parametrize("config", [{"model_type": "llama", "medusa_num_heads": 2}, {"model_type": "medusa"}, {}])
    def test_heads_whose_weights_are_missing_are_not_one(self, tmp_path, config):
        (tmp_path / "config.json").write_text(json.dumps(config))
        with pytest.raises(ValueError, match=r"expected a checkpoint of Medusa heads, one of: .* got a folder with"):
            MedusaModel.from_pretrained(tmp_path)


class TestALoadedBaseModel:
    def test_it_decodes_in_its_dtype(self, folders):
        base = tiny()
        with MedusaModel.from_pretrained(folders / "heads", base, dtype="float32", tree=Tree.chain(2)) as model:
            assert model.base is base
            [row] = prompts(1, [7])
            got = model.generate(row[None], max_new_tokens=10).sequences[0, 7:].tolist()
        assert got == transformers_greedy(base, row, 10)
        with MedusaModel.from_pretrained(folders / "heads", tiny().to(torch.bfloat16)) as model:
            assert model.heads.w1.dtype == torch.bfloat16

    @pytest.mark.parametrize(
        ("given", "name"),
        [
            ({"dtype": torch.bfloat16}, "dtype"),
            ({"device_map": {"": "cpu"}}, "device_map"),
        ],
    )
    def test_arguments_of_loading_are_refused(self, folders, given, name):
        with pytest.raises(ValueError, match=rf"^{name}: expected none, because base_model is loaded already"):
            MedusaModel.from_pretrained(folders / "heads", tiny(), **given)
