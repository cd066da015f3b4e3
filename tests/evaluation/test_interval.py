"""The bootstrap of ratios, against cases that can be worked out by hand."""

import math
from dataclasses import asdict

import pytest

from medusa_decoding.evaluation.interval import ratio, ratio_of_rates


def test_two_prompts():
    """A resample has both, the first twice or the second twice; the latter two have probability 1/4 each."""
    found = ratio([(2, 1), (9, 3)])
    assert (found.value, found.low, found.high) == (11 / 4, 2.0, 3.0)
    assert asdict(found) == {"value": 2.75, "low": 2.0, "high": 3.0}


def test_equal_prompts_give_an_interval_of_no_width():
    found = ratio([(6, 4)] * 5)
    assert (found.value, found.low, found.high) == (1.5, 1.5, 1.5)


def test_rates():
    """Tokens, seconds of one way and of the other: 2 a second over 0.5 a second, and 1 over 1."""
    found = ratio_of_rates([(4, 2, 4, 8), (3, 3, 3, 3)])
    assert found.value == pytest.approx((7 / 5) / (7 / 11))
    assert (found.low, found.high) == (1.0, 4.0)


def test_the_interval_of_a_mean_is_the_normal_one():
    """With many prompts of one step each: 1.96 standard errors, within what 2,000 resamples can tell."""
    values = [(n * 37) % 100 for n in range(400)]
    mean = sum(values) / 400
    error = math.sqrt(sum((v - mean) ** 2 for v in values)) / 400
    found = ratio([(v, 1) for v in values])
    assert found.value == pytest.approx(mean)
    assert mean - found.low == pytest.approx(1.96 * error, rel=0.1)
    assert found.high - mean == pytest.approx(1.96 * error, rel=0.1)
    assert ratio([(v, 1) for v in values]) == found


def test_prompts_without_steps_give_no_interval():
    assert ratio([(0, 0), (0, 0)]) is None
    single = ratio([(3, 2)])
    assert (single.value, single.low, single.high) == (1.5, None, None)
    # A prompt without a step may be drawn alone; such draws say nothing.
    some = ratio([(3, 2), (0, 0)])
    assert (some.value, some.low, some.high) == (1.5, 1.5, 1.5)
