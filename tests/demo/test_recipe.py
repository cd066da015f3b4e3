"""The demo's recipe: the split, the measures, and a run of every stage small enough for a test."""

import itertools
import json

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa_decoding import MedusaHeads, MedusaModel, Tree
from recipes.demo import corpus, measure, train
from recipes.demo.distill import DistillSettings, HeadData, continuations, random_prompts
from recipes.demo.pretrain import BackboneWithHeads, PretrainSettings, learning_rate_scale


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


def test_no_group_stands_on_both_sides():
    files = corpus.split()
    groups = [{corpus.module_group(name) for name in side} for side in (files.train, files.held_out)]
    assert groups[0]
    assert groups[1]
    assert not groups[0] & groups[1]
    assert 0.01 < len(files.held_out) / (len(files.train) + len(files.held_out)) < 0.2


def test_a_folder_without_sources_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"standard library.*found 0 files"):
        corpus.split(tmp_path)


def walk(choices, drafts, text):
    """Count tokens and steps the slow way: the longest path whose tokens all stand in the text."""
    depth = max(map(len, choices))
    committed = steps = position = 0
    while position + depth + 2 <= len(text):
        right = [0] + [
            len(path)
            for path in choices
            if all(drafts[position][d][rank] == text[position + 2 + d] for d, rank in enumerate(path))
        ]
        committed += 1 + max(right)
        steps += 1
        position += 1 + max(right)
    return committed, steps


@pytest.mark.parametrize("seed", range(5))
def test_tokens_per_step_on_text_against_a_slow_walk(seed):
    rng = np.random.default_rng(seed)
    text = rng.integers(0, 5, 60).tolist()
    drafts = [[rng.permutation(5)[:3].tolist() for _ in range(3)] for _ in text]
    choices = [[0], [1], [0, 0], [0, 2], [1, 1], [0, 2, 1]]
    found = measure.tokens_per_step_on_text(Tree(choices), drafts, text)
    assert found == walk(choices, drafts, text)
    assert found[0] > found[1]


def test_distinct_four_grams_by_hand():
    assert measure.distinct_four_grams([[1, 2, 3, 4, 5]]) == 1.0
    assert measure.distinct_four_grams([[7] * 8]) == pytest.approx(1 / 5)
    assert measure.distinct_four_grams([[7] * 8, [1, 2, 3, 4]]) == pytest.approx(0.6)


def test_learning_rate_rises_stays_and_falls():
    settings = PretrainSettings(warmup_steps=10, decay_from=0.5)
    assert learning_rate_scale(4, 0.01, settings) == pytest.approx(0.5)
    assert learning_rate_scale(100, 0.4, settings) == 1.0
    assert learning_rate_scale(100, 0.75, settings) == pytest.approx(0.5)
    assert learning_rate_scale(100, 1.0, settings) == 0.0


SMALL = PretrainSettings(
    vocab_size=300,
    hidden_size=32,
    intermediate_size=48,
    num_layers=1,
    num_heads=2,
    context=256,
    short_context=32,
    batch_tokens=512,
    steps=3,
    minutes=60,
    warmup_steps=1,
)


def test_the_combined_loss_against_an_explicit_one():
    torch.manual_seed(0)
    module = BackboneWithHeads(SMALL)
    with torch.no_grad():
        module.w1.normal_(0, 0.2)
        module.b1.normal_(0, 0.2)
    tokens = torch.randint(0, 300, (2, 8 + 1 + 2))
    picked = torch.tensor([5, 0, 7])
    lm_loss, head_losses = module(tokens, picked)
    hidden = module.backbone.model(tokens[:, :8]).last_hidden_state
    logp = module.backbone.lm_head(hidden).log_softmax(-1)
    expected = -sum(logp[b, t, tokens[b, t + 1]] for b, t in itertools.product(range(2), range(8))) / 16
    assert lm_loss.item() == pytest.approx(expected.item(), rel=1e-5)
    for k in range(2):
        total = 0.0
        for b, t in itertools.product(range(2), picked.tolist()):
            h = hidden[b, t]
            state = h + torch.nn.functional.silu(module.w1[k] @ h + module.b1[k])
            total -= (module.backbone.lm_head.weight @ state).log_softmax(-1)[tokens[b, t + 2 + k]].item()
        assert head_losses[k].item() == pytest.approx(total / 6, rel=1e-5)


