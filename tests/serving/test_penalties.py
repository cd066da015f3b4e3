"""Presence and frequency penalties and logit bias: the formulas, what they refuse, and trees against plain decoding."""

import math

import pytest
import torch

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.serving.penalties import penalty_processors

VOCAB, PROMPT = 11, [3, 3, 7]


def scores_for(seed=0):
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed))


def applied(processors, text, scores):
    for processor in processors:
        scores = processor(torch.tensor([text]), scores)
    return scores


@pytest.mark.parametrize("new", [[], [3], [5, 5, 5, 0, 9, 0]])
@pytest.mark.parametrize(("presence", "frequency"), [(0.5, 0.0), (0.0, 0.3), (-2.0, 2.0), (1.25, -0.75)])
def test_penalties_are_openais_formula(new, presence, frequency):
    scores = scores_for()
    got = applied(penalty_processors(len(PROMPT), presence, frequency, {}), PROMPT + new, scores)
    expected = [
        float(scores[0, token]) - new.count(token) * frequency - (new.count(token) > 0) * presence
        for token in range(VOCAB)
    ]
    torch.testing.assert_close(got, torch.tensor([expected]), rtol=0, atol=1e-6)
    assert scores.equal(scores_for()), "the scores that were given are unchanged"


def test_bias_is_added_and_others_keep_their_scores():
    scores = scores_for(1)
    got = applied(penalty_processors(0, 0.0, 0.0, {2: -100, 10: 4.5, 5: 0}), PROMPT, scores)
    expected = scores.clone()
    expected[0, 2] -= 100
    expected[0, 10] += 4.5
    assert got.equal(expected)


def test_a_masked_token_stays_masked():
    scores = scores_for()
    scores[0, 3] = -math.inf
    got = applied(penalty_processors(0, -2.0, -2.0, {3: 100}), PROMPT, scores)
    assert got[0, 3] == -math.inf


@pytest.fixture(scope="module")
def demo():
    return MedusaModel.from_pretrained(CHECKPOINT / "heads", CHECKPOINT / "base", dtype=torch.float32)


@pytest.mark.parametrize("tree", [Tree.chain(3), Tree.cartesian([3, 2])], ids=str)
@pytest.mark.parametrize(
    "sampling", [{}, {"do_sample": True, "temperature": 0.9, "seed": 4}], ids=["greedy", "sampled"]
)
def test_trees_write_the_text_of_plain_decoding(demo, tree, sampling):
    prompt = torch.tensor([[2, 40, 77, 301, 5]])

    def text(tree, presence=1.1, frequency=0.7, bias=None):
        processors = penalty_processors(5, presence, frequency, bias or {123: 3.0, 0: -100})
        return demo.generate(
            prompt, max_new_tokens=48, tree=tree, logits_processor=processors, eos_token_id=None, **sampling
        ).sequences[0, 5:].tolist()  # fmt: skip

    plain = text(Tree([]))
    assert text(tree) == plain
    assert plain != text(Tree([]), 0.0, 0.0, {0: -100}), "the penalties matter here"
    assert 0 not in plain
