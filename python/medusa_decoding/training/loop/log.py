"""The log of a run: one line of JSON per logged step and per measurement, and the same for accelerate's trackers."""

from __future__ import annotations

import contextlib
import functools
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from medusa_decoding.checks import import_library
from medusa_decoding.files import parse_json, write_text

LOG = "log.jsonl"
PROJECT = "medusa"
"""Project of the runs in trackers that have several."""
SPEED = ("tokens_per_second", "peak_memory", "mfu")
"""Names in the log of `meter.Meter`'s figures."""
Watcher = Callable[[Mapping[str, Any]], None]
"""Receives each line of the log."""


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's log, without a last one that a kill cut off."""
    file = folder / LOG
    lines = file.read_bytes().splitlines(keepends=True) if file.is_file() else []
    return [parse_json(line, f"{file}:{n}") for n, line in enumerate(lines, start=1) if line.endswith(b"\n")]


def cut_log(folder: Path, step: int) -> None:
    """Remove the lines after a step: a resumed run makes those steps again."""
    if (folder / LOG).is_file():
        kept = [line for line in read_log(folder) if line["step"] <= step]
        write_text(folder / LOG, "".join(json.dumps(line) + "\n" for line in kept))


def check_trackers(names: Iterable[str]) -> None:
    """Refuse trackers that accelerate does not know, or whose library is missing."""
    tracking = import_library("accelerate.tracking", "output.trackers")
    for name in names:
        if name not in tracking.LOGGER_TYPE_TO_CLASS:
            known = ", ".join(sorted(tracking.LOGGER_TYPE_TO_CLASS))
            raise ValueError(f"output.trackers: expected some of {known}, got {name}")
        if not tracking.filter_trackers([name], "."):
            raise ModuleNotFoundError(
                f"{name}: expected the library for output.trackers (pip install {name}, or leave it out), got none"
            )


@contextlib.contextmanager
def tracked(names: Iterable[str], folder: Path, settings: Mapping[str, Any], done: int) -> Iterator[list[Watcher]]:
    """Start trackers of accelerate, in the main process only, and end them after the block.

    Each gets the settings of the run. TensorBoard's and Aim's files are in the folder, in one named after the tracker,
    and TensorBoard's continue after `done` steps. Keys and servers are taken from the environment.

    Yields:
        Watchers of the log.
    """
    tracking = import_library("accelerate.tracking", "output.trackers")
    with contextlib.ExitStack() as stack:
        watchers: list[Watcher] = []
        for name in names:
            kind = tracking.LOGGER_TYPE_TO_CLASS[name]
            place = [str(folder / name)] if kind.requires_logging_directory else []
            tracker = kind(PROJECT, *place, **({"purge_step": done + 1} if name == "tensorboard" else {}))
            tracker.start()
            stack.callback(tracker.finish)
            tracker.store_init_configuration(dict(settings))
            watchers.append(functools.partial(_track, tracker))
        yield watchers


def _track(tracker: Any, line: Mapping[str, Any]) -> None:
    part = "held_out" if "accuracy" in line else "train"
    names = ("loss", "model_loss", "model_top1", "lambda_0", "gradient_norm", *SPEED)
    values = {f"{part}/{name}": line[name] for name in names if name in line}
    values |= {f"rate/{name}": rate for name, rate in line.get("rates", {}).items()}
    for name in ("head_losses", "head_top1"):
        values |= {f"{part}/{name}/{head}": value for head, value in enumerate(line.get(name, ()), start=1)}
    try:
        tracker.log(values, step=line["step"])
    except Exception as error:  # of its library or its server; the log has the line
        warnings.warn(f"output.trackers: {tracker.name} did not get step {line['step']}: {error}", stacklevel=2)