def test_head_data_pairs_states_with_later_tokens():
    torch.manual_seed(0)
    base = BackboneWithHeads(SMALL).eval().backbone
    tokens = torch.randint(0, 300, (2, 12))
    data = HeadData.of(base, [tokens], 4, 2)
    assert data.states.shape == (2 * 5, 32)
    assert data.targets[0].tolist() == tokens[0, 6:8].tolist()
    assert data.targets[-1].tolist() == tokens[1, 10:12].tolist()
    expected = base.model(tokens).last_hidden_state[1, 8]
    assert torch.allclose(data.states[-1], expected, atol=1e-6)


def test_every_stage_of_the_recipe(tmp_path, monkeypatch):
    files = corpus.split()
    few = corpus.Split(files.root, files.train[:12], files.held_out[:8])
    monkeypatch.setattr(corpus, "split", lambda: few)
    monkeypatch.setattr(train, "HELD_OUT_PROMPTS", 3)
    monkeypatch.setattr(train, "CALIBRATION_PROMPTS", 4)
    monkeypatch.setattr(train, "TREE_SIZES", (2, 4))
    work, out = tmp_path / "work", tmp_path / "checkpoint"
    work.mkdir()
    train.run_pretrain(work, SMALL)
    assert torch.load(work / "pretrain.pt", weights_only=True)["step"] == 4
    settings = DistillSettings(prompts=4, prompt_tokens=16, new_tokens=8, generate_batch=2, epochs=2, batch=8)
    train.finish(work, out, settings)
    with MedusaModel.from_pretrained(out / "heads", dtype=torch.float32, tree=Tree.chain(2)) as model:
        ids = AutoTokenizer.from_pretrained(out / "base")("def f(x):", return_tensors="pt").input_ids
        text = model.generate(ids, max_new_tokens=8, eos_token_id=[]).sequences
    base = AutoModelForCausalLM.from_pretrained(out / "base", dtype=torch.float32)
    mask = torch.ones_like(ids)
    assert torch.equal(
        text, base.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None)
    )
    measured = json.loads((out / "measured.json").read_text())
    assert measured["held_out"] == few.held_out
    card = (out / "README.md").read_text()
    assert f"{measured['tokens_per_step']['4']['text']:.2f}" in card
    # A second run finds every stage done and leaves the heads as they are.
    weights = torch.load(work / "heads.pt", weights_only=True)
    train.finish(work, out, settings)
    assert all(torch.equal(weights[k], v) for k, v in torch.load(work / "heads.pt", weights_only=True).items())


def test_head_accuracies_of_a_known_head():
    torch.manual_seed(0)
    base = BackboneWithHeads(SMALL).eval().backbone
    heads = MedusaHeads(32, 300, 1, shared_projection=True)  # fresh: drafts what the base model would say next
    tokens = torch.randint(0, 300, (3, 20))
    states = base.model(tokens).last_hidden_state.flatten(0, 1)
    best = base.lm_head(states).topk(2, -1).indices
    targets = torch.where(torch.arange(60) % 3 == 0, best[:, 0], best[:, 1])[:, None]
    assert measure.head_accuracies(heads, base.lm_head, HeadData(states, targets), 2) == [
        [pytest.approx(1 / 3), pytest.approx(2 / 3)]
    ]


def test_random_prompts_do_not_cross_files():
    data = np.arange(1, 400, dtype=np.uint16)
    data[::50] = 0
    prompts = random_prompts(data, 20, 30, seed=0)
    assert prompts.shape == (20, 30)
    assert not (prompts[:, 1:] == 0).any()


def test_continuations_do_not_stop_at_the_end_of_text():
    torch.manual_seed(0)
    base = BackboneWithHeads(SMALL).eval().backbone
    with torch.no_grad():
        base.lm_head.weight[0] = 5 * base.model(torch.tensor([[5, 6]])).last_hidden_state[0, -1]  # likes token 0
    [rows] = continuations(base, torch.tensor([[5, 6]]), 6, 1)
    assert rows.shape == (1, 8)
    assert 0 in rows[0, 2:-1]
