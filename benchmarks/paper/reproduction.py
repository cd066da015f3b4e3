"""The paper's tables 6 to 8 and figures 9 to 23 from the roofline, next to what the paper prints.

Tables 6 to 8 are measurements with printed numbers. Their errors are stated for the ideal roofline, which is a bound,
not a prediction, and for the one whose shares of the peaks were fitted to these tables (`a100-80-attained`). Figures 9
to 20 print no numbers: their points are made again without a comparison (18 to 20 show tables 6 to 8). Figures 21 to 23
are the paper's own simulations, compared with approximate readings of the pictures. They test the fitted roofline,
which has seen neither their model nor their sizes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.paper import values as paper
from benchmarks.paper.block import BlockSimulation, attention_product
from benchmarks.roofline import fit_attained
from benchmarks.simulator.acceleration import SLOPE, PaperAcceleration
from benchmarks.simulator.devices import A100, DEVICES, Device
from benchmarks.simulator.operators import Operator
from benchmarks.simulator.operators import linear as projection
from benchmarks.simulator.shapes import SHAPES, HeadShape

Row = dict[str, Any]
ATTAINED = DEVICES["a100-80-attained"]
LARGE, SMALL = SHAPES["vicuna-33b"], SHAPES["vicuna-7b"]
PICTURE = "read off the picture"
PRINTED: dict[str, Callable[[float], float]] = {
    "0.477 log10(n)": lambda nodes: SLOPE * math.log10(nodes),
    "0.477 ln(n)": lambda nodes: SLOPE * math.log(nodes),
    "0.477 log2(n)": lambda nodes: SLOPE * math.log2(nodes),
    "1 + 0.477 ln(n)": lambda nodes: 1 + SLOPE * math.log(nodes),
}
"""Possible readings of the formula that the paper prints as `acc_rate = 0.477 log(num_candidate)`."""


@dataclass(frozen=True)
class Cell:
    """One cell of tables 6 to 8.

    Attributes:
        table: 6, 7 or 8.
        batch: b.
        sequence: s; None in table 8, whose products do not depend on it.
        candidates: q.
        operator: what was measured.
        tflops: TFLOP/s, as printed.
        intensity: operations per byte, as printed.
    """

    table: int
    batch: int
    sequence: int | None
    candidates: int
    operator: Operator
    tflops: float
    intensity: float

    def tflops_on(self, device: Device) -> float:
        """Return the roofline's TFLOP/s."""
        return tflops(self.operator, device)


def tflops(operator: Operator, device: Device) -> float:
    """Return the TFLOP/s of an operator that takes its roofline time."""
    return operator.times * operator.flops / operator.seconds(device) / 1e12


def intensity(operator: Operator) -> float:
    """Return operations per byte, with elements of two bytes as in the paper."""
    return operator.flops / operator.bytes()


def cells(*tables: int) -> list[Cell]:
    """Return the cells of some of tables 6 to 8, in the paper's order."""
    found = []
    for table in tables:
        for key, row in {6: paper.TABLE_6, 7: paper.TABLE_7, 8: paper.TABLE_8}[table].items():
            batch, sequence = {6: (16, key), 7: (key, 1024), 8: (key, None)}[table]
            for tokens, printed in zip(paper.CANDIDATES, row, strict=True):
                if sequence is None:
                    operator = projection("up/gate/down", batch * tokens, LARGE.hidden, LARGE.intermediate)
                else:
                    operator = attention_product("qk/pv", batch, tokens, sequence, LARGE.heads, LARGE.head_dim)
                found.append(Cell(table, batch, sequence, tokens, operator, *printed))
    return found


def table_rows() -> list[Row]:
    """Return tables 6 to 8 with the paper's values and ours; errors in percent of the paper's."""
    rows = []
    for cell in cells(6, 7, 8):
        ideal, attained = cell.tflops_on(A100), cell.tflops_on(ATTAINED)
        row: Row = {"table": cell.table, "batch": cell.batch, "sequence": cell.sequence, "candidates": cell.candidates}
        row |= {"paper_intensity": cell.intensity, "intensity": round(intensity(cell.operator), 3)}
        row["paper_tflops"] = cell.tflops
        for name, value in (("roofline", ideal), ("attained", attained)):
            row[f"{name}_tflops"] = round(value, 3)
            row[f"{name}_error_percent"] = round(100 * (value / cell.tflops - 1), 1)
        rows.append(row)
    return rows


def roofline_rows() -> list[Row]:
    """Return the points of figures 9 to 17: three models on three devices, 49 settings per operator.

    Equal points are given once: the projections of a plain step do not depend on the sequence. On the device that it
    was fitted on, the fitted roofline is given too, also for the two models that it has not seen.
    """
    rows = []
    figure = 9
    for device_name, (peak, bandwidth) in paper.PEAKS.items():
        device = replace(DEVICES[device_name], flops=peak * 1e12, bandwidth=bandwidth * 1e9)
        for model in ("vicuna-7b", "vicuna-13b", "vicuna-33b"):
            for series, batch, sequence, operator in _figure_points(model):
                row: Row = {"figure": figure, "model": model, "device": device_name, "series": series, "batch": batch}
                row |= {"sequence": sequence, "intensity": round(intensity(operator), 3)}
                row["tflops"] = round(tflops(operator, device), 4)
                fitted = round(tflops(operator, ATTAINED), 4) if device_name == A100.name else None
                rows.append(row | {"attained_tflops": fitted})
            figure += 1
    return rows


