"""Accelerations, speedups, and where they fall below 1."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulator.acceleration import PaperAcceleration, TreeAcceleration
from benchmarks.simulator.devices import DEVICES
from benchmarks.simulator.operators import step_operators, total_seconds
from benchmarks.simulator.shapes import SHAPES, HeadShape
from benchmarks.simulator.simulate import Simulation, paying
from medusa_decoding.checkpoints.accuracies import read_accuracies
from medusa_decoding.trees.tree import Tree

ACCURACIES = [[0.5, 0.2, 0.1], [0.4, 0.1, 0.05], [0.3, 0.2, 0.01]]
SEVEN = SHAPES["llama-2-7b"]


def simulation(**changes: Any) -> Simulation:
    given_: dict[str, Any] = {
        "device": DEVICES["a100-80"], "shape": SEVEN, "heads": HeadShape(), "acceleration": PaperAcceleration()
    }  # fmt: skip
    return Simulation(**(given_ | changes))


def test_the_papers_acceleration() -> None:
    acceleration = PaperAcceleration()
    assert acceleration(1) == 1
    # ln 64 = 4.158883; 1 + 0.477 * 4.158883.
    assert acceleration(64) == pytest.approx(2.983787, abs=1e-6)
    for nodes in (0, 257):
        with pytest.raises(ValueError, match=r"nodes: expected 1 to 256 \(root included\)"):
            acceleration(nodes)


@pytest.mark.parametrize("nodes", [1, 2, 3, 7, 20, 40])
def test_accuracies_give_the_best_trees_expectation(nodes: int) -> None:
    expected = Tree.optimal(ACCURACIES, nodes).expected_tokens(ACCURACIES)
    assert TreeAcceleration(ACCURACIES)(nodes) == pytest.approx(expected, abs=1e-12)


COUNTS = {"hits": [[50, 70, 80], [40, 50, 55]], "total": [100, 100]}


@pytest.mark.parametrize(
    "values",
    [
        [[0.5, 0.2, 0.1], [0.4, 0.1, 0.05]],
        {"accuracies": [[0.5, 0.2, 0.1], [0.4, 0.1, 0.05]], "more": 1},
        COUNTS,
        {"accuracy": COUNTS},
    ],
)
def test_accuracies_are_read(tmp_path: Path, values: Any) -> None:
    path = tmp_path / "accuracies.json"
    path.write_text(json.dumps(values))
    rows = read_accuracies(path)
    assert [value for row in rows for value in row] == pytest.approx([0.5, 0.2, 0.1, 0.4, 0.1, 0.05])


@pytest.mark.parametrize(
    "text",
    [
        *("3", "[[]]", "[[NaN]]", '{"hits": [[1]]}', '{"hits": [[3]], "total": [2]}'),
        "[[0.5, 0.3, 0.2], [0.316, 0.424, 0.485]]",  # of several ranks together, as training logs print them
    ],
)
def test_what_are_no_accuracies_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "accuracies.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"accuracies\.json: expected"):
        read_accuracies(path)


def test_a_point_by_hand() -> None:
    point = simulation().point(2, 1024, 16)
    plain = total_seconds(step_operators(SEVEN, None, 2, 1, 1024), DEVICES["a100-80"])
    step = total_seconds(step_operators(SEVEN, HeadShape(), 2, 16, 1024), DEVICES["a100-80"])
    assert point.plain_us == pytest.approx(1e6 * plain)
    assert point.overhead == pytest.approx(step / plain)
    assert point.speedup == pytest.approx((1 + 0.477 * math.log(16)) * plain / step)


@given(low=st.integers(1, 300), length=st.integers(0, 300), most=st.integers(1, 500))
def test_a_range_that_begins_at_1_or_lasts_to_the_end_is_found_exactly(low: int, length: int, most: int) -> None:
    assert paying(lambda x: 1.0 if x <= low else 0.0, most) == [(1, min(low, most))]
    assert paying(lambda x: 1.0 if x > low else 0.0, most) == ([(low + 1, most)] if low < most else [])
    dip = paying(lambda x: 0.0 if low < x <= low + 2 * low + length else 1.0, most)
    ends = [(1, min(low, most))] + ([(low + 2 * low + length + 1, most)] if 3 * low + length < most else [])
    # A dip that is longer than a doubling holds a power of two.
    assert dip == ends


def test_where_it_pays_agrees_with_a_slow_walk() -> None:
    of = simulation()
    walked = [batch for batch in range(1, 65) if of.point(batch, 1024, 32).speedup >= 1]
    assert of.paying_batches(1024, 32) == [(1, walked[-1])]
    assert walked == list(range(1, walked[-1] + 1))
    assert 1 < walked[-1] < 64
