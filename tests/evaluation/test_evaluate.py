"""Evaluation of prompts: what is generated, counted and compared; texts are transformers' own."""

import copy
import json
from collections import Counter

import pytest
import torch
from chats import CHAT_TEMPLATE
from models import transformers_greedy

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.evaluation import Prompt, evaluate
from medusa_decoding.evaluation.report import as_text

NEW = 24
PROMPTS = [
    Prompt(("what is a tree?",), "plants", "a.jsonl:1"),
    Prompt(("trees are",), "plants", "a.jsonl:2"),
    Prompt(("add one and one.",), "sums", "a.jsonl:3"),
]


def ids_of(tokenizer, text):
    return tokenizer(text, return_tensors="pt").input_ids[0]


@pytest.fixture
def asked(monkeypatch):
    """The prompts passed to Medusa's generate, with the tree, in order."""
    seen = []
    generate = MedusaModel.generate

    def spy(self, input_ids, *args, tree=None, **kwargs):
        seen.append((input_ids[0].tolist(), tree))
        return generate(self, input_ids, *args, tree=tree, **kwargs)

    monkeypatch.setattr(MedusaModel, "generate", spy)
    return seen


def walk(base, heads, prompt, text, length):
    """Accepted draft tokens of each step of a chain of `length` over a text, computed from full logits."""
    whole = torch.cat([prompt, torch.tensor(text)])
    with torch.no_grad():
        states = base.model(whole[None]).last_hidden_state[0]
        best = heads(states).argmax(-1)
    end, place, accepted = len(whole), len(prompt), []
    # `place` is the root's: emitted, but not yet in the cache.
    while place < end - 1:
        run = 0
        while run < length and place + 1 + run < end - 1 and best[place - 1, run] == whole[place + 1 + run]:
            run += 1
        accepted.append(run)
        place += run + 1
    return accepted


def test_steps_and_histograms_equal_a_walk_over_the_text(make):
    model, tokenizer = make(tree=Tree.chain(2))
    own = copy.deepcopy(model.backbone.causal_lm)
    MedusaModel(own).undo()
    found = evaluate(model, tokenizer, PROMPTS, max_new_tokens=NEW)
    steps = {}
    for prompt in PROMPTS:
        ids = ids_of(tokenizer, prompt.turns[0])
        text = transformers_greedy(own, ids, NEW)
        steps.setdefault(prompt.category, []).append(walk(own, model.heads, ids, text, 2))
    assert list(found.categories) == ["plants", "sums"]
    everything = [accepted for listed in steps.values() for accepted in listed]
    assert len(set().union(*everything)) > 1  # something is accepted, and something is not
    for figures, walked in [(found.overall, everything), *((found.categories[name], steps[name]) for name in steps)]:
        accepted = [length for one in walked for length in one]
        assert figures.prompts == figures.texts == len(walked)
        assert figures.new_tokens == NEW * len(walked)
        assert figures.steps == len(accepted)
        assert figures.accepted_histogram == Counter(accepted)
        assert figures.tokens_per_step.value == pytest.approx((NEW - 1) * len(walked) / len(accepted))
        assert figures.identical == {"plain": len(walked), "transformers": len(walked)}
        assert list(figures.tokens_per_second) == ["medusa", "plain", "transformers"]
        assert list(figures.speedup) == ["plain", "transformers"]
        assert all(rate > 0 for rate in figures.tokens_per_second.values())
    assert found.different == []
    rates = found.overall.tokens_per_second
    for way in ("plain", "transformers"):
        speedup = found.overall.speedup[way]
        assert speedup.value == pytest.approx(rates["medusa"] / rates[way])
        assert speedup.low <= speedup.value <= speedup.high
    assert found.categories["sums"].tokens_per_step.low is None  # one prompt says nothing of others
    low, high = found.overall.tokens_per_step.low, found.overall.tokens_per_step.high
    per_prompt = [(NEW - 1) / len(accepted) for accepted in everything]
    assert min(per_prompt) <= low <= found.overall.tokens_per_step.value <= high <= max(per_prompt)


def test_the_base_model_stays_swapped(make):
    model, tokenizer = make()
    stand_ins = [layer.self_attn for layer in model.backbone.decoder.layers]
    evaluate(model, tokenizer, PROMPTS[:1], max_new_tokens=3)
    assert [layer.self_attn for layer in model.backbone.decoder.layers] == stand_ins
    assert model.base is model.backbone.causal_lm


