"""Compare measured steps with the roofline's prediction, and fit shares of a device's peaks to measurements.

    python -m benchmarks.roofline benchmarks/results/nvidia-h200.jsonl --device h200
    python -m benchmarks.roofline --device cpu --write

The records are those of `python -m benchmarks.bench_step`: whole captured steps of this project with random weights.
With `--device cpu`, which is measured first, they are those of `python -m benchmarks.bench_cpu_step`; `--write` appends
the comparison to this machine's results.

The roofline counts bytes and operations. What it leaves out (launches, activations that are read repeatedly through the
caches, norms, acceptance, compaction) is part of the stated error.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.bench_step import MODELS
from benchmarks.inspection import aligned
from benchmarks.plot import latest, read
from benchmarks.simulator.__main__ import find_device
from benchmarks.simulator.devices import Attained, Device
from benchmarks.simulator.operators import Operator, step_operators, total_seconds
from benchmarks.simulator.shapes import SHAPES, HeadShape, shape_of

Record = dict[str, Any]
PLAIN = "plain graph"
WAYS = (PLAIN, "medusa graph")
HEADS: dict[str | None, HeadShape | None] = {
    None: None,
    "shared": HeadShape(shared=True),
    "trimmed 8192": HeadShape(vocabulary=8192),
    "shared, trimmed 8192": HeadShape(vocabulary=8192, shared=True),
    "full bf16": HeadShape(),
}

CPU_STEP = ("model", "dtype", "nodes", "prefix")
# Of a record of bench_cpu_step: the dtype of activations, lm_head and heads, and the bytes of a layer's weight.
CPU_DTYPES = {"fp32": ("float32", 4), "bf16": ("bfloat16", 2), "int8": ("bfloat16", 1)}


def fit_attained(grid: Mapping[str, Sequence[Any]], error: Callable[[Attained], float]) -> Attained:
    """Return the combination of a grid's values with the smallest error, the first of equal ones.

    Args:
        grid: values to try for each attribute; the others keep their defaults.
        error: the function to minimise.
    """
    guesses = (Attained(**dict(zip(grid, values, strict=True))) for values in itertools.product(*grid.values()))
    return min(guesses, key=error)


def read_steps(path: Path) -> list[Record]:
    """Return the captured steps of a file of records; the last one of each case.

    Raises:
        ValueError: no JSON lines, or no record of a captured step of a known model.
    """
    steps = [
        record
        for record in latest(read(path))
        if record["benchmark"] == "step"
        and record["way"] in WAYS
        and record.get("heads") in HEADS
        and record["model"].lower() in SHAPES
    ]
    if not steps:
        raise ValueError(f"{path}: expected records of captured steps (bench_step), got none")
    return steps


def operators_of(record: Record) -> list[Operator]:
    """Return the operators of a record's step."""
    heads = HEADS[record["heads"]]
    return step_operators(SHAPES[record["model"].lower()], heads, record["batch"], record["nodes"], record["prefix"])


def fit_steps(records: Iterable[Record], device: Device) -> Device:
    """Fit a share of the bandwidth and a fixed time per operator to the plain steps, the same for all operators.

    Medusa steps are left out, so that their predictions are predictions.

    Raises:
        ValueError: no plain step among the records.
    """
    plain = [record for record in records if record["way"] == PLAIN]
    if not plain:
        raise ValueError("records: expected a plain step among them, got none")
    steps = [(operators_of(record), record["median_us"]) for record in plain]

    def with_guess(guess: Attained) -> Device:
        return replace(device, linear=guess, attention=guess)

    def error(guess: Attained) -> float:
        on = with_guess(guess)
        return sum(math.log(1e6 * total_seconds(operators, on) / time) ** 2 for operators, time in steps)

    grid = {"bandwidth": [x / 100 for x in range(50, 101)], "fixed_us": [x / 10 for x in range(0, 61, 2)]}
    return replace(with_guess(fit_attained(grid, error)), name=f"{device.name}, fitted")


