"""Compare measured steps with the roofline's prediction.

The records are those of `python -m benchmarks.bench_step`: whole captured steps of this project with random weights.
The roofline counts bytes and operations. What it leaves out (launches, activations that are read repeatedly through the
caches, norms, acceptance, compaction) is part of the stated error.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from medusa_decoding.files import MAX_JSON, parse_json, read_text
from medusa_decoding.roofline.devices import Attained, Device, fit_attained
from medusa_decoding.roofline.operators import Operator, step_operators, total_seconds
from medusa_decoding.roofline.shapes import SHAPES, HeadShape

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


def read_steps(path: str | Path) -> list[Record]:
    """Return the captured steps of a file of records; the last one of each case.

    Raises:
        ValueError: another file, or no record of a captured step of a known model.
    """
    found: dict[tuple[Any, ...], Record] = {}
    for number, line in enumerate(read_text(path, MAX_JSON).splitlines(), 1):
        if not line.strip():
            continue
        try:
            record = parse_json(line, "the line")
            known = (
                record["benchmark"] == "step"
                and record.get("way") in WAYS
                and record.get("heads") in HEADS
                and record["model"].lower() in SHAPES
                and record["median_us"] > 0
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path}, line {number}: expected a benchmark's record in JSON, got {error!r}") from error
        if known:
            found[tuple(record.get(name) for name in ("model", "way", "nodes", "heads", "prefix", "batch"))] = record
    if not found:
        raise ValueError(f"{path}: expected records of captured steps (bench_step), got none")
    return list(found.values())


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
