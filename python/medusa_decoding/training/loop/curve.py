"""How heads get better with more training records: a run for each of four sizes, and a prediction for more records."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medusa_decoding.files import write_json
from medusa_decoding.training.config import Config
from medusa_decoding.training.loop import run
from medusa_decoding.training.loop.accuracy import FIGURE_NODES
from medusa_decoding.training.loop.log import Watcher
from medusa_decoding.training.loop.processes import Processes

CURVE = "curve.json"
PARTS = (1, 2, 4, 8)
"""The whole of the training records, a half, and so on; each part is within the one before."""
MORE = (2, 10)
"""Multiples of the training records that are predicted for."""


def curve(
    config: Config, *, resume: bool = False, watchers: Sequence[Watcher] = (), announce: run.Announce
) -> dict[str, Any]:
    """Train on all records into the output folder, and on parts of them into folders within it.

    All runs have the same held-out data, epochs and batch size; a smaller one makes fewer steps.

    Returns what `CURVE` in the output folder gets: `sizes`, ascending (shares, and nats weighted as in training),
    the same `predicted` for more records by `power_law`, and the `residuals`, how far measured ones are from that law.
    """
    missing = ValueError("--curve needs held-out data: set data.held_out, or a larger data.held_out_share")
    if not config.data.held_out and config.held_out_share == 0:
        raise missing
    sizes: list[dict[str, Any]] = []
    for part in PARTS:
        announce(f"on {'all' if part == 1 else f'1/{part}'} of the training records:")
        result = run.train(_config(config, part), resume=resume, watchers=watchers, announce=announce, part=part)
        if result.measured is None:
            raise missing
        decay = config.loss.head_decay
        size = {
            "records": result.records,
            "steps": result.steps,
            "head_top1": [row[0] for row in result.measured.accuracy.cumulative],
            "loss": sum(decay**k * loss for k, loss in enumerate(result.measured.head_losses, start=1)),
            "tokens_per_step": result.measured.accuracy.expected_tokens(FIGURE_NODES),
        }
        sizes.insert(0, size)
    found = {"sizes": sizes} | _predicted(sizes)
    if Processes.join(config.optimisation.sharding).main:
        write_json(Path(config.output.folder) / CURVE, found)
    return found


def _config(config: Config, part: int) -> Config:
    if part == 1:
        return config
    name = f"curve-{part}"  # of a row's states there is one copy per size: smaller data is packed in other rows
    cache = None if config.data.cache_hidden is None else str(Path(config.data.cache_hidden) / name)
    folder = str(Path(config.output.folder) / name)
    output = dataclasses.replace(config.output, folder=folder, keep_checkpoints=1, push_to_hub=None)
    return dataclasses.replace(config, data=dataclasses.replace(config.data, cache_hidden=cache), output=output)


def _predicted(sizes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    records = [size["records"] for size in sizes]
    heads = len(sizes[0]["head_top1"])
    gaps = np.array([[*(1 - np.array(s["head_top1"])), s["loss"], heads + 1 - s["tokens_per_step"]] for s in sizes])
    at = [records[-1] * more for more in MORE]
    found, residuals = power_law(records, gaps, at)
    predicted = [
        {
            "records": number,
            "head_top1": (1 - row[:heads]).tolist(),
            "loss": float(row[heads]),
            "tokens_per_step": float(heads + 1 - row[heads + 1]),
        }
        for number, row in zip(at, found, strict=True)
    ]
    names = {"head_top1": residuals[:heads].max(), "loss": residuals[heads], "tokens_per_step": residuals[heads + 1]}
    return {"predicted": predicted, "residuals": {name: float(value) for name, value in names.items()}}


def power_law(
    records: Sequence[int], gaps: np.ndarray[Any, Any], at: Sequence[int]
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Fit gap = a records^-b to each column by least squares of the logarithms (the form of arXiv 1712.00409).

    A gap is what is missing: the share of targets that a head misses, a loss, the distance to the most tokens per step.
    The law has no floor although text has one, so its predictions are rather too good. `records` are two or more
    different numbers, and `gaps` [sizes, F]. Returns the gaps for the numbers of records `at`, [len(at), F], and the
    largest distance of each column of `gaps` from its fit, [F].
    """
    logs = np.log(np.maximum(gaps, 1e-9))
    slopes, constants = np.polyfit(np.log(records), logs, 1)
    fitted = np.exp(np.log(records)[:, None] * slopes + constants)
    return np.exp(np.log(at)[:, None] * slopes + constants), np.abs(fitted - gaps).max(0)


def describe(found: dict[str, Any]) -> str:
    """Return the result of `curve` as a table, with what was predicted and how well the law fits."""
    heads = range(1, len(found["sizes"][0]["head_top1"]) + 1)
    lines = [f"{'records':>16}{'steps':>8}" + "".join(f"{f'head {k}':>8}" for k in heads) + "    loss  tokens/step"]
    for row in (*found["sizes"], *found["predicted"]):
        name = str(row["records"]) if "steps" in row else f"predicted {row['records']}"
        shares = "".join(f"{share:8.1%}" for share in row["head_top1"])
        line = f"{name:>16}{row.get('steps', ''):>8}{shares}{row['loss']:8.2f}{row['tokens_per_step']:13.2f}"
        lines.append(line)
    left = found["residuals"]
    lines += [
        f"held-out top-1 of each head, loss, and expected tokens per step with {FIGURE_NODES} nodes",
        f"predicted by a power law, which misses the sizes above by at most {left['head_top1']:.1%} of top-1, "
        f"{left['loss']:.2f} of loss and {left['tokens_per_step']:.2f} tokens; it has no floor, so rather too good",
    ]
    return "\n".join(lines)
