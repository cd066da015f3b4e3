"""Step times: medians, estimates for unknown sizes, and files."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from medusa_decoding.decode.adaptive.step_times import Profile, StepTimes


def profile(**samples: Sequence[float]) -> Profile:
    made = Profile()
    for nodes, values in samples.items():
        for value in values:
            made.add(int(nodes[1:]), value)
    return made


def test_estimates_are_the_lower_quarter_of_the_last_samples():
    assert profile(n1=[3.0, 1.0, 2.0, 9.0, 8.0]).estimates([1]) == [(2.0, 2.0)]
    assert profile(n1=[1.0] * 50 + [9.0] * 12).estimates([1]) == [(9.0, 9.0)]
    assert profile(n1=[5.0, 1.0]).estimates([1])[0][0] == 1.0
    assert profile(n1=[5.0]).estimates([1]) == []  # a single one may be an outlier
    assert Profile().estimates([1, 8]) == []


def test_untimed_sizes_have_an_optimistic_and_a_pessimistic_estimate():
    hopeful, careful = zip(*profile(n1=[1.0] * 3, n4=[1.6] * 3).estimates([1, 2, 4, 8, 64]), strict=True)
    assert hopeful == pytest.approx((1.0, 1.15, 1.6, 1.68, 1.68 * 1.15))
    assert careful == pytest.approx((1.0, 1.6, 1.6, 2.4, 3.6))
    hopeful, careful = zip(*profile(n1=[1.0] * 3).estimates([1, 2, 64]), strict=True)
    assert hopeful[1] == careful[1] == pytest.approx(1.15)
    # A smaller tree takes no longer than a larger one.
    assert profile(n1=[1.0] * 3, n4=[2.0] * 3, n16=[1.9] * 3).estimates([1, 4, 16])[1][0] == 1.9


def test_one_slow_sample_counts_only_after_a_second_one():
    doubted = profile(n1=[1.0] * 3, n4=[10.0])
    assert doubted.estimates([1, 4])[1] == (pytest.approx(1.2), 10.0)
    doubted.add(4, 10.0)
    assert doubted.estimates([1, 4])[1][1] == 10.0
    assert profile(n1=[1.0] * 3, n4=[10.0, 1.5]).estimates([1, 4])[1][1] == 1.5


def test_times_round_trip_and_are_refused_for_another_device_or_model():
    times = StepTimes("H200, graph", "llama bf16")
    for rows in (512, 1024):
        for seconds in (0.25, 0.5, 0.125):
            times.profile(2, rows).add(4, seconds * rows)
    text = times.to_json()
    again = StepTimes.from_json(text, device="H200, graph", model="llama bf16")
    assert again.to_json() == text
    assert again.profile(2, 1024).known() == {4: 128.0}
    assert again.profile(2, 512).kept() == {4: [128.0, 256.0, 64.0]}
    with pytest.raises(ValueError, match="device 'A100, graph', got 'H200, graph'"):
        StepTimes.from_json(text, device="A100, graph", model="llama bf16")
    with pytest.raises(ValueError, match="model 'qwen', got 'llama bf16'"):
        StepTimes.from_json(text, device="H200, graph", model="qwen")


ENTRY = {"batch": 1, "rows": 0, "nodes": 4, "seconds": [0.1]}


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (None, "Input should be a valid list, got None"),
        ([ENTRY | {"seconds": [0.1, -1.0]}], "0.seconds.1: Input should be greater than 0, got -1.0"),
        ([ENTRY | {"nodes": 0}], "0.nodes: Input should be greater than or equal to 1, got 0"),
    ],
)
def test_damaged_files_are_refused(entries, words):
    values = {"device": "d", "model": "m", "step_times": entries}
    with pytest.raises(ValueError, match=words):
        StepTimes.from_json(values, device="d", model="m")
