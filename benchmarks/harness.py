"""What every benchmark shares: where results are kept, and how ways of doing the same work are compared.

A record is one JSON line with machine, versions, commit, command and date next to its figures. Ways of doing the same
work are timed in turn within one process, so that a drift of the machine's speed affects all of them alike.
"""

from __future__ import annotations

import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from medusa_decoding import provenance as package_provenance
from medusa_decoding.evaluation import interval
from medusa_decoding.files import append_line
from medusa_decoding.provenance import machine, without_folders

RESULTS = Path(__file__).parent / "results"
T = TypeVar("T")
R = TypeVar("R")


def provenance() -> dict[str, Any]:
    """Return machine, versions, commit, command (without folders of this machine) and date."""
    program = Path(sys.argv[0])
    name = program.parent.name if program.stem == "__main__" else program.stem
    module = "pytest" if "pytest" in sys.argv[0] else f"benchmarks.{name}"
    command = shlex.join(["python", "-m", module, *without_folders(sys.argv[1:])])
    return package_provenance.provenance(command, file=__file__)


def write_record(benchmark: str, figures: Mapping[str, Any]) -> Path:
    """Append one record to the machine's file and return the file. Absolute paths in it become their last parts."""
    RESULTS.mkdir(exist_ok=True)
    record = {"benchmark": benchmark, **_without_folders(figures), **provenance()}
    path = own_file()
    append_line(path, record)
    return path


def own_file() -> Path:
    """Return the file of this machine's records."""
    return RESULTS / f"{machine_slug()}.jsonl"


def _without_folders(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _without_folders(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_folders(one) for one in value]
    return without_folders([value])[0] if isinstance(value, str) else value


def machine_slug(described: Mapping[str, Any] | None = None) -> str:
    """Return a machine's name (default: this one's) as file names have it: "NVIDIA H200" is nvidia-h200.

    Several processors have one name in a cloud, so a CPU's ends with its instruction set: amd-epyc-avx2.
    """
    described = described or machine()
    name = " ".join(filter(None, (described["name"], described.get("isa"))))
    return "".join(c if c.isalnum() else "-" for c in name.lower()).strip("-")


def in_turn(ways: Mapping[str, Callable[[T], R]], item: T, shuffler: random.Random) -> dict[str, R]:
    """Run every way on one input, in a random order so that none always runs after the same one; return the results."""
    order = list(ways)
    shuffler.shuffle(order)
    return {name: ways[name](item) for name in order}


def interleaved(
    ways: Mapping[str, Callable[[T], int]],
    inputs: Sequence[T],
    *,
    rounds: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[tuple[int, float]]]:
    """Run every way on every input in turn; return (units of work, seconds) per input, summed over the rounds."""

    def timed(way: Callable[[T], int]) -> Callable[[T], tuple[int, float]]:
        def run(item: T) -> tuple[int, float]:
            start = clock()
            return way(item), clock() - start

        return run

    shuffler, clocked = random.Random(0), {name: timed(way) for name, way in ways.items()}
    found = {name: [(0, 0.0)] * len(inputs) for name in ways}
    for _ in range(rounds):
        for i, item in enumerate(inputs):
            for name, (units, seconds) in in_turn(clocked, item, shuffler).items():
                before = found[name][i]
                found[name][i] = (before[0] + units, before[1] + seconds)
    return found


def rate(samples: Sequence[tuple[int, float]]) -> float:
    """Return units per second over all inputs."""
    return sum(units for units, _ in samples) / sum(seconds for _, seconds in samples)


def ratio(samples: Sequence[tuple[int, float]], baseline: Sequence[tuple[int, float]]) -> dict[str, float | None]:
    """Return the rate of `samples` over that of `baseline`, inputs paired, with its interval (see `interval.WORDS`)."""
    pairs = list(zip(samples, baseline, strict=True))
    found = interval.ratio_of_rates([(*a, *b) for a, b in pairs])
    per_input = sorted((a[0] / a[1]) / (b[0] / b[1]) for a, b in pairs)
    return {
        "ratio": rate(samples) / rate(baseline),
        "low": None if found is None else found.low,
        "high": None if found is None else found.high,
        "median_of_inputs": statistics.median(per_input),
        "p10_of_inputs": per_input[len(per_input) // 10],
        "p90_of_inputs": per_input[len(per_input) * 9 // 10],
    }


def markdown(rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table, the first row its head."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
