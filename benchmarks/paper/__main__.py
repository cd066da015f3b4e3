"""Reproduce the paper's tables 6 to 8 and figures 9 to 23 (appendix G) as CSV and PNG, and print the errors.

    python -m benchmarks.paper docs/figures

`reproduction` computes the rows, `values` has what the paper prints, and `plots` draws.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.paper import plots, reproduction
from benchmarks.paper.reproduction import Row


def main(arguments: Sequence[str] | None = None) -> int:
    """Write every table and figure into a folder, and print the errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to write, such as docs/figures")
    folder: Path = parser.parse_args(arguments).folder
    try:
        plots.pyplot()  # before any work
    except ValueError as error:
        parser.error(str(error))
    rows = {
        "tables-6-8": reproduction.table_rows(),
        "figures-9-17": reproduction.roofline_rows(),
        "figures-21-23": reproduction.simulation_rows(),
        "acceleration": reproduction.acceleration_rows(),
        "errors": reproduction.error_rows(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    for name, some in rows.items():
        write_csv(some, folder / f"roofline-{name}.csv")
    plots.draw_rooflines(rows["figures-9-17"], folder / "roofline-figures-9-17.png")
    plots.draw_tables(rows["tables-6-8"], folder / "roofline-figures-18-20.png")
    plots.draw_figure_21(rows["figures-21-23"], folder / "roofline-figure-21.png")
    for number in (22, 23):
        plots.draw_speedups(rows["figures-21-23"], number, folder / f"roofline-figure-{number}.png")
    for row in rows["errors"]:
        print(as_text(row))
    for row in rows["acceleration"][:-1]:
        print(f"{row['formula']}: {row['n=1']} at 1, {row['n=64']} at 64; off by {row['worst']} at most")
    print(f"written to {folder}")
    return 0


def as_text(row: Row) -> str:
    """Return one row of errors for a person."""
    if "largest_difference" in row:
        return f"{row['what']}: largest difference {row['largest_difference']}, {row['values']} values"
    return (
        f"{row['what']} on {row['device']}: median error {row['median_error_percent']} % "
        f"({row['lowest_percent']:+} to {row['highest_percent']:+} %), {row['values']} values"
    )


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Write rows with a column for each name that any of them has, empty in the others."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
