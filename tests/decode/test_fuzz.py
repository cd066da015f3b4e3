"""Random models, trees, batches and settings against transformers' greedy generate."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import FAMILIES, VOCAB, heads_for, padded, prompts, tiny, transformers_greedy
from oracles import byte_tokenizer, new_tokens, taught
from test_tree import prefix_closed

from medusa_decoding import MedusaModel, Tree

TOKENS = st.integers(0, VOCAB - 1)


def with_window(family, window):
    """Configuration overrides for a sliding window, if the family has one."""
    if family == "llama":
        return {}
    if family == "mistral":
        return {"sliding_window": window}
    return {"sliding_window": window, "use_sliding_window": window is not None, "max_window_layers": 1}


@functools.cache
def tokenizer():
    return byte_tokenizer()


def optional(strategy):
    return st.none() | strategy


@st.composite
def generation_settings(draw):
    """Settings of transformers' generate that mean the same for a row alone and in a batch."""
    eos = draw(st.lists(TOKENS, max_size=2, unique=True))
    others = [token for token in range(VOCAB) if token not in eos]
    words = st.lists(st.lists(st.sampled_from(others), min_size=1, max_size=3), min_size=1, max_size=3)
    biased = st.lists(st.lists(TOKENS, min_size=1, max_size=2).map(tuple), min_size=1, max_size=3, unique=True)
    found = {
        "eos_token_id": eos or None,
        "repetition_penalty": draw(optional(st.sampled_from([0.7, 1.1, 1.5]))),
        "no_repeat_ngram_size": draw(optional(st.integers(1, 3))),
        "encoder_repetition_penalty": draw(optional(st.sampled_from([0.8, 1.4]))),
        "encoder_no_repeat_ngram_size": draw(optional(st.integers(1, 3))),
        "bad_words_ids": draw(optional(words)),
        "sequence_bias": draw(optional(biased.map(lambda ids: {one: 2.5 - len(one) for one in ids}))),
        "suppress_tokens": draw(optional(st.lists(TOKENS, min_size=1, max_size=4))),
        "begin_suppress_tokens": draw(optional(st.lists(TOKENS, min_size=1, max_size=4))),
        "forced_bos_token_id": draw(optional(TOKENS)),
        "forced_eos_token_id": draw(optional(TOKENS)),
        "min_length": draw(optional(st.integers(1, 30))),
        "min_new_tokens": draw(optional(st.integers(1, 10))),
        "renormalize_logits": draw(optional(st.just(True))),
        "stop_strings": draw(optional(st.lists(st.text("".join(map(chr, range(32, 43))), min_size=1), min_size=1))),
    }
    if eos:
        decay = st.tuples(st.integers(0, 10), st.sampled_from([1.01, 1.2, 1.5]))
        found["exponential_decay_length_penalty"] = draw(optional(decay))
    chosen = {name: value for name, value in found.items() if value is not None}
    # Few at a time: everything at once leaves nothing of the model's own text.
    kept = draw(st.sets(st.sampled_from(sorted(chosen)), max_size=4)) if chosen else set()
    if "exponential_decay_length_penalty" in kept:
        kept |= {"eos_token_id"}
    if {"forced_bos_token_id", "forced_eos_token_id"} & kept:
        kept -= {"suppress_tokens"}  # transformers refuses to force what is suppressed
    return {name: chosen[name] for name in sorted(kept)}


@pytest.mark.slow
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    seed=st.integers(0, 1000),
    layers=st.integers(1, 3),
    kv_heads=st.sampled_from([1, 2, 4]),
    tied=st.booleans(),
    shared=st.booleans(),
    window=st.sampled_from([None, 3, 9]),
    paths=prefix_closed(max_choices=25),
    lookup=st.sampled_from([0, 0, 1, 5]),
    knowing=st.booleans(),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=4),
    side=st.sampled_from(["left", "right"]),
    new=st.integers(1, 28),
    in_all=st.booleans(),
    asked=generation_settings(),
)
@settings(max_examples=60, deadline=None)
def test_any_settings_equal_transformers_row_by_row(
    family, seed, layers, kv_heads, tied, shared, window, paths, lookup, knowing, lengths, side, new, in_all, asked
):
    sizes = {"num_hidden_layers": layers, "num_key_value_heads": kv_heads, "tie_word_embeddings": tied}
    model = tiny(family, seed=seed, hidden_size=64, **sizes, **with_window(family, window))
    rows = prompts(len(lengths), lengths, seed=seed)
    if "min_new_tokens" in asked:
        asked["min_new_tokens"] = min(asked["min_new_tokens"], new)
    if "stop_strings" in asked:
        asked["tokenizer"] = tokenizer()
    expected = [transformers_greedy(model, row, new, **asked) for row in rows]
    known = [(row.tolist(), text) for row, text in zip(rows, expected, strict=True)]
    heads = taught(model, known, seed=seed) if knowing else heads_for(model, seed=seed, shared=shared)
    tree = Tree([path[:4] for path in paths if len(path) <= 4], lookup)
    ids, mask = padded(rows, side)
    limit = {"max_length": ids.shape[1] + new} if in_all else {"max_new_tokens": new}
    with MedusaModel(model, heads, tree) as medusa:
        output = medusa.generate(ids, mask, metrics=True, **limit, **asked)
    assert new_tokens(output, ids.shape[1]) == expected
    assert [sum(steps) + len(steps) for steps in output.accept_lengths] == [len(text) - 1 for text in expected]
    assert output.metrics.steps == output.steps


@pytest.mark.slow
@given(
    seed=st.integers(0, 1000),
    paths=prefix_closed(max_choices=25),
    lookup=st.sampled_from([0, 0, 3]),
    lengths=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    new=st.integers(1, 28),
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_k=st.integers(0, VOCAB),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    asked=generation_settings(),
)
@settings(max_examples=30, deadline=None)
def test_any_sampled_text_is_plain_decodings(
    seed, paths, lookup, lengths, new, temperature, top_k, top_p, min_p, asked
):
    """With one seed; that plain decoding draws from the right distribution is shown in `test_sampling`."""
    model = tiny(seed=seed)
    ids, mask = padded(prompts(len(lengths), lengths, seed=seed))
    asked |= {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    # These may forbid every token, from which nothing can be drawn.
    for name in ("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "min_new_tokens", "min_length"):
        asked.pop(name, None)
    for name in ("no_repeat_ngram_size", "encoder_no_repeat_ngram_size"):
        if name in asked:
            asked[name] = 3
    if "stop_strings" in asked:
        asked["tokenizer"] = tokenizer()
    tree = Tree([path[:4] for path in paths if len(path) <= 4], lookup)
    with MedusaModel(model, heads_for(model, seed=seed)) as medusa:
        plain, drawn = (
            medusa.generate(ids, mask, max_new_tokens=new, do_sample=True, tree=which, **asked)
            for which in (Tree([]), tree)
        )
    assert torch.equal(plain.sequences, drawn.sequences)
    assert plain.new_tokens == drawn.new_tokens
