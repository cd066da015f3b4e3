"""The paper's tables within the errors that docs/simulation.md states, and rows of its figures."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.paper import __main__ as command
from benchmarks.paper import reproduction
from benchmarks.roofline import compare, compare_on_cpu, fit_steps, read_steps
from benchmarks.simulator.devices import DEVICES, H200, Device
from benchmarks.simulator.shapes import ModelShape

# b = 2, q = 3, s = 5, n = 4 heads of d = 8, h = 32, i = 48.
SMALL = ModelShape("small", hidden=32, intermediate=48, layers=2, heads=4, kv_heads=2, head_dim=8, vocabulary=100)


@pytest.mark.parametrize("table", [6, 7, 8])
def test_every_intensity_is_the_printed_one(table: int) -> None:
    of = reproduction.cells(table)
    assert len(of) == 56
    for cell in of:
        # Two printed decimals, cut off or rounded.
        assert reproduction.intensity(cell.operator) == pytest.approx(cell.intensity, abs=0.0051), cell


@pytest.mark.parametrize(
    ("table", "low", "high", "median"), [(6, -6.1, 6.5, 2), (7, -12.9, 6.9, 2.5), (8, -10.4, 32.1, 4.5)]
)
def test_the_fitted_roofline_is_as_near_as_stated(table: int, low: float, high: float, median: float) -> None:
    attained = DEVICES["a100-80-attained"]
    errors = sorted(100 * (c.tflops_on(attained) / c.tflops - 1) for c in reproduction.cells(table))
    assert low < errors[0]
    assert errors[-1] < high
    assert sorted(map(abs, errors))[28] < median


def test_shares_of_the_a100_are_what_a_fit_gives() -> None:
    assert reproduction.fit_tables() == DEVICES["a100-80-attained"]


def test_only_one_reading_of_the_printed_formula_fits() -> None:
    *formulas, picture = reproduction.acceleration_rows()
    worst = {row["formula"]: row["worst"] for row in formulas}
    assert worst.pop("1 + 0.477 ln(n)") <= 0.08
    assert min(worst.values()) >= 1
    assert picture["n=1"] == 1


@pytest.fixture
def records(root: Path) -> Path:
    return root / "benchmarks" / "results" / "nvidia-h200.jsonl"


def test_shares_of_the_h200_are_what_a_fit_to_plain_steps_gives(records: Path) -> None:
    fitted, stored = fit_steps(read_steps(records), H200), DEVICES["h200-attained"]
    assert (fitted.linear, fitted.attention) == (stored.linear, stored.attention)


def test_measured_steps_beside_predictions(records: Path) -> None:
    rows = compare(read_steps(records), H200)
    plain = [row for row in rows if row["heads"] is None]
    trees = [row for row in rows if row["heads"] is not None]
    assert (len(plain), len(trees)) == (5, 16)
    # As stated in docs/simulation.md.
    assert all(abs(row["fitted_error_percent"]) <= 1 for row in plain)
    assert all(-20 < row["fitted_error_percent"] < -3 for row in trees)
    assert all(-40 < row["roofline_error_percent"] < -21 for row in rows)
    high = {n: [r["measured_overhead"] / r["fitted_overhead"] for r in trees if r["nodes"] == n] for n in (16, 64)}
    assert all(1.04 < ratio < 1.07 for ratio in high[16])
    assert all(1.12 < ratio < 1.23 for ratio in high[64])
    # A roofline counts no time too much.
    assert all(row["measured_overhead"] > row["roofline_overhead"] for row in trees)


def test_a_step_on_a_cpu_is_bound_by_bytes_and_then_by_arithmetic() -> None:
    # Llama-127M: 12 layers of 768 (q, k, v 768 + 2 x 384, MLP of 2048), vocabulary 32,000; hardly any keys.
    layers, lm_head = 12 * (2 * 768 * 768 + 2 * 768 * 384 + 3 * 768 * 2048), 32000 * 768
    step = {"benchmark": "cpu-step", "model": "Llama-127M", "way": "eager", "prefix": 0, "median_us": 1e4}
    kinds = [("fp32", 4, 4), ("bf16", 2, 2), ("int8", 1, 2)]
    records = [step | {"dtype": dtype, "nodes": 1} for dtype, *_ in kinds]
    slow_memory = Device("cpu", flops=1e15, bandwidth=1e10, dtype="float32")
    for (dtype, of_layers, of_lm_head), row in zip(kinds, compare_on_cpu(records, slow_memory), strict=True):
        microseconds = (layers * of_layers + lm_head * of_lm_head) / 1e4
        assert (row["dtype"], row["nodes"]) == (dtype, 1)
        assert row["predicted_us"] == pytest.approx(microseconds, rel=0.01)
        assert row["measured_over_predicted"] == pytest.approx(1e4 / microseconds, rel=0.01)
    slow_arithmetic = Device("cpu", flops=1e9, bandwidth=1e15, dtype="float32")
    (row,) = compare_on_cpu([step | {"dtype": "bf16", "nodes": 8}], slow_arithmetic)
    heads = 4 * 768 * 768 + 4 * lm_head
    assert row["predicted_us"] == pytest.approx(2 * (8 * (layers + lm_head) + heads) / 1e3, rel=0.01)
    with pytest.raises(ValueError, match="expected eager steps of bench_cpu_step, got none"):
        compare_on_cpu([step | {"dtype": "bf16", "nodes": 1, "way": "transformers-eager"}], slow_memory)


@pytest.mark.slow
def test_one_command(tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert command.main([str(tmp_path)]) == 0
    assert "table 6, TFLOP/s on a100-80-attained: median error" in capsys.readouterr().out
    expected = {path.name for path in (root / "docs" / "figures").glob("roofline-*")}
    assert {path.name for path in tmp_path.iterdir()} == expected
    for name in expected:
        if name.endswith(".csv"):
            # What the repository shows is what the command writes.
            assert (tmp_path / name).read_text() == (root / "docs" / "figures" / name).read_text(), name
    with (tmp_path / "roofline-tables-6-8.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 3 * 56
