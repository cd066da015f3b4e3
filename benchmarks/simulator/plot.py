"""Plot simulated speedups. Needs matplotlib, which is imported when something is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.plot import COLOURS
from benchmarks.simulator.simulate import Point


def draw_sweep(points: Sequence[Point], title: str, path: Path) -> None:
    """Plot speedup against nodes: one line per batch, one panel per sequence length.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    import matplotlib
    from matplotlib.figure import Figure

    sequences = list(dict.fromkeys(point.sequence for point in points))
    batches = list(dict.fromkeys(point.batch for point in points))
    with matplotlib.rc_context({"font.size": 8}):
        figure = Figure(figsize=(1.2 + 3.3 * len(sequences), 3.4), layout="constrained")
        panels = figure.subplots(1, len(sequences), sharey=True, squeeze=False)[0]
        for panel, sequence in zip(panels, sequences, strict=True):
            for number, batch in enumerate(batches):
                line = sorted((p.nodes, p.speedup) for p in points if (p.batch, p.sequence) == (batch, sequence))
                colour = COLOURS[number % len(COLOURS)]
                panel.plot(*zip(*line, strict=True), marker="o", markersize=3, color=colour, label=f"batch {batch}")
            panel.axhline(1, color="0.4", linewidth=0.8, linestyle="--")
            panel.set(title=f"prefix {sequence}", xlabel="nodes", ylim=(0, None))
            panel.grid(alpha=0.3)
        panels[0].set_ylabel("simulated speedup")
        panels[-1].legend()
        figure.supxlabel(title, fontsize=7)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110, metadata={"Software": None})
