"""Step times: medians, what unknown sizes are taken for, and files."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence

import pytest

from medusa_decoding import Tree
from medusa_decoding.decode.adaptive.step_times import Profile, StepTimes


def profile(**samples: Sequence[float]) -> Profile:
    made = Profile()
    for nodes, values in samples.items():
        for value in values:
            made.add(int(nodes[1:]), value)
    return made


def test_a_size_is_the_lower_median_of_its_last_samples():
    assert profile(n1=[3.0, 1.0, 2.0, 9.0]).seconds(1) == 2.0
    assert profile(n1=[9.0] * 50 + [1.0] * 5).seconds(1) == 1.0
    assert profile(n1=[5.0, 1.0]).seconds(1) == 1.0
    assert Profile().seconds(1) is None
    assert Profile().seconds(8) is None


def test_sizes_between_are_interpolated_and_larger_ones_extrapolated():
    known = profile(n1=[1.0] * 3, n4=[1.6] * 3, n16=[2.2] * 3)
    assert known.seconds(2) == pytest.approx(1.2)
    assert known.seconds(8) == pytest.approx(1.8)
    assert known.seconds(64) == pytest.approx(2.8)  # as much for each doubling as from 4 to 16
    assert known.seconds(256) == pytest.approx(3.4)
    hopeful = profile(n1=[1.0] * 3)
    assert 1.0 < hopeful.seconds(2) < hopeful.seconds(64) < 1.5
    assert profile(n1=[1.0] * 3, n4=[2.0] * 3, n16=[1.9] * 3).seconds(64) > 1.9


def test_one_slow_sample_is_not_believed_before_a_second_one():
    doubted = profile(n1=[1.0] * 3, n4=[10.0])
    assert doubted.seconds(4) < 1.5
    assert 1.5 < doubted.at_risk(4) < 3.0
    doubted.add(4, 10.0)
    assert doubted.seconds(4) == doubted.at_risk(4) == 10.0
    cured = profile(n1=[1.0] * 3, n4=[10.0, 1.5])
    assert cured.seconds(4) == 1.5


def test_a_first_step_counts_only_where_it_is_faster():
    times = profile(n1=[1.0] * 3)
    times.add(4, 5.0, first=True)
    assert times.samples(4) == 0
    times.add(4, 1.5)
    assert (times.samples(4), times.seconds(4)) == (1, pytest.approx(1.2))
    times.add(4, 2.0, first=True)
    assert times.samples(4) == 1
    times.add(4, 1.3, first=True)
    assert times.samples(4) == 2
    # Where nothing but first steps ever comes, the second one counts.
    times.add(8, 4.0, first=True)
    times.add(8, 5.0, first=True)
    assert times.kept()[8] == [4.0]


def test_another_cache_size_starts_from_the_nearest_one_scaled():
    times = StepTimes()
    for nodes, seconds in ((1, 1.0), (16, 2.0)):
        times.profile(2, 1024).add(nodes, seconds)
        times.profile(2, 65536).add(nodes, seconds * 7)
    longer = times.profile(2, 2048)
    assert longer.seconds(16) == 2.0
    longer.add(1, 1.5)
    longer.add(1, 1.5)
    assert longer.seconds(16) == pytest.approx(3.0)
    assert times.profile(4, 1024).seconds(16) is None
    assert times.profile(2, 2048) is longer


def test_measuring_leaves_out_each_trees_first_step():
    trees, called = [Tree([]), Tree.chain(3)], Counter()

    def run_step(tree: Tree) -> float:
        called[tree.num_nodes] += 1
        return 50.0 if called[tree.num_nodes] == 1 else tree.num_nodes + called[tree.num_nodes] / 10

    times = StepTimes()
    times.measure(run_step, trees, batch=2, rows=64, repeats=3)
    assert times.profile(2, 64).kept() == {1: [1.2, 1.3, 1.4], 4: [4.2, 4.3, 4.4]}
    with pytest.raises(ValueError, match="repeats: expected at least 1, got 0"):
        times.measure(run_step, trees, repeats=0)
    with pytest.raises(ValueError, match="run_step: expected seconds above 0, got nan"):
        times.measure(lambda tree: math.nan, trees)
    assert times.profile(1, 0).kept() == {}


def test_times_survive_a_file_and_no_other_device_or_model_reads_them():
    times = StepTimes("H200, graph", "llama bf16")
    for rows in (512, 1024):
        for seconds in (0.25, 0.5, 0.125):
            times.profile(2, rows).add(4, seconds * rows)
    text = times.to_json()
    again = StepTimes.from_json(text, device="H200, graph", model="llama bf16")
    assert again.to_json() == text
    assert again.profile(2, 1024).seconds(4) == 256.0
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
def test_files_that_are_no_object_are_refused(text):
    with pytest.raises(ValueError, match="step times: expected"):
        StepTimes.from_json(text, device="d", model="m")
