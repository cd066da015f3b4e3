"""Records and pictures of ablations: one JSON and one SVG file per ablation and machine. It measures nothing."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.plot import COLOURS, pyplot
from medusa_decoding.evaluation import interval
from medusa_decoding.provenance import without_folders

__all__ = ["COLOURS", "by_nodes", "command", "foot", "pyplot", "record", "save_picture", "spread"]


def command(name: str, arguments: Sequence[str]) -> str:
    """Return the command as anyone would give it."""
    return shlex.join(["python", "-m", "benchmarks.ablations", name, *without_folders(arguments)])


def record(
    name: str, described: Mapping[str, Any], figures: Mapping[str, Any], arguments: Sequence[str]
) -> dict[str, Any]:
    """Return one ablation's record, as JSON gives it back."""
    made = {
        "ablation": name,
        **described,
        **figures,
        "intervals": interval.WORDS,
        **harness.provenance(),
        "command": command(name, arguments),
    }
    return dict(json.loads(json.dumps(made)))


def by_nodes(plt: Any, kinds: Mapping[str, tuple[str, str, Sequence[Mapping[str, Any]]]]) -> Any:
    """Draw tokens per step and speed side by side, over the nodes of trees.

    `kinds` has by label: style, colour, and the records of trees of one kind, the smallest first.
    """
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for panel, name, words in zip(
        panels, ("tokens_per_step", "speedup"), ("tokens per step", "tokens per second / plain decoding"), strict=True
    ):
        panel.set_xscale("log", base=2)
        for label, (style, colour, trees) in kinds.items():
            values, errors = spread(trees, name)
            nodes = [tree["nodes"] for tree in trees]
            panel.errorbar(nodes, values, errors, fmt=style, color=colour, capsize=2, elinewidth=0.7, label=label)
        panel.axhline(1.0, color="0.5", linewidth=0.8)
        panel.xaxis.set_major_formatter("{x:.0f}")
        panel.set_xlabel("nodes, root included")
        panel.set_ylabel(words)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    panels[0].legend()
    return figure


def foot(record: Mapping[str, Any]) -> str:
    """Return where figures come from, for the foot of a picture."""
    versions = ", ".join(f"{name} {record['versions'][name]}" for name in ("torch", "transformers"))
    return (
        f"{record['model']}, {record['dtype']}, {record['backend']}, {record['prompts']} prompts, batch 1; "
        f"{record['machine']['name']};\n{versions}; commit {record['commit']}; {record['date']}; bars: 95 %"
    )


def save_picture(figure: Any, record: Mapping[str, Any], path: Path) -> None:
    """Write a picture with its conditions below."""
    figure.supxlabel(foot(record), fontsize=6)
    figure.savefig(path, metadata={"Date": None})
    pyplot().close(figure)


def spread(points: Sequence[Mapping[str, Any]], name: str) -> tuple[list[float], list[list[float]]]:
    """Return values and the distances to their intervals' ends, as matplotlib's error bars take them."""
    values = [point[name]["value"] for point in points]
    ends = [[point[name][end] for point in points] for end in ("low", "high")]
    below = [0.0 if low is None else max(0.0, value - low) for value, low in zip(values, ends[0], strict=True)]
    above = [0.0 if high is None else max(0.0, high - value) for value, high in zip(values, ends[1], strict=True)]
    return values, [below, above]


def as_text(value: Mapping[str, float | None] | None) -> str:
    """Return an interval as text: "1.55 (1.49 to 1.62)"."""
    if value is None:
        return "-"
    low, high = value["low"], value["high"]
    return f"{value['value']:.2f}" + ("" if low is None or high is None else f" ({low:.2f} to {high:.2f})")
