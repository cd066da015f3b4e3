"""Step times: medians, estimates for unknown sizes, and files."""

from __future__ import annotations

import json
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


def test_a_larger_tree_takes_at_most_as_much_longer_as_it_is_larger():
    assert profile(n1=[1.0] * 3, n4=[1.5] * 3, n8=[40.0, 60.0]).estimates([1, 4, 8])[2] == (pytest.approx(1.575), 3.0)


def test_the_more_steps_are_outliers_the_more_samples_are_needed():
    times = {outliers: Profile() for outliers in (0, 4)}
    for outliers, one in times.items():
        for step in range(60):
            one.observe(1, 20.0 if step % 10 in range(6, 6 + outliers) else 1.0)
    assert times[0].settled == 2
    assert 6 <= times[4].settled <= 12
    assert times[4].estimates([1]) == [(1.0, 1.0)]


def test_a_machine_that_gets_slower_does_not_change_how_sizes_compare():
    times, slow = Profile(), 1.0
    for step in range(400):
        slow = 2.0 if step >= 200 else 1.0
        times.observe(*((1, slow) if step % 40 in (0, 1, 2) else (8, 1.5 * slow)))
    (plain, _), (tree, _) = times.estimates([1, 8])
    assert tree / plain == pytest.approx(1.5, rel=0.02)


def test_a_step_that_is_faster_than_usual_says_nothing_about_other_sizes():
    times = Profile()
    for nodes, seconds in [(1, 1.0)] * 3 + [(4, 40.0)] * 3 + [(4, 1.2), (8, 1.3)]:  # 4 was timed by outliers only
        times.observe(nodes, seconds)
    assert times.kept()[8] == [1.3]


def test_another_cache_size_starts_from_the_nearest_one():
    times = StepTimes()
    for nodes, seconds in ((1, 1.0), (16, 2.0)):
        for _ in range(3):
            times.profile(2, 1024).add(nodes, seconds)
            times.profile(2, 65536).add(nodes, seconds * 7)
    longer = times.profile(2, 2048)
    assert longer.estimates([1, 16]) == [(1.0, 1.0), (2.0, 2.0)]
    assert longer.kept() == {}
    for _ in range(4):
        longer.observe(1, 1.5)
        longer.observe(16, 3.3)
    (plain, _), (tree, _) = longer.estimates([1, 16])
    assert tree / plain == pytest.approx(2.2, rel=0.1)
    assert times.profile(4, 1024).estimates([1, 16]) == []
    assert times.profile(2, 2048) is longer


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
        (None, "step_times: expected a list, got NoneType"),
        ([3], "got 3"),
        ([ENTRY | {"seconds": 0.1}], "a list of seconds"),
        ([ENTRY | {"seconds": [0.1, -1.0]}], "expected seconds above 0, got -1.0"),
        ([ENTRY | {"seconds": ["1"]}], "expected seconds above 0, got '1'"),
        ([ENTRY | {"nodes": 0}], "expected nodes of at least 1, got 0"),
        ([ENTRY | {"batch": 1.5}], "expected batch of at least 1, got 1.5"),
    ],
)
def test_damaged_files_are_refused(entries, words):
    text = json.dumps({"device": "d", "model": "m", "step_times": entries})
    with pytest.raises(ValueError, match=words):
        StepTimes.from_json(text, device="d", model="m")


@pytest.mark.parametrize("text", ["{", "[]"])
def test_files_without_a_json_object_are_refused(text):
    with pytest.raises(ValueError, match="step times: expected"):
        StepTimes.from_json(text, device="d", model="m")
