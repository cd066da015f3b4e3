"""Presence and frequency penalties and logit bias: the formulas, what they refuse, and trees against plain decoding."""

import math

import pytest
import torch

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
