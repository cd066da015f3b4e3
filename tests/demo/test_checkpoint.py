"""The embedded checkpoint: its size, its card, and that its text is the base model's own."""

import json
import math

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.demo import CHECKPOINT
from recipes.demo import corpus


@pytest.fixture(scope="module")
def measured():
    return json.loads((CHECKPOINT / "measured.json").read_text())


def test_at_most_16_megabytes_and_only_safetensors():
    files = [path for path in CHECKPOINT.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 16_000_000
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".md", ".txt"}


def test_weights_are_bfloat16_and_heads_share_the_projection():
    with safe_open(CHECKPOINT / "heads" / "medusa_lm_head.safetensors", "pt") as file:
        assert {file.get_tensor(name).dtype for name in file.keys()} == {torch.bfloat16}  # noqa: SIM118
        assert all("linear" in name for name in file.keys())  # noqa: SIM118


def test_the_card_states_what_was_measured(measured):
    card = (CHECKPOINT / "README.md").read_text()
    for size, row in measured["tokens_per_step"].items():
        assert f"| {size} | {row['greedy']:.2f} ± {row['standard_error']:.2f} |" in card
    assert f"{measured['distinct_4_grams_greedy']:.2f}" in card
    assert measured["python"] in card


def test_held_out_files_are_those_of_the_split(measured):
    assert all(corpus.is_held_out(name) for name in measured["held_out"])
    assert len(measured["held_out"]) > 50


@pytest.fixture(scope="module")
def prompts():
    files = corpus.split()
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "base" / "tokenizer.json"))
    return corpus.random_prompts(corpus.encode(files, files.held_out[::4], tokenizer), 24, 128, seed=23)


def own_texts(base, prompts, new_tokens):
    mask = torch.ones_like(prompts)
    return base.generate(prompts, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None)


def test_text_is_the_base_models_own(measured, prompts):
    base = AutoModelForCausalLM.from_pretrained(CHECKPOINT / "base", dtype=torch.float32)
    expected = own_texts(base, prompts[:6], 64)
    with MedusaModel.from_pretrained(CHECKPOINT / "heads", dtype=torch.float32) as model:
        for nodes in (4, 64):
            tree = Tree.optimal(measured["calibration"], nodes)
            output = model.generate(prompts[:6], max_new_tokens=64, eos_token_id=[], tree=tree)
            assert torch.equal(output.sequences, expected), nodes
            assert output.tokens_per_step > 1.5


def test_the_shipped_tree_is_a_candidate_by_default():
    with MedusaModel.from_pretrained(CHECKPOINT / "heads", dtype=torch.float32) as model:
        assert model.tree == "auto"
        assert Tree.load(CHECKPOINT / "heads" / "medusa_tree.json") in model._policy("auto").trees
    assert Tree.load(CHECKPOINT / "heads" / "medusa_tree_64.json").num_nodes == 64


@pytest.mark.slow
def test_in_bfloat16_texts_differ_only_at_ties(measured, prompts):
    base = AutoModelForCausalLM.from_pretrained(CHECKPOINT / "base", dtype=torch.bfloat16)
    texts = own_texts(base, prompts, 64)
    tree = Tree.optimal(measured["calibration"], 64)
    with MedusaModel.from_pretrained(CHECKPOINT / "heads", dtype=torch.bfloat16, tree=tree) as model:
        got = model.generate(prompts, max_new_tokens=64, eos_token_id=[]).sequences
    parted = [row for row in range(24) if not torch.equal(texts[row], got[row])]
    for row in parted:
        first = int((texts[row] != got[row]).nonzero()[0])
        with torch.no_grad():
            logits = base(texts[row : row + 1, :first]).logits[0, -1].float()
        theirs, ours = logits[texts[row, first]].item(), logits[got[row, first]].item()
        step = 2.0 ** (math.floor(math.log2(max(abs(theirs), abs(ours)))) - 7)  # of bfloat16 at this magnitude
        print(f"prompt {row} parts at new token {first - 128}: logits {theirs} and {ours}, a bfloat16 step is {step}")
        # Each of the two passes may round either logit once.
        assert abs(theirs - ours) <= 2 * step
    assert len(parted) < 12
