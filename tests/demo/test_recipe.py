"""The demo's recipe: the figures of its card, and a run of every stage small enough for a test."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.checkpoints import read_heads
from medusa_decoding.cli import main as medusa
from recipes.demo import base, card, requests


def test_distinct_four_grams_by_hand():
    assert card.distinct_four_grams([[1, 2, 3, 4, 5]]) == 1.0
    assert card.distinct_four_grams([[7] * 8]) == pytest.approx(1 / 5)
    assert card.distinct_four_grams([[7] * 8, [1, 2, 3, 4]]) == pytest.approx(0.6)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A tiny untrained model that the recipe starts from, and requests that it learns."""
    folder = tmp_path_factory.mktemp("recipe")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["requests", str(folder / "requests.jsonl"), "--count", "24"])
        requests.main()
    base.make_base(str(folder / "requests.jsonl"), folder / "base", vocab_size=300, hidden_size=64, num_layers=1)
    return folder


def test_answers_of_a_batch_are_each_prompts_own_and_end_with_eos(small):
    model = AutoModelForCausalLM.from_pretrained(small / "base", dtype=torch.float32)
    end = model.config.eos_token_id
    prompts = [torch.tensor([ids]) for ids in ([5, 6], [9, 8, 7, 70], [11], [60, 7, 9])]
    with torch.no_grad():
        state = model.model(torch.tensor([[9, 8, 7, 70]])).last_hidden_state[0, -1]
        model.lm_head.weight[end] = 5 * state  # ends this one at once
    with MedusaModel(model) as plain:
        found = card.answers(plain, prompts, 6, batch=3)
        alone = [plain.generate(ids, max_new_tokens=6, tree=Tree([])) for ids in prompts]
    assert found == [one.sequences[0, ids.shape[1] :].tolist() for one, ids in zip(alone, prompts, strict=True)]
    assert found[1] == [end]
    assert {len(one) for one in found} != {1}


@pytest.mark.slow
def test_every_stage_of_the_recipe(small, root, monkeypatch, tmp_path):
    monkeypatch.setattr(card, "TREE_SIZES", (2, 4))
    monkeypatch.setattr(card, "NEW", 32)

    def settings(**values):
        return [word for name, value in values.items() for word in ("--set", f"{name.replace('__', '.')}={value}")]

    recipe = root / "recipes" / "demo-model-cpu.yaml"
    rows = {"optimisation__max_steps": 2, "data__length": 128}
    data = {"data__train": f"[{{path: {small / 'requests.jsonl'}}}]"}
    joint = settings(
        model__name=small / "base", output__folder=tmp_path / "joint", optimisation__warmup_steps=1, **data, **rows
    )
    assert medusa(["train", "--config", str(recipe), *joint]) == 0
    alone = settings(
        model__name=tmp_path / "joint" / "model", data__cache_hidden=tmp_path / "states",
        output__folder=tmp_path / "heads", generation__max_new_tokens=24, heads__root_rank=8, **data, **rows,
    )  # fmt: skip
    assert medusa(["distill", "--config", str(root / "recipes" / "demo-cpu.yaml"), *alone]) == 0
    out = tmp_path / "checkpoint"
    card.write(tmp_path / "joint" / "model", tmp_path / "heads" / "heads", out, count=4, calibration_count=4)
    with MedusaModel.from_pretrained(out / "heads", dtype=torch.float32, tree=Tree.chain(2)) as model:
        ids = AutoTokenizer.from_pretrained(out / "base")("Write a function", return_tensors="pt").input_ids
        text = model.generate(ids, max_new_tokens=8, eos_token_id=[]).sequences
    own = AutoModelForCausalLM.from_pretrained(out / "base", dtype=torch.float32)
    mask = torch.ones_like(ids)
    assert torch.equal(
        text, own.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None)
    )
    untrained = AutoModelForCausalLM.from_pretrained(small / "base")
    assert not torch.equal(own.lm_head.weight, untrained.lm_head.weight.float())
    assert read_heads(out / "heads").heads.w1.abs().max() > 0
    measured = json.loads((out / "measured.json").read_text())
    assert measured["answers"] == 4
    assert json.loads((out / "heads" / "measured.json").read_text()) == {"accuracies": measured["calibration"]}
    answers = [json.loads(line) for line in (out / "answers.jsonl").read_text().splitlines()]
    assert measured["answers_right"] == sum(one["problem"] is None for one in answers) == 0
    assert measured["wrong_by_kind"] == {"class": 1, "function": 1, "command line": 1, "query": 1}
    assert f"{measured['prompt_lookup']['share_of_tokens']:.0%}" in (out / "README.md").read_text()
