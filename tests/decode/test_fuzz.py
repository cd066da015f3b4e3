"""Random models, trees and batches against transformers' greedy generate."""

from hypothesis import given, settings
from hypothesis import strategies as st
from models import FAMILIES, VOCAB, heads_for, padded, prompts, tiny, transformers_greedy
from test_tree import prefix_closed

from medusa_decoding import MedusaModel, Tree


@given(
    family=st.sampled_from(sorted(FAMILIES)),
    seed=st.integers(0, 1000),
    layers=st.integers(1, 3),
    kv_heads=st.sampled_from([1, 2, 4]),
    tied=st.booleans(),
    window=st.sampled_from([None, 2, 5, 20]),
    shared=st.booleans(),
    paths=prefix_closed(max_choices=30),
    lengths=st.lists(st.integers(1, 25), min_size=1, max_size=5),
    side=st.sampled_from(["left", "right"]),
    new=st.integers(1, 30),
    eos=st.lists(st.integers(0, VOCAB - 1), max_size=3),
    min_new=st.integers(0, 30),
)
@settings(max_examples=40, deadline=None)
def test_any_configuration_equals_transformers(
    family, seed, layers, kv_heads, tied, window, shared, paths, lengths, side, new, eos, min_new
):
    overrides = {"num_hidden_layers": layers, "num_key_value_heads": kv_heads, "tie_word_embeddings": tied}
    if family != "llama":
        overrides["sliding_window"] = window
        if family != "mistral":
            overrides |= {"use_sliding_window": window is not None, "max_window_layers": 1}
    model = tiny(family, seed=seed, **overrides)
    min_new = min(min_new, new)
    rows = prompts(len(lengths), lengths, seed=seed)
    kwargs = {"eos_token_id": eos or None, "min_new_tokens": min_new or None}
    expected = [transformers_greedy(model, row, new, **kwargs) for row in rows]
    tree = Tree([path[:4] for path in paths if len(path) <= 4])
    ids, mask = padded(rows, side)
    with MedusaModel(model, heads_for(model, seed=seed, shared=shared), tree) as medusa:
        output = medusa.generate(ids, mask, max_new_tokens=new, eos_token_id=eos, min_new_tokens=min_new)
    got = [
        r[ids.shape[1] : ids.shape[1] + n].tolist() for r, n in zip(output.sequences, output.new_tokens, strict=True)
    ]
    assert got == expected
