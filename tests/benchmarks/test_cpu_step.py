"""The CPU's step benchmark on a small model: every way is timed and recorded."""

from __future__ import annotations

import pytest

from benchmarks import bench_cpu_step

# torchao and torch.compile, imported for the first time, use what torch has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
PREFIX = 20


def rows(records):
    return [(record["way"], record["nodes"]) for record in records]


def test_every_way_has_a_record_and_a_row(results):
    ways = ("eager", "transformers-eager")
    records = bench_cpu_step.measure("tiny", "fp32", ways, (1, 4, 8), PREFIX, rounds=3)
    assert rows(records) == [("eager", 1), ("eager", 4), ("eager", 8), ("transformers-eager", 1)]
    # q, k, v, o, MLP and norms of two layers, the last norm, lm_head; keys and values of the prefix and the node.
    layer = 64 * (256 + 128 + 128 + 256 + 3 * 48) + 2 * 64
    plain = 4 * (2 * layer + 64 + 64 * 64 + 2 * 2 * 128 * (PREFIX + 1))
    assert [records[0]["bytes"], records[3]["bytes"]] == [plain, plain]
    # Four heads with a bias each, and their projection with lm_head.
    assert records[1]["bytes"] == plain + 4 * (4 * (64 * 64 + 64) + 64 * 64 + 2 * 2 * 128 * 3)
    for record in records:
        assert record["steps"] == 3 * bench_cpu_step.STEPS
        assert 0 < record["p10_us"] <= record["median_us"] <= record["p90_us"]
        assert record["gb_s"] == pytest.approx(record["bytes"] / record["median_us"] / 1e3)
        assert (record["ratio_to_plain"] == 1) == (record["nodes"] == 1)
    assert records[3]["ratio_to_transformers"] == 1
    assert rows(results.records()) == rows(records)


def test_int8_weights_count_as_they_are_stored():
    pytest.importorskip("torchao")
    layers, everything = (
        bench_cpu_step.measure("tiny", dtype, ("eager",), (1,), PREFIX, rounds=1) for dtype in ("int8", "int8-all")
    )
    projections, outputs = 64 * (256 + 128 + 128 + 256 + 3 * 48), 256 + 128 + 128 + 64 + 48 + 48 + 64
    rest = 2 * (4 * 64 + 64) + 2 * 2 * 2 * 128 * (PREFIX + 1)
    # One byte per weight; per row, a scale in fp32 and a zero point in int8.
    assert layers[0]["bytes"] == 2 * (projections + 5 * outputs) + rest + 2 * 64 * 64
    assert everything[0]["bytes"] == 2 * (projections + 5 * outputs) + rest + 64 * 64 + 5 * 64
