"""Which records count in the kernels' figures."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import plot


def record(shapes: dict[str, Any], us: float) -> dict[str, Any]:
    timing = {"median_us": us, "bytes": 4_000_000, "fraction": 1 / us, "copy_gb_per_s": 4000.0}
    case = {"benchmark": "tree_verify", "shapes": shapes, "dtype": "bfloat16", "implementation": "torch"}
    return case | timing | {"versions": {"torch": "2.11", "triton": "3.6"}}


def test_the_last_record_of_a_case_counts() -> None:
    shapes = {"vocabulary": 32000, "nodes": 64}
    old, new, other = record(shapes, 9.0), record(dict(reversed(shapes.items())), 7.0), record({"nodes": 1}, 8.0)
    assert plot.latest([old, other, new]) == [new, other]
    wrong = record(shapes, 6.0) | {"wrong": True}
    del wrong["median_us"]
    assert plot.latest([old, other, wrong]) == [other]


def test_copy_time() -> None:
    # 4 MB at 4 TB/s. A step's record has the fraction only.
    assert plot.copy_us(record({}, 9.0)) == pytest.approx(1.0)
    assert plot.copy_us({"benchmark": "step", "median_us": 4000, "fraction": 0.8}) == pytest.approx(3200)