def _figure_points(model: str) -> Iterator[tuple[str, int, int | None, Operator]]:
    shape = SHAPES[model]
    for batch in paper.BATCHES:
        for phase in ("init", "ar"):
            for sequence in paper.SEQUENCES:
                tokens = sequence if phase == "init" else 1
                if phase == "init" or sequence == paper.SEQUENCES[0]:
                    told, rows = (sequence if phase == "init" else None), batch * tokens
                    yield f"qkv mlp {phase}", batch, told, projection("qkv", rows, shape.hidden, shape.hidden)
                    yield f"up/gate/down {phase}", batch, told, projection("up", rows, shape.hidden, shape.intermediate)
                product = attention_product("qk/pv", batch, tokens, sequence, shape.heads, shape.head_dim)
                yield f"qk/pv {phase}", batch, sequence, product


def simulation_of(device: Device) -> BlockSimulation:
    """Return the paper's simulation: a simplified block of Llama-7B, its own acceleration model."""
    return BlockSimulation(device, SMALL, HeadShape(), PaperAcceleration())


def simulation_rows() -> list[Row]:
    """Return figures 21 to 23: latency relative to plain decoding, speedup, and readings of the pictures."""
    ideal, attained = simulation_of(A100), simulation_of(ATTAINED)
    cases = [(21, 1, 1024), *((22, batch, 1024) for batch in paper.BATCHES)]
    cases += [(23, 4, sequence) for sequence in paper.SEQUENCES]
    rows = []
    for figure, batch, sequence in cases:
        for candidates in paper.CANDIDATES:
            row: Row = {"figure": figure, "batch": batch, "sequence": sequence, "candidates": candidates}
            for name, simulation in (("roofline", ideal), ("attained", attained)):
                point = simulation.point(batch, sequence, candidates)
                row.setdefault("acceleration", round(point.acceleration, 3))
                row[f"{name}_latency"] = round(point.overhead, 3)
                row[f"{name}_speedup"] = round(point.speedup, 3)
            rows.append(row | {"picture_speedup": read_speedup(figure, batch, sequence, candidates)})
    return rows


def read_speedup(figure: int, batch: int, sequence: int, candidates: int) -> float | None:
    """Return the speedup that was read off figure 21, 22 or 23; None if none was read."""
    if figure == 21:
        return paper.SPEEDUP[candidates]
    if candidates == 1:
        return 1.0
    if figure == 22:
        return paper.SPEEDUP_BY_BATCH[batch].get(candidates)
    return paper.SPEEDUP_BY_CANDIDATES[candidates][paper.SEQUENCES.index(sequence)]


def acceleration_rows() -> list[Row]:
    """Return the readings of the printed formula against figure 21's, largest difference of each last."""
    rows = []
    for name, formula in PRINTED.items():
        ours = {n: formula(n) for n in paper.CANDIDATES}
        worst = max(abs(ours[n] - paper.ACCELERATION[n]) for n in ours)
        told = {f"n={n}": round(value, 2) for n, value in ours.items()}
        rows.append({"formula": name, **told, "worst": round(worst, 2)})
    read = {f"n={n}": value for n, value in paper.ACCELERATION.items()}
    return [*rows, {"formula": f"figure 21, {PICTURE}", **read, "worst": None}]


def error_rows() -> list[Row]:
    """Return median and largest error of each table and figure, in percent; of intensities in operations per byte."""
    rows: list[Row] = []
    for table in (6, 7, 8):
        of = cells(table)
        worst = max(abs(intensity(cell.operator) - cell.intensity) for cell in of)
        rows.append({"what": f"table {table}, intensity", "values": len(of), "largest_difference": round(worst, 3)})
        for device in (A100, ATTAINED):
            errors = [100 * (cell.tflops_on(device) / cell.tflops - 1) for cell in of]
            rows.append({"what": f"table {table}, TFLOP/s", "device": device.name, **_spread(errors)})
    simulated = [row for row in simulation_rows() if row["picture_speedup"] and row["candidates"] > 1]
    for figure in (21, 22, 23):
        of_figure = [row for row in simulated if row["figure"] == figure]
        for device, column in ((A100, "roofline_speedup"), (ATTAINED, "attained_speedup")):
            errors = [100 * (row[column] / row["picture_speedup"] - 1) for row in of_figure]
            rows.append({"what": f"figure {figure}, speedup, {PICTURE}", "device": device.name, **_spread(errors)})
    return rows


def _spread(errors: Sequence[float]) -> Row:
    return {
        "values": len(errors),
        "median_error_percent": round(statistics.median(map(abs, errors)), 1),
        "lowest_percent": round(min(errors), 1),
        "highest_percent": round(max(errors), 1),
    }


def fit_tables() -> Device:
    """Fit what is attained of the A100's peaks to tables 6 to 8.

    Attention, from tables 6 and 7: a share of the bandwidth and a fixed time per operator (all of it is bound by
    memory, so the tables say nothing about arithmetic). Projections, from table 8: shares of both peaks and the rows
    that are computed together (one size of weights says nothing about a fixed time).
    """
    shares = [x / 100 for x in range(55, 91)]

    def error(of: Sequence[Cell], device: Device) -> float:
        return sum(math.log(cell.tflops_on(device) / cell.tflops) ** 2 for cell in of)

    products, projections = cells(6, 7), cells(8)
    attention = fit_attained(
        {"bandwidth": shares, "fixed_us": [float(x) for x in range(20, 51)]},
        lambda guess: error(products, replace(A100, attention=guess)),
    )
    linear = fit_attained(
        {"tile": [1, 64, 128, 256], "bandwidth": shares, "compute": shares},
        lambda guess: error(projections, replace(A100, linear=guess)),
    )
    return replace(ATTAINED, linear=linear, attention=attention)
