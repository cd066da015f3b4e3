"""The log of a run: one line of JSON per logged step and per measurement, and the same for TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from medusa_decoding.files import parse_json, write_text

LOG = "log.jsonl"
Watcher = Callable[[Mapping[str, Any]], None]
"""Receives each line of the log."""


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's log, without a last one that a kill cut off.

    Raises:
        ValueError: a line that is not of a log; the message names it.
    """
    file = folder / LOG
    found = []
    for number, line in enumerate(file.read_bytes().splitlines(keepends=True) if file.is_file() else (), start=1):
        if not line.endswith(b"\n"):
            continue
        values = parse_json(line, where := f"{file}:{number}")
        if not isinstance(values, dict) or not all(
            isinstance(value, (int, float)) for value in (values.get("step"), values.get("loss", 0))
        ):
            raise ValueError(f"{where}: expected the log of a step, got {values!r:.80}; remove the line to go on")
        found.append(values)
    return found


def cut_log(folder: Path, step: int) -> None:
    """Remove the lines after a step: a resumed run makes those steps again."""
    if (folder / LOG).is_file():
        kept = [line for line in read_log(folder) if line["step"] <= step]
        write_text(folder / LOG, "".join(json.dumps(line) + "\n" for line in kept))


def tensorboard(folder: Path, done: int) -> Watcher:
    """Return a watcher that writes TensorBoard's event files, continuing after `done` steps."""
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)

    def watch(line: Mapping[str, Any]) -> None:
        part = "held_out" if "accuracy" in line else "train"
        names = ("loss", "model_loss", "model_top1", "lambda_0", "gradient_norm")
        values = {f"{part}/{name}": line[name] for name in names if name in line}
        values |= {f"rate/{name}": rate for name, rate in line.get("rates", {}).items()}
        for name in ("head_losses", "head_top1"):
            values |= {f"{part}/{name}/{head}": value for head, value in enumerate(line.get(name, ()), start=1)}
        for name, value in values.items():
            writer.add_scalar(name, value, line["step"])
        writer.flush()

    return watch
