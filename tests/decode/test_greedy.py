"""In fp32, Medusa's greedy tokens are transformers' greedy tokens: families, trees, batches, limits, EOS."""

import pytest
import torch
from models import FAMILIES, VOCAB, heads_for, padded, prompts, rope, tiny, transformers_greedy
from oracles import assert_some_accepted, new_tokens

from medusa_decoding import MedusaModel, Tree

RANDOM = [[2], [0], [1], [2, 3], [0, 1], [2, 3, 0], [0, 1, 4], [5], [2, 3, 0, 1]]
TREES = {
    "root": Tree([]),
    "chain": Tree.chain(4),
    "cartesian": Tree.cartesian([4, 3, 2]),
    "random": Tree(RANDOM),
    "nodes64": Tree.optimal([[0.5, 0.2, 0.1, 0.05], [0.4, 0.2, 0.1, 0.05], [0.3, 0.2, 0.1], [0.2, 0.1]], 64),
    "nodes130": Tree.optimal([[0.5, 0.4, 0.3, 0.2, 0.1], [0.5, 0.4, 0.3, 0.2, 0.1], [0.5, 0.4, 0.3, 0.2]], 130),
}
NEW = 24


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch", [1, 5])
def test_greedy_text_equals_transformers(family, tree, batch):
    model = tiny(family)
    rows = prompts(batch, [7, 1, 19, 12, 3])
    expected = [transformers_greedy(model, row, NEW) for row in rows]
    ids, mask = padded(rows)
    with MedusaModel(model, heads_for(model), tree) as medusa:
        output = medusa.generate(ids, mask, max_new_tokens=NEW)
    assert new_tokens(output, ids.shape[1]) == expected
    assert [sum(a) + len(a) for a in output.accept_lengths] == [NEW - 1] * batch
    if tree.num_nodes > 1:
        assert_some_accepted(output)


VARIANTS = {
    "one layer": ("llama", {"num_hidden_layers": 1}),
    "tied embeddings": ("qwen2", {"tie_word_embeddings": True}),
    "multi-head": ("llama", {"num_key_value_heads": 4}),
    "multi-query": ("llama", {"num_key_value_heads": 1}),
    "attention bias": ("llama", {"attention_bias": True}),
    "mistral window": ("mistral", {"sliding_window": 6}),
    "mistral no window": ("mistral", {"sliding_window": None}),
    "qwen2 window in some layers": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "num_hidden_layers": 3},
    ),
    "qwen3 window": ("qwen3", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0}),
    "linear rope": ("llama", rope("linear", factor=4.0)),
    "llama3 rope": (
        "llama",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16),
    ),
    "yarn rope": ("qwen3", rope("yarn", factor=4.0, original_max_position_embeddings=24)),
    "dynamic rope": ("llama", {"max_position_embeddings": 16, **rope("dynamic", factor=4.0)}),
}


@pytest.mark.parametrize(("family", "overrides"), VARIANTS.values(), ids=VARIANTS.keys())
def test_variants_equal_transformers(family, overrides):
    rows = prompts(4, [9, 2, 21, 14])
    # A fresh model per row: dynamic scaling leaves the last text's frequencies in transformers' rotary module.
    expected = [transformers_greedy(tiny(family, **overrides), row, NEW) for row in rows]
    model = tiny(family, **overrides)
    ids, mask = padded(rows, "right")
    with MedusaModel(model, heads_for(model), TREES["cartesian"]) as medusa:
        output = medusa.generate(ids, mask, max_new_tokens=NEW)
    assert new_tokens(output, ids.shape[1]) == expected
    assert_some_accepted(output)