def compare(records: Sequence[Record], device: Device) -> list[Record]:
    """Return measured steps with the predictions of the ideal roofline and of one fitted to the plain steps.

    Overheads are over a plain step of the same model, prefix and batch, measured ones over that of the same run. Errors
    are in percent of the measured time.

    Raises:
        ValueError: no plain step among the records.
    """
    ideal, fitted = device.ideal(), fit_steps(records, device.ideal())
    case = ("model", "prefix", "batch")
    plain = {tuple(record[name] for name in case): record for record in records if record["way"] == PLAIN}
    rows = []
    for record in records:
        row: Record = {name: record[name] for name in (*case, "nodes", "heads")}
        row["measured_us"] = round(record["median_us"], 1)
        base = plain.get(tuple(record[name] for name in case))
        if record.get("ratio_to_plain"):
            row["measured_overhead"] = round(record["ratio_to_plain"], 4)
        for name, of in (("roofline", ideal), ("fitted", fitted)):
            time = 1e6 * total_seconds(operators_of(record), of)
            row[f"{name}_us"] = round(time, 1)
            row[f"{name}_error_percent"] = round(100 * (time / record["median_us"] - 1), 1)
            if base is not None:
                row[f"{name}_overhead"] = round(time / (1e6 * total_seconds(operators_of(base), of)), 4)
        rows.append(row)
    return rows


def compare_on_cpu(records: Iterable[Record], device: Device) -> list[Record]:
    """Return the eager steps of bench_cpu_step, the last of each case, with the ideal roofline's prediction.

    All dtypes are computed in float32's arithmetic, as the C++ kernels do where a CPU has no products of bfloat16.

    Args:
        records: of a machine.
        device: its peaks in float32.

    Raises:
        ValueError: no such step.
    """
    steps = {
        tuple(record[name] for name in CPU_STEP): record
        for record in records
        if record["benchmark"] == "cpu-step" and record["way"] == "eager" and record["dtype"] in CPU_DTYPES
    }
    if not steps:
        raise ValueError("records: expected eager steps of bench_cpu_step, got none")
    rows = []
    for case, record in steps.items():
        activations, layer_weight = CPU_DTYPES[record["dtype"]]
        on = replace(device.ideal(), dtype=activations)
        shape, heads = shape_of(MODELS[record["model"]](), record["model"]), HeadShape(shared=True)
        operators = step_operators(shape, heads if record["nodes"] > 1 else None, 1, record["nodes"], record["prefix"])
        seconds = sum(one.seconds(on, layer_weight if one.times == shape.layers else None) for one in operators)
        row = dict(zip(CPU_STEP, case, strict=True)) | {"measured_us": record["median_us"]}
        rows.append(
            row | {"predicted_us": 1e6 * seconds, "measured_over_predicted": record["median_us"] / seconds / 1e6}
        )
    return rows


def print_on_cpu(rows: Sequence[Record], device: Device) -> None:
    """Print what `compare_on_cpu` found for a person."""
    print(f"{device.name}: {device.flops / 1e9:.0f} GFLOP/s, {device.bandwidth / 1e9:.1f} GB/s")
    head = ("model", "dtype", "prefix", "nodes", "measured ms", "predicted", "measured over predicted")
    body = [
        (*(row[name] for name in ("model", "dtype", "prefix", "nodes")), f"{row['measured_us'] / 1e3:.1f}",
         f"{row['predicted_us'] / 1e3:.1f}", f"{row['measured_over_predicted']:.2f}")
        for row in rows
    ]  # fmt: skip
    print(aligned(head, body, 2))


def print_comparison(rows: Sequence[Record]) -> None:
    """Print measured steps and their predictions for a person."""
    print("errors in percent of the measured time; fitted: to the plain steps alone")
    names = ("model", "heads", "prefix", "batch", "nodes", "measured_us")
    names += tuple(f"{name}_{what}" for name in ("roofline", "fitted") for what in ("us", "error_percent"))
    names += ("measured_overhead", "roofline_overhead", "fitted_overhead")
    print(aligned(names, [["" if row.get(name) is None else row[name] for name in names] for row in rows], 2))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the comparison for a file of records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words = "file of records (default: the H200's; with --device cpu this machine's)"
    parser.add_argument("records", type=Path, nargs="?", help=words)
    words = "that they were measured on, as in benchmarks.simulator (default: h200)"
    parser.add_argument("--device", default="h200", help=words)
    parser.add_argument("--write", action="store_true", help="append the comparison on a CPU to this machine's results")
    args = parser.parse_args(arguments)
    try:
        if args.device == "cpu":
            device = find_device("cpu")
            rows = compare_on_cpu(read(args.records or harness.own_file()), device)
            if args.write:
                harness.write_record("roofline-cpu", {"device": asdict(device), "steps": rows})
            print_on_cpu(rows, device)
            return 0
        rows = compare(read_steps(args.records or harness.RESULTS / "nvidia-h200.jsonl"), find_device(args.device))
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print_comparison(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
