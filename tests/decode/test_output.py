"""The output of generate has the fields of transformers' own."""

import copy
import pickle

import torch
from calls import IDS, TREE, WANTED, plain, with_heads
from transformers.generation import GenerateDecoderOnlyOutput

from medusa_decoding import MedusaOutput
from medusa_decoding.generation.tree_choice import GIVEN, TreeChoice


def test_the_output_is_a_transformers_model_output(model, heads):
    expected, got = plain(model, IDS, **WANTED), with_heads(model, heads, IDS, **WANTED, metrics=True)
    assert isinstance(got, GenerateDecoderOnlyOutput)
    assert (got.past_key_values, got.attentions, got.hidden_states) == (None, None, None)
    assert list(got) == ["sequences", "scores", "logits", "accept_lengths", "new_tokens", "metrics", "tree_choice"]
    assert got[0] is got["sequences"] is got.sequences
    assert got[0].tolist() == expected[0].tolist()
    sequences, scores, *_ = got.to_tuple()
    assert (sequences.shape, len(scores)) == (expected[0].shape, len(expected[1]))
    transition = [
        model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True) for out in (got, expected)
    ]
    torch.testing.assert_close(*transition)
    for again in (copy.deepcopy(got), pickle.loads(pickle.dumps(got))):
        assert isinstance(again, MedusaOutput)
        assert again.sequences.tolist() == got.sequences.tolist()
        assert (again.accept_lengths, again.new_tokens) == (got.accept_lengths, got.new_tokens)
        assert again.tree_choice == got.tree_choice == TreeChoice(TREE, GIVEN)
    bare = with_heads(model, heads, IDS, return_dict_in_generate=True)
    assert list(bare) == ["sequences", "accept_lengths", "new_tokens", "tree_choice"]
    assert (bare.scores, bare.logits, bare.metrics) == (None, None, None)
