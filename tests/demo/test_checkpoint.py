"""The embedded checkpoint: its size, its card, that its answers are right, and that they are the base model's own."""

import json
import math
from collections import Counter

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.demo.checking import problem
from medusa_decoding.demo.requests import EXAMPLES, parse
from recipes.demo.card import distinct_four_grams
from recipes.demo.requests import draw, encoded

NEW = 512


@pytest.fixture(scope="module")
def measured():
    return json.loads((CHECKPOINT / "measured.json").read_text())


@pytest.fixture(scope="module")
def answers():
    return [json.loads(line) for line in (CHECKPOINT / "answers.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(CHECKPOINT / "base")


def test_at_most_16_megabytes_and_no_pickles():
    files = [path for path in CHECKPOINT.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 16_000_000
    assert {path.suffix for path in files} <= {".json", ".jsonl", ".jinja", ".safetensors", ".md", ".txt"}


def test_weights_are_bfloat16_and_heads_are_of_the_best_kind():
    with safe_open(CHECKPOINT / "heads" / "medusa_lm_head.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
    config = json.loads((CHECKPOINT / "heads" / "config.json").read_text())
    assert config["medusa_num_layers"] == 2
    assert config["medusa_root_rank"] > 0
    assert config["medusa_parent_rank"] > 0


def test_trees_are_chosen_by_the_heads_own_accuracies(measured):
    with MedusaModel.from_pretrained(CHECKPOINT / "heads", dtype=torch.float32) as model:
        trees = {tree.num_nodes: tree for tree in model._adaptive().trees}
    assert trees[4] == Tree.optimal(measured["calibration"], 4) == Tree.chain(3)
    assert trees[16] == Tree.optimal(measured["calibration"], 16)
    assert trees[8] == Tree.load(CHECKPOINT / "heads" / "medusa_tree.json")


def test_the_card_states_what_was_measured(measured):
    card = (CHECKPOINT / "README.md").read_text()
    for size, row in measured["tokens_per_step"].items():
        assert f"| {size} | {row['greedy']:.2f} ± {row['standard_error']:.2f} |" in card
    assert f"{measured['distinct_4_grams']:.2f}" in card
    assert f"{measured['prompt_lookup']['share_of_tokens']:.0%}" in card
    assert f"{measured['answers_right']} of {measured['answers']}" in card
    assert measured["python"] in card


def test_the_answers_are_those_of_the_card(measured, answers, tokenizer):
    assert len(answers) == measured["answers"] == 100
    assert Counter(one["kind"] for one in answers) == dict.fromkeys(("class", "function", "command line", "query"), 25)
    assert sum(one["problem"] is None for one in answers) == measured["answers_right"] >= 95
    grams = distinct_four_grams([tokenizer(one["answer"])["input_ids"] for one in answers])
    assert grams == pytest.approx(measured["distinct_4_grams"], abs=0.01)  # the measured ones have an end token
    assert grams >= 0.5


def test_every_answer_passes_or_fails_its_check_as_recorded(answers):
    for one in answers:
        assert (problem(parse(one["request"]), one["answer"]) is None) == (one["problem"] is None), one["request"]


@pytest.mark.slow
def test_the_model_still_answers_as_recorded(answers, tokenizer):
    asked = [parse(one["request"]) for one in answers]
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT / "base", dtype=torch.float32)
    for i in range(0, 100, 9):
        [ids] = encoded(tokenizer, asked[i : i + 1])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        assert text == answers[i]["answer"]


def test_the_examples_are_answered_right(tokenizer):
    with MedusaModel.from_pretrained(CHECKPOINT / "heads", dtype=torch.float32) as model:
        for text in EXAMPLES:
            request = parse(text)
            # As a chat and, as `medusa generate --prompt` has it, as a bare text.
            for ids in (*encoded(tokenizer, [request]), tokenizer(text, return_tensors="pt").input_ids):
                output = model.generate(ids, max_new_tokens=NEW)
                answer = tokenizer.decode(output.sequences[0, ids.shape[1] :], skip_special_tokens=True)
                assert problem(request, answer.strip()) is None, text


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return encoded(tokenizer, draw(24, 23, held_out=True))


def own_text(base, ids, new_tokens):
    out = base.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
    return out[0].tolist()


def test_text_is_the_base_models_own(measured, prompts):
    base = AutoModelForCausalLM.from_pretrained(CHECKPOINT / "base", dtype=torch.float32)
    expected = [own_text(base, ids, NEW) for ids in prompts[:4]]
    with MedusaModel.from_pretrained(CHECKPOINT / "heads", dtype=torch.float32) as model:
        for nodes in (4, 64):
            tree = Tree.optimal(measured["calibration"], nodes)
            outputs = [model.generate(ids, max_new_tokens=NEW, tree=tree) for ids in prompts[:4]]
            assert [output.sequences[0].tolist() for output in outputs] == expected, nodes
            assert min(output.tokens_per_step for output in outputs) > 1.5


def test_the_shipped_tree_is_a_candidate_by_default():
    with MedusaModel.from_pretrained(CHECKPOINT / "heads", dtype=torch.float32) as model:
        assert model.tree == "auto"
        assert Tree.load(CHECKPOINT / "heads" / "medusa_tree.json") in model._adaptive().trees
    assert Tree.load(CHECKPOINT / "heads" / "medusa_tree_64.json").num_nodes == 64


@pytest.mark.slow
def test_in_bfloat16_texts_differ_only_at_ties(measured, prompts):
    base = AutoModelForCausalLM.from_pretrained(CHECKPOINT / "base", dtype=torch.bfloat16)
    tree, parted = Tree.optimal(measured["calibration"], 64), 0
    with MedusaModel.from_pretrained(CHECKPOINT / "heads", dtype=torch.bfloat16, tree=tree) as model:
        got = [model.generate(ids, max_new_tokens=128).sequences[0].tolist() for ids in prompts[:8]]
    for number, (ids, ours) in enumerate(zip(prompts[:8], got, strict=True)):
        theirs = own_text(base, ids, 128)
        if ours == theirs:
            continue
        parted += 1
        first = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
        with torch.no_grad():
            logits = base(torch.tensor([theirs[:first]])).logits[0, -1].float()
        both = logits[theirs[first]].item(), logits[ours[first]].item()
        step = 2.0 ** (math.floor(math.log2(max(map(abs, both)))) - 7)  # of bfloat16 at this magnitude
        print(f"prompt {number} parts at token {first}: logits {both}, a bfloat16 step is {step}")
        # Each of the two passes may round either logit once.
        assert abs(both[0] - both[1]) <= 2 * step
    assert parted < 4
