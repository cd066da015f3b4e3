"""Simulate what trees cost and gain on a device: a roofline of the step, and where speculation stops paying.

    medusa simulate --model vicuna-7b --device a100-80 --batch 1,4,16 --sequence 1024 --nodes 16,64
    medusa simulate --model FOLDER --device cpu --accuracies heads.json --heads 4 --json
    medusa simulate --device h200 --records benchmarks/results/nvidia-h200.jsonl
    medusa simulate --paper docs/figures

A roofline counts operations and bytes only: real steps are slower, trees most of all. docs/simulation.md says by how
much, where it was measured.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.paper import plots, reproduction
from medusa_decoding.checkpoints.accuracies import read_accuracies
from medusa_decoding.cli._arguments import at_least_one, factor
from medusa_decoding.roofline import compare_measured
from medusa_decoding.roofline.acceleration import Acceleration, PaperAcceleration, TreeAcceleration
from medusa_decoding.roofline.devices import DEVICES, Device, read_device, write_device
from medusa_decoding.roofline.probe_device import probe_device
from medusa_decoding.roofline.shapes import SHAPES, HeadShape, find_shape
from medusa_decoding.roofline.simulate import MOST_BATCH, MOST_SEQUENCE, Range, Scope, Simulation, best, paying_nodes

MEASURED = ("cpu", "cuda")


def counts(text: str) -> list[int]:
    """Parse counts of at least 1, separated by commas."""
    return [at_least_one(part) for part in text.split(",")]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--model",
        default="vicuna-7b",
        metavar="MODEL",
        help=f"{', '.join(SHAPES)}, or a folder or hub id with a transformers config (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        default="a100-80",
        metavar="DEVICE",
        help=f"{', '.join(DEVICES)}; cpu or cuda: measured now, in seconds; or a JSON file (default: %(default)s)",
    )
    parser.add_argument("--save-device", type=Path, metavar="FILE", help="write the device as JSON, to be edited")
    parser.add_argument("--batch", type=counts, default=[1, 4, 16], metavar="B,B", help="default: 1,4,16")
    parser.add_argument("--sequence", type=counts, default=[1024], metavar="S,S", help="cached rows (default: 1024)")
    parser.add_argument(
        "--nodes", type=counts, default=[1, 16, 32, 64], metavar="N,N", help="root included (default: 1,16,32,64)"
    )
    parser.add_argument(
        "--accuracies",
        type=Path,
        metavar="FILE",
        help="JSON: a list a head of how often each rank is right, or counts (hits, total); then each size has its "
        "best tree (default: the paper's model, 1 + 0.477 ln n)",
    )
    parser.add_argument("--heads", type=at_least_one, metavar="K", help="default: 4, or those in the accuracies")
    parser.add_argument("--head-vocabulary", type=at_least_one, metavar="V", help="rows of a trimmed projection")
    parser.add_argument("--shared", action="store_true", help="heads project with the model's lm_head")
    parser.add_argument("--weight-bytes", type=factor, metavar="X", help="bytes a weight, as 0.5 for 4 bits")
    parser.add_argument(
        "--block", action="store_true", help="the paper's simplified block, without heads, instead of a whole step"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw the speedups there (needs matplotlib)")
    other = parser.add_mutually_exclusive_group()
    other.add_argument(
        "--records", type=Path, metavar="FILE", help="instead: a benchmark's measured steps beside the prediction"
    )
    other.add_argument(
        "--paper",
        type=Path,
        metavar="FOLDER",
        help="instead: the paper's tables 6 to 8 and figures 9 to 23 again, as CSV and PNG (needs matplotlib)",
    )


def run(args: argparse.Namespace) -> int:
    """Simulate, compare or reproduce."""
    if args.plot is not None or args.paper is not None:
        plots.matplotlib()  # refused before any work
    if args.paper is not None:
        return _reproduce(args)
    if args.records is not None:
        return _compare(args)
    simulation = make_simulation(args)
    if args.save_device is not None:
        write_device(simulation.device, args.save_device)
    result = simulate(simulation, args.batch, args.sequence, args.nodes)
    if args.plot is not None:
        title = f"{simulation.shape.name} on {simulation.device.name}; {simulation.acceleration.name}"
        points = simulation.sweep(args.batch, args.sequence, args.nodes)
        path = args.plot / "simulated-speedup.png"
        plots.draw_sweep(points, title, path)
        result["figure"] = str(path)
    if args.json:
        print(json.dumps(result))
    else:
        print_report(result)
    return 0


def find_device(name: str) -> Device:
    """Return a device by name, measured now, or from a file.

    Raises:
        ValueError: none of these; a file that is no device.
    """
    if name in DEVICES:
        return DEVICES[name]
    if name in MEASURED:
        return probe_device(name)
    if not Path(name).is_file():
        raise ValueError(f"--device: expected one of {', '.join((*DEVICES, *MEASURED))} or a JSON file, got {name}")
    return read_device(name)


def make_simulation(args: argparse.Namespace) -> Simulation:
    """Return the simulation that the arguments describe.

    Raises:
        ValueError: arguments that do not go together, or what a file says is refused.
    """
    acceleration: Acceleration = PaperAcceleration()
    if args.accuracies is not None:
        acceleration = TreeAcceleration(read_accuracies(args.accuracies))
    if args.heads is not None and acceleration.heads is not None and args.heads != acceleration.heads:
        raise ValueError(f"--heads: expected {acceleration.heads}, as in {args.accuracies}, got {args.heads}")
    if max(args.nodes) > acceleration.most_nodes:
        raise ValueError(f"--nodes: expected at most {acceleration.most_nodes}, got {max(args.nodes)}")
    shape = find_shape(args.model)
    if args.head_vocabulary is not None and args.head_vocabulary > shape.vocabulary:
        raise ValueError(f"--head-vocabulary: expected at most {shape.vocabulary}, got {args.head_vocabulary}")
    heads = HeadShape(args.heads or acceleration.heads or 4, args.head_vocabulary, args.shared)
    scope: Scope = "block" if args.block else "step"
    return Simulation(find_device(args.device), shape, heads, acceleration, args.weight_bytes, scope)


def simulate(
    simulation: Simulation, batches: Sequence[int], sequences: Sequence[int], nodes: Sequence[int]
) -> dict[str, Any]:
    """Return every figure of a sweep, and where speculation stops paying."""
    points = [
        {
            "batch": point.batch,
            "sequence": point.sequence,
            "nodes": point.nodes,
            "acceleration": point.acceleration,
            "plain_us": point.plain_us,
            "step_us": point.step_us,
            "overhead": point.overhead,
            "speedup": point.speedup,
        }
        for point in simulation.sweep(batches, sequences, nodes)
    ]
    by_nodes = []
    for sequence in sequences:
        for batch in batches:
            sizes = simulation.by_nodes(batch, sequence)
            fastest = best(sizes)
            by_nodes.append(
                {
                    "batch": batch,
                    "sequence": sequence,
                    "best_nodes": fastest.nodes,
                    "best_speedup": fastest.speedup,
                    "paying_nodes": paying_nodes(sizes),
                }
            )
    trees = [count for count in nodes if count > 1]
    return {
        "device": simulation.device.to_json(),
        "model": vars(simulation.shape),
        "heads": None if simulation.scope == "block" else vars(simulation.heads),
        "scope": simulation.scope,
        "acceleration": simulation.acceleration.name,
        "most_nodes": simulation.acceleration.most_nodes,
        "points": points,
        "limits": {
            "nodes": by_nodes,
            "batch": [
                {"sequence": s, "nodes": n, "paying_batches": simulation.paying_batches(s, n)}
                for s in sequences
                for n in trees
            ],
            "sequence": [
                {"batch": b, "nodes": n, "paying_sequences": simulation.paying_sequences(b, n)}
                for b in batches
                for n in trees
            ],
        },
    }


def print_report(result: dict[str, Any]) -> None:
    """Print a sweep for a person."""
    device = result["device"]
    print(
        f"{result['model']['name']} on {device['name']} ({device['flops'] / 1e12:.4g} TFLOP/s {device['dtype']}, "
        f"{device['bandwidth'] / 1e9:.5g} GB/s; {device['source']})"
    )
    heads = result["heads"]
    if heads is None:
        print("the paper's simplified block: one layer without output projection, lm_head and heads")
    else:
        vocabulary = heads["vocabulary"] or result["model"]["vocabulary"]
        rows = "rows of lm_head" if heads["shared"] else "rows each"
        print(f"a whole step; heads: {heads['count']}, with {vocabulary:,} {rows}")
    print(f"tokens a step: {result['acceleration']}\n")
    print("  prefix  batch  nodes    plain us     step us  overhead  tokens  speedup")
    for point in result["points"]:
        print(
            f"{point['sequence']:8}{point['batch']:7}{point['nodes']:7}{point['plain_us']:12.1f}{point['step_us']:12.1f}"
            f"{point['overhead']:10.2f}{point['acceleration']:8.2f}{point['speedup']:9.2f}"
        )
    print("\nwhere speculation pays:")
    for limit in result["limits"]["nodes"]:
        told = _ranges(limit["paying_nodes"], None)
        if limit["paying_nodes"]:
            told += f"; best {limit['best_nodes']} ({limit['best_speedup']:.2f})"
        print(f"  prefix {limit['sequence']}, batch {limit['batch']}: nodes {told}")
    for limit in result["limits"]["batch"]:
        told = _ranges(limit["paying_batches"], MOST_BATCH)
        print(f"  prefix {limit['sequence']}, {limit['nodes']} nodes: batch {told}")
    for limit in result["limits"]["sequence"]:
        told = _ranges(limit["paying_sequences"], MOST_SEQUENCE)
        print(f"  batch {limit['batch']}, {limit['nodes']} nodes: prefix {told}")
    if "figure" in result:
        print(f"\ndrawn: {result['figure']}")


def _ranges(found: Sequence[Range], most: int | None) -> str:
    told = [f"{first:,} to {last:,}" + (" or more" if last == most else "") for first, last in found]
    return " and ".join(told) or "none"


def _compare(args: argparse.Namespace) -> int:
    rows = compare_measured.compare(compare_measured.read_steps(args.records), find_device(args.device))
    if args.json:
        print(json.dumps(rows))
        return 0
    print("errors in percent of the measured time; fitted: to the plain steps alone")
    print(
        "model        prefix batch nodes  heads                  measured us  roofline  error   fitted  error"
        "   overhead: measured, roofline, fitted"
    )
    for row in rows:
        overhead = ", ".join(f"{row[f'{name}_overhead']:.2f}" for name in ("measured", "roofline", "fitted")
                             if row.get(f"{name}_overhead") and row["nodes"] > 1)  # fmt: skip
        print(
            f"{row['model']:12}{row['prefix']:7}{row['batch']:6}{row['nodes']:6}  {row['heads'] or '':22}"
            f"{row['measured_us']:12.0f}{row['roofline_us']:10.0f}{row['roofline_error_percent']:7.1f}"
            f"{row['fitted_us']:9.0f}{row['fitted_error_percent']:7.1f}   {overhead}"
        )
    return 0


def _reproduce(args: argparse.Namespace) -> int:
    """Write every table and figure; print the errors."""
    folder: Path = args.paper
    tables, roofs, simulated = (
        reproduction.table_rows(), reproduction.roofline_rows(), reproduction.simulation_rows()
    )  # fmt: skip
    errors, formulas = reproduction.error_rows(), reproduction.acceleration_rows()
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in (
        ("tables-6-8", tables), ("figures-9-17", roofs), ("figures-21-23", simulated),
        ("acceleration", formulas), ("errors", errors),
    ):  # fmt: skip
        write_csv(rows, folder / f"roofline-{name}.csv")
    plots.draw_rooflines(roofs, folder / "roofline-figures-9-17.png")
    plots.draw_tables(tables, folder / "roofline-figures-18-20.png")
    plots.draw_figure_21(simulated, folder / "roofline-figure-21.png")
    for number in (22, 23):
        plots.draw_speedups(simulated, number, folder / f"roofline-figure-{number}.png")
    if args.json:
        print(json.dumps({"errors": errors, "acceleration": formulas}))
        return 0
    for row in errors:
        on = f" on {row['device']}" if "device" in row else ""
        told = (
            f"largest difference {row['largest_difference']}"
            if "largest_difference" in row
            else f"median error {row['median_error_percent']} % "
            f"({row['lowest_percent']:+} to {row['highest_percent']:+} %)"
        )
        print(f"{row['what']}{on}: {told}, {row['values']} values")
    for row in formulas[:-1]:
        print(f"{row['formula']}: {row['n=1']} at 1, {row['n=64']} at 64; off by {row['worst']} at most")
    print(f"written to {folder}")
    return 0


def write_csv(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write rows; a column for each name that any of them has, empty where it has none."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
