"""How long a training takes over what `medusa train --check` says before.

    python -m benchmarks.training_estimate --config FILE --set optimisation.max_steps=40 --record

The estimate measures parts of one step; the run is the whole training, in a folder of its own, which is removed. Both
are the process' time with one thread on a CPU, which other programs change little, and seconds on a GPU. The estimate
leaves out loading and writing, which are therefore not counted: a run's time is that of its steps and measurements.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import markdown, provenance, write_record
from medusa_decoding.cli.train import read_config
from medusa_decoding.training import train
from medusa_decoding.training.config import Config
from medusa_decoding.training.loop import estimate
from medusa_decoding.training.loop.backbone import load_tokenizer
from medusa_decoding.training.loop.processes import Processes
from medusa_decoding.training.loop.rows import load_rows


def estimated(config: Config) -> float:
    """Return what `--check` says, in seconds."""
    shapes, tokenizer = estimate.shapes_of(config), load_tokenizer(config.model)
    rows = load_rows(config, tokenizer, shapes.vocabulary)
    pace = estimate.pace(config, shapes, rows, tokenizer, Processes.join("none"))
    return pace.seconds(config, len(rows.train), 0 if rows.held_out is None else len(rows.held_out))


def taken(config: Config) -> float:
    """Train, and return the seconds from the first step's beginning to the last line of the log."""
    on_cpu = not torch.cuda.is_available()
    now = time.process_time if on_cpu else time.perf_counter
    times: list[float] = []

    def watch(line: Mapping[str, Any]) -> None:
        times.append(now())

    def announce(words: str) -> None:
        if not times and " steps: " in words:
            times.append(now())

    train(config, watchers=[watch], announce=announce)
    return times[-1] - times[0]


def main() -> None:
    """Estimate and train, print both, and record them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="of `medusa train`")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as of `medusa train`")
    parser.add_argument("--record", action="store_true", help="append the figures to this machine's file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config = read_config(args)
        output = dataclasses.replace(config.output, folder=str(Path(folder) / "out"), trackers=())
        kept = None if config.data.cache_hidden is None else str(Path(folder) / "states")
        config = dataclasses.replace(config, output=output, data=dataclasses.replace(config.data, cache_hidden=kept))
        before = estimated(config)
        found = {"estimated_s": before, "taken_s": taken(config)}
    found["ratio"] = found["taken_s"] / before
    if args.record:
        write_record("training_estimate", {"config": args.config.name, "set": args.set} | found)
    print(provenance())
    print(markdown([[*found], [f"{value:.3g}" for value in found.values()]]))


if __name__ == "__main__":
    main()
