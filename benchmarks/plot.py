"""Draws the figures of a machine's results: `python -m benchmarks.plot [results.jsonl] [--out docs/figures]`.

Of records of the same case the last in the file counts. Attention is drawn as a fraction of the copy bandwidth against
the prefix; heads, verification, compaction and rotary embedding as times, with the time in which a copy moves the same
bytes; the whole step likewise, with its ratio to the plain step. This file measures nothing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness

Record = dict[str, Any]

OURS = "medusa_kernels"
# Colours that stay apart in print and for the colour-blind (Okabe and Ito, 2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
STEP_CASE = ("model", "way", "nodes", "heads", "prefix", "batch")
BARS = {
    "heads_topk": "Heads and top-k",
    "tree_verify": "Verification",
    "kv_compact": "Compaction of the cache",
    "rope_append": "Rotary embedding and cache write",
}


def read(path: Path) -> list[Record]:
    """Return the records of a results file, in its order."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def latest(records: Iterable[Record]) -> list[Record]:
    """Return the timed records, only the last of each case and implementation, in order of first appearance."""
    found: dict[str, Record] = {}
    for record in records:
        if record["benchmark"] == "step":
            case: Any = [record.get(name) for name in STEP_CASE]
        else:
            case = [record.get("shapes"), record.get("dtype"), record.get("implementation")]
        key = json.dumps([record["benchmark"], case], sort_keys=True)
        # A peer that has since been found wrong, or does not run any more, takes its earlier figure away.
        if "median_us" in record or "wrong" in record or "skipped" in record:
            found[key] = record
    return [record for record in found.values() if "median_us" in record]


def copy_us(record: Record) -> float | None:
    """Return the time in which a copy, as measured in the record's run, moves the bytes that it counts."""
    if record.get("copy_gb_per_s"):
        return record["bytes"] / record["copy_gb_per_s"] / 1e3 if record.get("bytes") else None
    return record["median_us"] * record["fraction"] if record.get("fraction") else None


def conditions(records: Sequence[Record]) -> str:
    """Return where the figures come from, for the foot of a figure."""
    last = records[-1]
    versions = ", ".join(
        f"{name} {last['versions'][name]}" for name in ("torch", "triton") if last["versions"].get(name)
    )
    commits = ", ".join(sorted({record["commit"] for record in records}))
    return f"{last['machine']['name']}; {versions}; commit {commits}; {last['date']}"


def attention(plt: Any, records: Sequence[Record], batch: int, path: Path) -> None:
    """Draw one panel for each head shape (rows) and number of nodes (columns): fraction of copy bandwidth by prefix."""
    mine = [record for record in records if record["shapes"]["batch"] == batch and "spare" not in record["shapes"]]
    models = list(dict.fromkeys(tuple(record["shapes"]["models"]) for record in mine))
    nodes = sorted({record["shapes"]["nodes"] for record in mine})
    names = _ours_first(mine)
    figure, panels = plt.subplots(
        len(models),
        len(nodes),
        figsize=(3.3 * len(nodes) + 0.8, 2.7 * len(models) + 1.2),
        sharex=True,
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for row, of_model in zip(panels, models, strict=True):
        for panel, count in zip(row, nodes, strict=True):
            for colour, name in zip(COLOURS, names, strict=False):
                points = sorted(
                    (record["shapes"]["prefix"], 100 * record["fraction"])
                    for record in mine
                    if (tuple(record["shapes"]["models"]), record["shapes"]["nodes"]) == (of_model, count)
                    and record["implementation"] == name
                )
                if points:
                    style = "--" if "unmasked" in name else "-"
                    panel.plot(*zip(*points, strict=True), style, marker="o", markersize=4, color=colour, label=name)
            panel.axhline(100, color="0.6", linewidth=0.8)
            panel.set_xscale("log", base=2)
            panel.set_title(f"{', '.join(of_model)}: {count} node{'s' if count > 1 else ''}", fontsize=9)
            panel.grid(alpha=0.3)
        row[0].set_ylabel("% of copy bandwidth", fontsize=9)
        row[0].set_ylim(bottom=0)
    prefixes = sorted({record["shapes"]["prefix"] for record in mine})
    for panel in panels[-1]:
        panel.set_xticks(prefixes, [f"{prefix // 1024}k" if prefix >= 1024 else str(prefix) for prefix in prefixes])
        panel.set_xlabel("prefix", fontsize=9)
    handles: dict[str, Any] = {}
    for panel in panels.flat:
        handles |= dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="outside upper center", ncols=4, fontsize=9)
    _save(plt, figure, f"Tree attention, batch {batch}. {conditions(mine)}", path)