def test_transformers_runs_the_models_own_attention(make, monkeypatch):
    model, tokenizer = make()
    base, kinds = model.backbone.causal_lm, set()
    generate = base.generate

    def spy(*args, **kwargs):
        kinds.update(type(layer.self_attn).__name__ for layer in base.model.layers)
        return generate(*args, **kwargs)

    monkeypatch.setattr(base, "generate", spy)
    evaluate(model, tokenizer, PROMPTS[:1], max_new_tokens=3)
    assert kinds == {"LlamaAttention"}


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, None])
def test_a_second_turn_follows_the_models_own_answer(make, asked, template):
    model, tokenizer = make(template)
    first, second = "name a tree.", "name another."
    found = evaluate(model, tokenizer, [Prompt((first, second), "both", "q:1")], max_new_tokens=NEW, transformers=False)
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    base = model.backbone.causal_lm
    if template is None:
        start = ids_of(tokenizer, first)
        answer = transformers_greedy(base, start, NEW)
        follow = [*start.tolist(), *answer, *tokenizer("\n" + second).input_ids]
    else:
        messages = [{"role": "user", "content": first}]
        start = torch.tensor(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"])
        answer = transformers_greedy(base, start, NEW, eos_token_id=[end])
        text = tokenizer.decode(answer, skip_special_tokens=True)
        assert text.strip()
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": second}]
        follow = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert text in follow
        # An answer that was cut short is closed by the template.
        follow = tokenizer(follow, add_special_tokens=False).input_ids
    prompts = list(dict.fromkeys(tuple(ids) for ids, _ in asked))
    assert prompts == [tuple(start.tolist()), tuple(follow)]
    assert (found.overall.prompts, found.overall.texts) == (1, 2)
    assert found.overall.tokens_per_step.low is None  # turns of one prompt are not prompts


def test_a_text_that_differs_is_reported(make, monkeypatch):
    """Transformers' second text is changed at its sixth new token."""
    model, tokenizer = make()
    base = model.backbone.causal_lm
    generate, wrong = base.generate, ids_of(tokenizer, PROMPTS[1].turns[0])

    def bent(ids, **kwargs):
        out = generate(ids, **kwargs)
        if torch.equal(ids[0], wrong):
            out[0, len(wrong) + 5] = (out[0, len(wrong) + 5] + 1) % 30
        return out

    monkeypatch.setattr(base, "generate", bent)
    found = evaluate(model, tokenizer, PROMPTS, max_new_tokens=NEW)
    assert found.overall.identical == {"plain": 3, "transformers": 2}
    assert found.categories["plants"].identical == {"plain": 2, "transformers": 1}
    assert found.categories["sums"].identical == {"plain": 1, "transformers": 1}
    assert found.different == [{"where": "a.jsonl:2", "turn": 1, "baseline": "transformers", "token": 5}]


def test_lossy_texts_are_compared_with_the_greedy_ones(make):
    model, tokenizer = make()
    loose = {"acceptance": "typical", "posterior_threshold": 1e-9}
    expected = 0
    for prompt in PROMPTS:
        ids = ids_of(tokenizer, prompt.turns[0])
        lossy = model.generate(ids[None], max_new_tokens=NEW, **loose).sequences[0, len(ids) :].tolist()
        expected += lossy == transformers_greedy(model.backbone.causal_lm, ids, NEW)
    assert expected < len(PROMPTS)
    found = evaluate(model, tokenizer, PROMPTS, max_new_tokens=NEW, **loose)
    assert found.overall.identical == {"plain": expected, "transformers": expected}
    assert len(found.different) == 2 * (len(PROMPTS) - expected)
    assert found.overall.accepted_histogram[2] > 0
    assert found.settings["acceptance"] == "typical"


def test_sampled_texts_are_compared_only_with_the_plain_loop(make):
    model, tokenizer = make()
    drawn = {"do_sample": True, "temperature": 0.8, "seed": 3}
    found = evaluate(model, tokenizer, PROMPTS, max_new_tokens=NEW, **drawn)
    assert found.overall.identical == {"plain": 3}
    assert set(found.overall.speedup) == {"plain", "transformers"}
    again = evaluate(model, tokenizer, PROMPTS, max_new_tokens=NEW, transformers=False, **drawn)
    other = evaluate(model, tokenizer, PROMPTS, max_new_tokens=NEW, transformers=False, **(drawn | {"seed": 4}))
    assert again.overall.head_accuracy.hits.tolist() == found.overall.head_accuracy.hits.tolist()
    assert other.overall.head_accuracy.hits.tolist() != found.overall.head_accuracy.hits.tolist()


def test_turns_without_room_in_the_context_are_skipped_and_named(make):
    model, tokenizer = make(max_position_embeddings=32)
    found = evaluate(
        model,
        tokenizer,
        [Prompt(("a short one", "and more"), where="p:1"), Prompt(("x" * 32,), where="p:2")],
        max_new_tokens=100,
        transformers=False,
    )
    # The first answer fills the context, so that nothing can follow it.
    assert found.overall.new_tokens == 32 - len("a short one")
    assert [(one["where"], one["turn"]) for one in found.left_out] == [("p:1", 2), ("p:2", 1)]
    assert found.left_out[1]["prompt_tokens"] == 32
    assert "turns left out" in as_text(found)
    with pytest.raises(ValueError, match=r"prompts: expected fewer than 32 tokens .* got 40 in p:3"):
        evaluate(model, tokenizer, [Prompt(("x" * 40,), where="p:3")])


def test_a_model_without_heads_copies(make):
    model, tokenizer = make()
    base = model.backbone.causal_lm
    model.undo()
    with MedusaModel(base, None, Tree([], lookup=3)) as plain:
        found = evaluate(plain, tokenizer, PROMPTS[:1], max_new_tokens=NEW)
    assert found.overall.head_accuracy is None
    assert found.overall.identical == {"plain": 1, "transformers": 1}
    assert "heads" not in as_text(found)


def test_json_and_tables_hold_every_figure(make):
    model, tokenizer = make()
    found = evaluate(model, tokenizer, PROMPTS, max_new_tokens=NEW)
    figures = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert set(figures) == {"overall", "categories", "intervals", "settings", "versions", "different", "left_out"}
    assert "bootstrap" in figures["intervals"]
    assert set(figures["categories"]) == {"plants", "sums"}
    for one in (figures["overall"], *figures["categories"].values()):
        assert set(one) == {
            "prompts", "texts", "new_tokens", "steps", "tokens_per_step", "accepted_histogram", "tokens_per_second",
            "speedup", "identical", "head_accuracy",
        }  # fmt: skip
        assert set(one["tokens_per_step"]) == {"value", "low", "high"}
        assert set(one["head_accuracy"]) == {"top_n", "hits", "total"}
        assert [len(row) for row in one["head_accuracy"]["top_n"]] == [10] * 4
    assert figures["settings"]["dtype"] == "float32"
    assert figures["settings"]["tree"] == "3 nodes"
    text = as_text(found)
    for name in ("plants", "sums", "all"):
        (row,) = [line for line in text.splitlines() if line.startswith(name + " ")]
        one = figures["overall"] if name == "all" else figures["categories"][name]
        assert f"{one['tokens_per_step']['value']:.2f}" in row
        assert f"{one['speedup']['transformers']['value']:.2f}" in row
        assert f"{one['identical']['plain']}/{one['texts']}" in row
    (row,) = [line for line in text.splitlines() if line.startswith("head 4")]
    shares = figures["overall"]["head_accuracy"]["top_n"][3]
    assert row.split() == ["head", "4", *(f"{100 * s:.1f}" for s in shares), str(3 * (NEW - 4))]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: expected a whole number from 1, got 0"),
        ({"prompts": []}, "prompts: give at least one"),
        ({"top_p": 0.5}, "top_p: expected 1.0 without do_sample"),
    ],
)
def test_bad_arguments_are_refused(make, arguments, words):
    model, tokenizer = make()
    settings = {"prompts": PROMPTS} | arguments
    with pytest.raises((ValueError, OSError), match=words):
        evaluate(model, tokenizer, settings.pop("prompts"), **settings)


def test_more_rounds_do_not_change_counts(make, asked):
    model, tokenizer = make()
    once = evaluate(model, tokenizer, PROMPTS, max_new_tokens=NEW, transformers=False)
    calls = len(asked)
    thrice = evaluate(model, tokenizer, PROMPTS, max_new_tokens=NEW, transformers=False, rounds=3)
    assert (calls, len(asked) - calls) == (2 * 3 + 2, 2 * 3 * 3 + 2)  # two ways; before all, each once untimed
    for figures, others in zip(
        (once.overall, *once.categories.values()), (thrice.overall, *thrice.categories.values()), strict=True
    ):
        assert (figures.new_tokens, figures.steps) == (others.new_tokens, others.steps)
        assert figures.accepted_histogram == others.accepted_histogram
        assert figures.tokens_per_step == others.tokens_per_step
        assert figures.head_accuracy.to_json() == others.head_accuracy.to_json()
