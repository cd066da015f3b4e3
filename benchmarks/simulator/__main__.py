"""Predict what trees cost and gain on a device.

The prediction is a roofline of the step; it also says where speculation stops paying.

    python -m benchmarks.simulator --model vicuna-7b --device a100-80 --batch 1,4,16 --sequence 1024 --nodes 16,64
    python -m benchmarks.simulator --model FOLDER --device cpu --accuracies heads.json --heads 4 --json

A roofline counts operations and bytes only. Real steps are slower, most of all those with trees; docs/simulation.md
compares them with measurements.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.simulator.acceleration import Acceleration, PaperAcceleration, TreeAcceleration
from benchmarks.simulator.devices import DEVICES, Device, read_device, write_device
from benchmarks.simulator.plot import draw_sweep
from benchmarks.simulator.shapes import SHAPES, HeadShape, find_shape
from benchmarks.simulator.simulate import (
    MOST_BATCH,
    MOST_SEQUENCE,
    Point,
    Range,
    Simulation,
    best,
    paying_nodes,
)
from medusa_decoding.checkpoints.accuracies import read_accuracies
from medusa_decoding.checks import import_library
from medusa_decoding.cli._arguments import add_option, at_least_one, counts, factor

MEASURED = ("cpu", "cuda")


def main(argv: Sequence[str] | None = None) -> int:
    """Simulate every combination of the arguments, and print or draw it."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.simulator", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words = f"{', '.join(SHAPES)}, or a folder or hub id with a transformers config"
    add_option(parser, "--model MODEL", str, words, "vicuna-7b")
    words = f"{', '.join(DEVICES)}; cpu or cuda: measured now, in seconds; or a JSON file"
    add_option(parser, "--device DEVICE", str, words, "a100-80")
    add_option(parser, "--save-device FILE", Path, "write the device as JSON, to be edited")
    add_option(parser, "--batch B,B", counts, "batch sizes", [1, 4, 16])
    add_option(parser, "--sequence S,S", counts, "cached rows", [1024])
    add_option(parser, "--nodes N,N", counts, "root included", [1, 16, 32, 64])
    add_option(
        parser,
        "--accuracies FILE",
        Path,
        "JSON: for each head a list of how often each rank is right, or counts (hits, total); each size has its best "
        "tree then (default: the paper's model, 1 + 0.477 ln n)",
    )
    add_option(parser, "--heads K", at_least_one, "default: 4, or those in the accuracies")
    add_option(parser, "--head-vocabulary V", at_least_one, "rows of a trimmed projection")
    parser.add_argument("--shared", action="store_true", help="heads project with the model's lm_head")
    add_option(parser, "--weight-bytes X", factor, "bytes per weight, as 0.5 for 4 bits")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_option(parser, "--plot FOLDER", Path, "draw the speedups there (needs matplotlib)")
    args = parser.parse_args(argv)
    try:
        run(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0


def run(args: argparse.Namespace) -> None:
    """Simulate what the arguments say, and print or draw it."""
    if args.plot is not None:
        import_library("matplotlib", "--plot", extra="bench")  # before any work
    simulation = make_simulation(args)
    if args.save_device is not None:
        write_device(simulation.device, args.save_device)
    points = simulation.sweep(args.batch, args.sequence, args.nodes)
    result = sweep_figures(simulation, points, args)
    if args.plot is not None:
        title = f"{simulation.shape.name} on {simulation.device.name}; {simulation.acceleration.name}"
        path = args.plot / "simulated-speedup.png"
        draw_sweep(points, title, path)
        result["figure"] = str(path)
    if args.json:
        print(json.dumps(result))
    else:
        print_report(result)


def find_device(name: str) -> Device:
    """Return a device by name, from a measurement now, or from a file.

    Raises:
        ValueError: an unknown name, or a bad file.
    """
    if name in DEVICES:
        return DEVICES[name]
    if name in MEASURED:
        from benchmarks.simulator.probe_device import probe_device  # imports torch

        return probe_device("cpu" if name == "cpu" else "cuda")
    if not Path(name).is_file():
        raise ValueError(f"--device: expected one of {', '.join((*DEVICES, *MEASURED))} or a JSON file, got {name}")
    return read_device(name)


def make_simulation(args: argparse.Namespace) -> Simulation:
    """Return the simulation that the arguments describe.

    Raises:
        ValueError: conflicting arguments, or a bad file.
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
    device = find_device(args.device)
    return Simulation(device, shape, heads, acceleration, args.weight_bytes)


def sweep_figures(simulation: Simulation, points: Sequence[Point], args: argparse.Namespace) -> dict[str, Any]:
    """Return every figure of a sweep, and where speculation stops paying."""
    by_nodes = []
    for sequence in args.sequence:
        for batch in args.batch:
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
    trees = [count for count in args.nodes if count > 1]
    return {
        "device": asdict(simulation.device),
        "model": vars(simulation.shape),
        "heads": vars(simulation.heads),
        "acceleration": simulation.acceleration.name,
        "most_nodes": simulation.acceleration.most_nodes,
        "points": [vars(point) | {"overhead": point.overhead, "speedup": point.speedup} for point in points],
        "limits": {
            "nodes": by_nodes,
            "batch": [
                {"sequence": s, "nodes": n, "paying_batches": simulation.paying_batches(s, n)}
                for s in args.sequence
                for n in trees
            ],
            "sequence": [
                {"batch": b, "nodes": n, "paying_sequences": simulation.paying_sequences(b, n)}
                for b in args.batch
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
    vocabulary = heads["vocabulary"] or result["model"]["vocabulary"]
    rows = "rows of lm_head" if heads["shared"] else "rows each"
    print(f"a whole step; heads: {heads['count']}, with {vocabulary:,} {rows}")
    print(f"tokens per step: {result['acceleration']}\n")
    print("  prefix  batch  nodes    plain us     step us  overhead  tokens  speedup")
    for point in result["points"]:
        print(
            f"{point['sequence']:8}{point['batch']:7}{point['nodes']:7}{point['plain_us']:12.1f}{point['step_us']:12.1f}"
            f"{point['overhead']:10.2f}{point['acceleration']:8.2f}{point['speedup']:9.2f}"
        )
    print("\nwhere speculation pays:")
    for limit in result["limits"]["nodes"]:
        text = _ranges(limit["paying_nodes"], None)
        if limit["paying_nodes"]:
            text += f"; best {limit['best_nodes']} ({limit['best_speedup']:.2f})"
        print(f"  prefix {limit['sequence']}, batch {limit['batch']}: nodes {text}")
    for limit in result["limits"]["batch"]:
        text = _ranges(limit["paying_batches"], MOST_BATCH)
        print(f"  prefix {limit['sequence']}, {limit['nodes']} nodes: batch {text}")
    for limit in result["limits"]["sequence"]:
        text = _ranges(limit["paying_sequences"], MOST_SEQUENCE)
        print(f"  batch {limit['batch']}, {limit['nodes']} nodes: prefix {text}")
    if "figure" in result:
        print(f"\nplot: {result['figure']}")


def _ranges(found: Sequence[Range], most: int | None) -> str:
    text = [f"{first:,} to {last:,}" + (" or more" if last == most else "") for first, last in found]
    return " and ".join(text) or "none"


if __name__ == "__main__":
    sys.exit(main())
