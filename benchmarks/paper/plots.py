"""Draw the paper's figures 9 to 23 again from the rows of `reproduction`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import plot
from benchmarks.paper import values as paper

Row = dict[str, Any]
SERIES = ("qkv mlp init", "qkv mlp ar", "up/gate/down init", "up/gate/down ar", "qk/pv init", "qk/pv ar")


def pyplot() -> Any:
    """Return pyplot with the text size of these figures; raise `ValueError` if matplotlib is not installed."""
    plt = plot.pyplot()
    plt.rcParams["font.size"] = 8
    return plt


COLOURS = (*plot.COLOURS, "#999999")


def draw_rooflines(rows: Sequence[Row], path: Path) -> None:
    """Draw figures 9 to 17: operators under each device's roof.

    The points of the ideal roofline lie on the roof by construction; those of the fitted one, if known, lie below it.
    """
    plt = pyplot()
    figure, panels = plt.subplots(3, 3, figsize=(11, 9), sharex=True, sharey=True, layout="constrained")
    for number, panel in zip(range(9, 18), panels.flat, strict=True):
        of_figure = [row for row in rows if row["figure"] == number]
        _roof(panel, *paper.PEAKS[of_figure[0]["device"]])
        for place, series in enumerate(SERIES):
            of = [(row["intensity"], row["tflops"]) for row in of_figure if row["series"] == series]
            panel.plot(*zip(*of, strict=True), "x", markersize=4, color=COLOURS[place], label=series)
            fitted = [
                (row["intensity"], row["attained_tflops"])
                for row in of_figure
                if row["series"] == series and row["attained_tflops"] is not None
            ]
            if fitted:
                panel.plot(*zip(*fitted, strict=True), "o", markersize=4, fillstyle="none", color=COLOURS[place])
        panel.set_title(f"Figure {number}: {of_figure[0]['model']}, {of_figure[0]['device']}", fontsize=8)
    for panel in panels[-1]:
        panel.set_xlabel("operations per byte")
    for row in panels:
        row[0].set_ylabel("TFLOP/s")
    panels[0][0].legend(fontsize=7)
    foot = "Figures 9 to 17 again, not compared: the paper prints no numbers. Crosses: roofline; circles: fitted"
    _save(plt, figure, foot, path)


def draw_tables(rows: Sequence[Row], path: Path) -> None:
    """Draw figures 18 to 20, which show tables 6 to 8: printed values next to the fitted roofline."""
    plt = pyplot()
    figure, panels = plt.subplots(1, 3, figsize=(11, 3.8), sharey=True, layout="constrained")
    for table, panel in zip((6, 7, 8), panels, strict=True):
        _roof(panel, *paper.PEAKS["a100-80"])
        for place, candidates in enumerate(paper.CANDIDATES):
            of = [row for row in rows if (row["table"], row["candidates"]) == (table, candidates)]
            x = [row["intensity"] for row in of]
            colour = COLOURS[place]
            panel.plot(x, [row["paper_tflops"] for row in of], "x", markersize=5, color=colour)
            panel.plot(x, [row["attained_tflops"] for row in of], "o", markersize=5, fillstyle="none", color=colour)
            panel.plot([], [], "s", color=colour, label=f"{candidates} candidate{'s' if candidates > 1 else ''}")
        panel.set(title=f"Figure {table + 12} (table {table})", xlabel="operations per byte")
    panels[0].set_ylabel("TFLOP/s")
    panels[0].legend(fontsize=6)
    _save(plt, figure, "Crosses: the paper's tables; circles: roofline with the shares fitted to them", path)


def draw_figure_21(rows: Sequence[Row], path: Path) -> None:
    """Draw figure 21: acceleration, speedup and latency relative to plain decoding by candidates."""
    plt = pyplot()
    of = [row for row in rows if row["figure"] == 21]
    x = [row["candidates"] for row in of]
    figure, panel = plt.subplots(figsize=(8, 3.8), layout="constrained")
    panel.bar(x, [row["attained_latency"] for row in of], width=9, color="0.85", label="latency, fitted roofline")
    panel.plot(x, [row["acceleration"] for row in of], "-", color=COLOURS[6], label="acceleration, 1 + 0.477 ln n")
    panel.plot(x, [row["roofline_speedup"] for row in of], "--", color=COLOURS[0], label="speedup, ideal roofline")
    panel.plot(x, [row["attained_speedup"] for row in of], "-", color=COLOURS[0], label="speedup, fitted roofline")
    readings = ((paper.ACCELERATION, "acceleration", 6), (paper.SPEEDUP, "speedup", 0), (paper.LATENCY, "latency", 7))
    for reading, what, colour in readings:
        panel.plot(
            *zip(*reading.items(), strict=True), "x", color=COLOURS[colour], label=f"{what}, read off the picture"
        )
    panel.set(xlabel="candidates", xticks=x)
    figure.legend(fontsize=7, loc="outside right upper")
    _save(plt, figure, "Figure 21 again: Llama-7B, A100-80 PCIe, batch 1, sequence 1,024", path)


def draw_speedups(rows: Sequence[Row], number: int, path: Path) -> None:
    """Draw figure 22 (by batch) or 23 (by sequence): ideal roofline, fitted roofline, and readings of the picture."""
    plt = pyplot()
    by, fixed = ("batch", "sequence 1,024") if number == 22 else ("sequence", "batch 4")
    of_figure = [row for row in rows if row["figure"] == number]
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.8), sharey=True, layout="constrained")
    for panel, column in zip(panels, ("roofline_speedup", "attained_speedup"), strict=True):
        for place, value in enumerate(dict.fromkeys(row[by] for row in of_figure)):
            of = [row for row in of_figure if row[by] == value]
            x = [row["candidates"] for row in of]
            panel.plot(x, [row[column] for row in of], "-", color=COLOURS[place], label=f"{by} {value}")
            read = [(row["candidates"], row["picture_speedup"]) for row in of if row["picture_speedup"] is not None]
            panel.plot(*zip(*read, strict=True), "x", color=COLOURS[place])
        panel.axhline(1, color="0.4", linewidth=0.8, linestyle="--")
        panel.set(xlabel="candidates", xticks=paper.CANDIDATES, ylim=(0, None))
        panel.set_title("ideal roofline" if column == "roofline_speedup" else "roofline fitted to tables 6 to 8")
    panels[0].set_ylabel("speedup")
    figure.legend(*panels[0].get_legend_handles_labels(), fontsize=7, loc="outside right upper")
    _save(plt, figure, f"Figure {number} again: Llama-7B, A100-80 PCIe, {fixed}; crosses: read off the picture", path)


def _roof(panel: Any, peak: float, bandwidth: float) -> None:
    """Draw a roof from peaks in TFLOP/s and GB/s, and make both axes logarithmic."""
    ridge = 1000 * peak / bandwidth
    panel.plot([0.5, ridge, 1e4], [0.5 * bandwidth / 1000, peak, peak], color="0.4", linewidth=0.8)
    panel.set(xscale="log", yscale="log")
    panel.grid(alpha=0.3)


def _save(plt: Any, figure: Any, foot: str, path: Path) -> None:
    figure.supxlabel(foot, fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    # No date and no version: the same rows give the same file with the same matplotlib.
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)