def bars(
    plt: Any,
    records: Sequence[Record],
    title: str,
    group: Callable[[Record], str],
    name: Callable[[Record], str],
    path: Path,
) -> None:
    """Draw times as horizontal bars, grouped by case; a black tick shows what a copy of the same bytes takes.

    If there are more ways than colours, they are named at their bars, and much longer bars are cut off at the edge.
    """
    groups = list(dict.fromkeys(group(record) for record in records))
    names = list(dict.fromkeys(name(record) for record in records))
    crowded = len(names) > len(COLOURS)
    kinds = list(dict.fromkeys(name.split(",")[0] for name in names)) if crowded else names
    colours = {kind: COLOURS[i % len(COLOURS)] for i, kind in enumerate(kinds)}
    times = sorted(record["median_us"] for record in records)
    edge = min(1.25 * times[-1], 3 * times[len(times) // 2]) if crowded else 1.25 * times[-1]
    rows: list[tuple[float, Record]] = []
    ticks, at = [], 0.0
    for label in groups:
        own = [record for record in records if group(record) == label]
        ticks.append((at + (len(own) - 1) / 2, label))
        rows += [(at + i, record) for i, record in enumerate(own)]
        at += len(own) + 0.8
    figure, panel = plt.subplots(figsize=(9, 0.24 * at + 1.6), layout="constrained")
    for place, record in rows:
        shown = name(record)
        colour = colours[shown.split(",")[0] if crowded else shown]
        panel.barh(place, min(record["median_us"], edge), color=colour, height=0.85)
        more = f"  ({record['ratio_to_plain']:.2f} x plain)" if record.get("ratio_to_plain") else ""
        value = f"{record['median_us']:.{0 if record['median_us'] >= 1000 else 1}f}"
        beyond = record["median_us"] > 0.6 * edge
        text = f" {shown}: {value}{more} " if crowded else f" {value}{more}"
        style = {"ha": "right", "color": "white"} if crowded and beyond else {"ha": "left", "color": "black"}
        panel.text(min(record["median_us"], edge), place, text, va="center", fontsize=7, **style)
        ideal = copy_us(record)
        if ideal:
            panel.plot([ideal, ideal], [place - 0.45, place + 0.45], color="black", linewidth=1.6)
    panel.set_xlim(0, edge)
    panel.set_yticks([place for place, _ in ticks], [label for _, label in ticks], fontsize=7)
    panel.set_ylim(at - 0.8 + 0.3, -1.1)
    panel.set_xlabel("microseconds (black: the same bytes at copy bandwidth)", fontsize=9)
    panel.grid(axis="x", alpha=0.3)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colours[kind]) for kind in kinds]
    figure.legend(handles, kinds, loc="outside upper center", ncols=3 if crowded else 4, fontsize=8)
    _save(plt, figure, f"{title}. {conditions(records)}", path)


def case_label(record: Record) -> str:
    """Return a case's shapes without those that every case shares."""
    shared = {"heads_topk": ("hidden", "k", "heads"), "tree_verify": ("hidden",), "kv_compact": ("layers", "rows")}
    left_out = ("models", "head_dim", *shared.get(record["benchmark"], ()))
    return ", ".join(
        f"{key} {'-'.join(map(str, value)) if isinstance(value, list) else value}"
        for key, value in record["shapes"].items()
        if key not in left_out
    )


def step_label(record: Record) -> str:
    """Return what one bar group of the whole step shows."""
    return f"{record['model']}\nprefix {record['prefix']}, batch {record['batch']}"


def step_way(record: Record) -> str:
    """Return a way of making a step, with its tree and heads if it has them."""
    tree = f", {record['nodes']} nodes" if (record.get("nodes") or 1) > 1 else ""
    heads = f", {record['heads']} heads" if record.get("heads") else ""
    return f"{record['way']}{tree}{heads}"


def pyplot() -> Any:
    """Return pyplot, set up to write small and comparable files with text as text, legible at any size.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ValueError('picture: expected matplotlib, got none; pip install -e ".[bench]"') from error
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "medusa-kernels", "font.size": 9})
    import matplotlib.pyplot as plt

    return plt


def draw(records: Sequence[Record], out: Path, kind: str) -> list[Path]:
    """Draw every figure that there are records for; return the files.

    Raises:
        ValueError: matplotlib is not installed.
    """
    plt = pyplot()
    out.mkdir(parents=True, exist_ok=True)
    drawn = []
    timed = latest(records)
    of = {
        name: [record for record in timed if record["benchmark"] == name] for name in ("tree_attention", "step", *BARS)
    }
    for batch in sorted({record["shapes"]["batch"] for record in of["tree_attention"]}):
        drawn.append(out / f"tree_attention-batch-{batch}.{kind}")
        attention(plt, of["tree_attention"], batch, drawn[-1])
    for op, title in BARS.items():
        if of[op]:
            drawn.append(out / f"{op}.{kind}")
            bars(plt, of[op], title, case_label, lambda record: record["implementation"], drawn[-1])
    if of["step"]:
        drawn.append(out / f"step.{kind}")
        bars(plt, of["step"], "One decoding step", step_label, step_way, drawn[-1])
    return drawn


def _ours_first(records: Sequence[Record]) -> list[str]:
    names = dict.fromkeys(record["implementation"] for record in records)
    return sorted(names, key=lambda name: (name != OURS, "unmasked" in name))


def _save(plt: Any, figure: Any, foot: str, path: Path) -> None:
    figure.supxlabel(foot, fontsize=7)
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)


def main() -> None:
    """Draw from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = harness.RESULTS / "nvidia-h200.jsonl"
    parser.add_argument("results", nargs="?", type=Path, default=default, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=Path("docs/figures"), help="folder (default: %(default)s)")
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    args = parser.parse_args()
    if not args.results.is_file():
        raise SystemExit(f"plot: {args.results} does not exist; `make gpu` writes it")
    try:
        drawn = draw(read(args.results), args.out, args.format)
    except ValueError as error:
        parser.exit(2, f"{error}\n")
    print("\n".join(map(str, drawn)) or "plot: no timed records of the operations or the step in this file")


if __name__ == "__main__":
    main()
