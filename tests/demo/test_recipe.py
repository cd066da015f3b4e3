"""The demo's recipe: the split, the figures of its card, and a run of every stage small enough for a test."""

import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.checkpoints import read_heads
from medusa_decoding.cli import main as medusa
from recipes.demo import base, card, corpus, seeds


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("json/decoder.py", "json"),
        ("test/test_json/test_dump.py", "json"),
        ("test/json_tests.py", "json"),
        ("heapq.py", "heapq"),
        ("test/test_heapq.py", "heapq"),
        ("_strptime.py", "strptime"),
        ("test/__init__.py", "init"),
    ],
)
def test_a_module_and_its_tests_are_one_group(name, group):
    assert corpus.module_group(name).strip("_") == group


def test_no_group_is_in_both_training_and_held_out_data():
    files = corpus.split()
    groups = [{corpus.module_group(name) for name in side} for side in (files.train, files.held_out)]
    assert groups[0]
    assert groups[1]
    assert not groups[0] & groups[1]
    assert 0.01 < len(files.held_out) / (len(files.train) + len(files.held_out)) < 0.2


def test_a_folder_without_sources_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"standard library.*found 0 files"):
        corpus.split(tmp_path)


def test_distinct_four_grams_by_hand():
    assert card.distinct_four_grams([[1, 2, 3, 4, 5]]) == 1.0
    assert card.distinct_four_grams([[7] * 8]) == pytest.approx(1 / 5)
    assert card.distinct_four_grams([[7] * 8, [1, 2, 3, 4]]) == pytest.approx(0.6)


def test_random_prompts_do_not_cross_files():
    data = np.arange(1, 400, dtype=np.uint16)
    data[::50] = 0
    prompts = corpus.random_prompts(data, 20, 30, seed=0)
    assert prompts.shape == (20, 30)
    assert not (prompts[:, 1:] == 0).any()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A tiny untrained model that the recipe starts from, and the text that it learns."""
    folder = tmp_path_factory.mktemp("recipe")
    files = corpus.split()
    few = corpus.Split(files.root, files.train[:12], files.held_out[:8])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "split", lambda: few)
        seeds.write_seeds(folder / "text.jsonl", None)
        seeds.write_seeds(folder / "seeds.jsonl", 8)
        base.make_base(
            str(folder / "text.jsonl"), folder / "base", chat=False, vocab_size=300, hidden_size=64, num_layers=1
        )
        yield folder, few


def test_the_training_side_consists_of_whole_files(small):
    folder, few = small
    texts = [json.loads(line)["text"] for line in (folder / "text.jsonl").read_text().splitlines()]
    assert texts == [few.read(name) for name in few.train]


def test_continuations_do_not_stop_at_the_end_of_text(small):
    model = AutoModelForCausalLM.from_pretrained(small[0] / "base", dtype=torch.float32)
    with torch.no_grad():
        state = model.model(torch.tensor([[5, 6]])).last_hidden_state[0, -1]
        model.lm_head.weight[corpus.END] = 5 * state  # likes to end
    assert AutoTokenizer.from_pretrained(small[0] / "base").eos_token_id == corpus.END
    with MedusaModel(model) as plain:
        rows = card.continuations(plain, torch.tensor([[5, 6]]), 6)
    assert rows.shape == (1, 8)
    assert corpus.END in rows[0, 2:-1]


def test_next_token_accuracy_is_transformers_own_loss(small):
    model = AutoModelForCausalLM.from_pretrained(small[0] / "base", dtype=torch.float32)
    rows = torch.randint(1, 300, (2, 20), generator=torch.Generator().manual_seed(0))
    top1, loss = card.next_token_accuracy(model, rows)
    assert loss == pytest.approx(model(rows, labels=rows).loss.item(), rel=1e-5)
    best = model(rows).logits.argmax(-1)
    assert top1 == pytest.approx(sum(int(best[b, t]) == int(rows[b, t + 1]) for b in (0, 1) for t in range(19)) / 38)


@pytest.mark.slow
def test_every_stage_of_the_recipe(small, root, monkeypatch, tmp_path):
    folder, few = small
    monkeypatch.setattr(corpus, "split", lambda: few)
    monkeypatch.setattr(card, "TREE_SIZES", (2, 4))
    monkeypatch.setattr(card, "NEW", 32)

    def settings(**values):
        return [word for name, value in values.items() for word in ("--set", f"{name.replace('__', '.')}={value}")]

    recipe = root / "recipes" / "demo-model-cpu.yaml"
    rows = {"optimisation__max_steps": 2, "data__length": 64}
    joint = settings(
        model__name=folder / "base", data__train=f"[{{path: {folder / 'text.jsonl'}}}]",
        output__folder=tmp_path / "joint", optimisation__warmup_steps=1, **rows,
    )  # fmt: skip
    assert medusa(["train", "--config", str(recipe), *joint]) == 0
    alone = settings(
        model__name=tmp_path / "joint" / "model", heads__initial=tmp_path / "joint" / "heads",
        data__train=f"[{{path: {folder / 'seeds.jsonl'}}}]",
        data__cache_hidden=tmp_path / "states", output__folder=tmp_path / "heads", generation__max_new_tokens=24,
        generation__prompt_tokens=32, heads__root_rank=8, **rows,
    )  # fmt: skip
    assert medusa(["distill", "--config", str(root / "recipes" / "demo-cpu.yaml"), *alone]) == 0
    out = tmp_path / "checkpoint"
    card.write(tmp_path / "joint" / "model", tmp_path / "heads" / "heads", out, prompts=2, calibration_prompts=2)
    with MedusaModel.from_pretrained(out / "heads", dtype=torch.float32, tree=Tree.chain(2)) as model:
        ids = AutoTokenizer.from_pretrained(out / "base")("def f(x):", return_tensors="pt").input_ids
        text = model.generate(ids, max_new_tokens=8, eos_token_id=[]).sequences
    own = AutoModelForCausalLM.from_pretrained(out / "base", dtype=torch.float32)
    mask = torch.ones_like(ids)
    assert torch.equal(
        text, own.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None)
    )
    untrained = AutoModelForCausalLM.from_pretrained(folder / "base")
    assert not torch.equal(own.lm_head.weight, untrained.lm_head.weight.float())
    assert read_heads(out / "heads").heads.w1.abs().max() > 0
    measured = json.loads((out / "measured.json").read_text())
    assert measured["held_out"] == few.held_out
    assert f"{measured['tokens_per_step']['4']['text']:.2f}" in (out / "README.md").read_text()
