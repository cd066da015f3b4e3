"""What every benchmark shares: where a figure was taken, how ways are compared, and where the record goes.

A record is one JSON line with machine, versions, commit, settings and command beside its figures. Ways of doing the
same work are timed in turn within one process, so that a drift of the machine's speed meets all of them alike.
"""

from __future__ import annotations

import datetime
import os
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from medusa_decoding.files import append_line
from medusa_decoding.provenance import commit, cpu_name, versions

RESULTS = Path(__file__).parent / "results"
T = TypeVar("T")


def machine() -> dict[str, Any]:
    """Describe the device that figures are taken on."""
    if torch.cuda.is_available():
        # The newest CUDA that the driver serves: what torch tells of the driver without another tool.
        serves = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
        return {
            "name": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "driver_cuda": f"{serves // 1000}.{serves % 1000 // 10}" if serves else None,
            "gpus": torch.cuda.device_count(),
        }
    return {
        "name": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "isa": torch.backends.cpu.get_cpu_capability(),
    }


def provenance() -> dict[str, Any]:
    """Return machine, versions, commit, command and date."""
    return {
        "machine": machine(),
        "versions": versions("torch", "transformers", "triton"),
        "commit": commit(__file__),
        "command": shlex.join(["python", "-m", "pytest" if "pytest" in sys.argv[0] else _module(), *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
    }


def write_record(benchmark: str, figures: Mapping[str, Any]) -> Path:
    """Append one record to the machine's file and return the file."""
    RESULTS.mkdir(exist_ok=True)
    record = {"benchmark": benchmark, **figures, **provenance()}
    path = RESULTS / f"{machine_slug(record['machine'])}.jsonl"
    append_line(path, record)
    return path


def machine_slug(described: Mapping[str, Any]) -> str:
    """Return the machine's name as file names have it: "NVIDIA H200" is nvidia-h200."""
    return "".join(c if c.isalnum() else "-" for c in described["name"].lower()).strip("-")


def interleaved(
    ways: Mapping[str, Callable[[T], int]], inputs: Sequence[T], *, rounds: int = 1
) -> dict[str, list[tuple[int, float]]]:
    """Run every way on every input in turn; return (units of work, seconds) an input, summed over the rounds.

    The order of the ways is shuffled for each input, so that none always runs behind the same neighbour.
    """
    order = list(ways)
    shuffler = random.Random(0)
    found = {name: [(0, 0.0)] * len(inputs) for name in ways}
    for _ in range(rounds):
        for i, item in enumerate(inputs):
            shuffler.shuffle(order)
            for name in order:
                start = time.perf_counter()
                units = ways[name](item)
                seconds = time.perf_counter() - start
                before = found[name][i]
                found[name][i] = (before[0] + units, before[1] + seconds)
    return found


def rate(samples: Sequence[tuple[int, float]]) -> float:
    """Units a second over all inputs."""
    return sum(units for units, _ in samples) / sum(seconds for _, seconds in samples)


def ratio(
    samples: Sequence[tuple[int, float]], baseline: Sequence[tuple[int, float]], resamples: int = 1000
) -> dict[str, float]:
    """Rate of `samples` over that of `baseline`, with a 95 % bootstrap interval over inputs (pairs stay together)."""
    chooser = random.Random(0)
    pairs = list(zip(samples, baseline, strict=True))
    drawn = []
    for _ in range(resamples):
        sample = chooser.choices(pairs, k=len(pairs))
        drawn.append(rate([a for a, _ in sample]) / rate([b for _, b in sample]))
    drawn.sort()
    per_input = sorted((a[0] / a[1]) / (b[0] / b[1]) for a, b in pairs)
    return {
        "ratio": rate(samples) / rate(baseline),
        "low": drawn[int(0.025 * resamples)],
        "high": drawn[int(0.975 * resamples)],
        "median_of_inputs": statistics.median(per_input),
        "p10_of_inputs": per_input[len(per_input) // 10],
        "p90_of_inputs": per_input[len(per_input) * 9 // 10],
    }


def _module() -> str:
    return f"benchmarks.{Path(sys.argv[0]).stem}"