def test_left_padded_batch_has_transformers_layout():
    model = tiny()
    rows = prompts(4, [7, 2, 11, 5])
    ids, mask = padded(rows)
    free = model.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)
    ends = [free[0, ids.shape[1] + 6].item(), free[2, ids.shape[1] + 3].item()]
    kwargs = {"max_new_tokens": NEW, "eos_token_id": ends, "pad_token_id": 9}
    expected = model.generate(ids, attention_mask=mask, do_sample=False, **kwargs)
    assert expected.shape[1] < ids.shape[1] + NEW or (expected == 9).any()
    with MedusaModel(model, heads_for(model), TREES["cartesian"]) as medusa:
        got = medusa.generate(ids, mask, return_dict_in_generate=False, **kwargs)
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("eos", [[0], [3, 0, 7], list(range(VOCAB))])
@pytest.mark.parametrize("min_new", [0, 1, 5])
def test_eos_lists_and_min_new_tokens(eos, min_new):
    model = tiny("mistral", seed=3)
    rows = prompts(5, [4, 9, 2, 13, 6], seed=4)
    expected = [transformers_greedy(model, row, NEW, eos_token_id=eos, min_new_tokens=min_new or None) for row in rows]
    ids, mask = padded(rows)
    with MedusaModel(model, heads_for(model), TREES["cartesian"]) as medusa:
        output = medusa.generate(ids, mask, max_new_tokens=NEW, eos_token_id=eos, min_new_tokens=min_new)
    assert new_tokens(output, ids.shape[1]) == expected


@pytest.mark.parametrize(
    ("left", "tree"),
    # With one token left there is no step: of the tree only its number of nodes matters, for the size of the cache.
    [(1, "nodes130"), (2, "chain"), (2, "nodes64"), (10, "cartesian"), (10, "nodes130")],
)
def test_prompt_up_to_the_context_limit(left, tree):
    model = tiny()
    limit = model.config.max_position_embeddings
    [row] = prompts(1, [limit - left])
    with MedusaModel(model, heads_for(model), TREES[tree]) as medusa:
        output = medusa.generate(row[None])
    assert output.sequences.shape[1] == limit
    assert new_tokens(output, len(row)) == [transformers_greedy(model, row, left)]


@pytest.mark.parametrize("tree", ["chain", "nodes64"])
def test_ragged_batch_fills_each_row_up_to_the_context_limit(tree):
    model = tiny()
    limit = model.config.max_position_embeddings
    rows = prompts(5, [limit - 9, limit - 1, limit - 14, limit - 2, limit - 30])
    expected = [transformers_greedy(model, row, limit - len(row)) for row in rows]
    ids, mask = padded(rows, fill=3)
    with MedusaModel(model, heads_for(model), TREES[tree]) as medusa:
        output = medusa.generate(ids, mask)
    assert new_tokens(output, ids.shape[1]) == expected


def test_explicit_budget_past_the_context_is_obeyed_like_transformers(caplog):
    model = tiny()
    [row] = prompts(1, [model.config.max_position_embeddings - 4])
    with MedusaModel(model, heads_for(model), TREES["cartesian"]) as medusa:
        output = medusa.generate(row[None], max_new_tokens=12)
    assert new_tokens(output, len(row)) == [transformers_greedy(model, row, 12)]
    assert "context" in caplog.text


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_agrees_except_at_ties(family):
    disagreements = compared = 0
    for seed in range(8):
        model = tiny(family, seed=seed, dtype=torch.bfloat16)
        [row] = prompts(1, [9], seed=seed)
        expected = transformers_greedy(model, row, NEW)
        with MedusaModel(model, heads_for(model), TREES["nodes64"]) as medusa:
            [got] = new_tokens(medusa.generate(row[None], max_new_tokens=NEW), len(row))
        compared += 1
        if got == expected:
            continue
        disagreements += 1
        first = next(i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if a != b)
        prefix = torch.cat([row, torch.tensor(expected[:first])])
        with torch.no_grad():
            logits = model(prefix[None].long()).logits[0, -1].double()
            exact = model.double()(prefix[None].long()).logits[0, -1]
        gap = (exact[expected[first]] - exact[got[first]]).abs().item()
        # Each of the two computations may round as transformers' own does here.
        error = (logits - exact).abs().max().item()
        pair = f"{family}, seed {seed}: at token {first} {expected[first]} and {got[first]}"
        print(f"{pair} tie, {gap} apart (error {error})")
        assert gap <= 2 * error, f"{pair} are no tie, the exact logits differ by {gap} (error {error})"
    assert disagreements < compared / 2
