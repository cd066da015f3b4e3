"""Name what got slower, beyond noise, from one set of records to another.

    python -m benchmarks.compare benchmarks/results/nvidia-h200.jsonl new.jsonl
    python -m benchmarks.compare benchmarks/results/amd-epyc-avx2.jsonl@7681681 benchmarks/results/amd-epyc-avx2.jsonl

A set is a file of records, or the records of one commit in it (FILE@COMMIT). Of records of the same case the last
counts. Beyond noise means: of times, that the ranges from the 10th to the 90th percentile do not overlap; of ratios and
other figures with an interval, of which more is taken for faster, that the intervals do not. Exit status 1 if something
got slower.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.plot import Record, read

CASE = (
    "op", "shapes", "shape", "model", "dtype", "weights", "rows", "implementation", "way", "backend", "nodes", "heads",
    "prefix", "batch", "threads", "prompts", "prompt_tokens", "new_tokens", "temperature",
)  # fmt: skip
"""Fields that say what a record measured, and not how much."""


@dataclass(frozen=True)
class Figure:
    """A measured figure with the range that noise gives it; `time` if smaller is better."""

    value: float
    low: float
    high: float
    time: bool


def load(words: str) -> list[Record]:
    """Return the records of FILE or FILE@COMMIT.

    Raises:
        ValueError: no such file, or no record in it.
    """
    name, _, commit = words.partition("@")
    path = Path(name)
    if not path.is_file():
        raise ValueError(f"expected a file of records, got {name}")
    found = [record for record in read(path) if record["commit"].startswith(commit)]
    if not found:
        raise ValueError(f"expected records{f' of commit {commit}' if commit else ''} in {name}, got none")
    return found


def figures(record: Record) -> Iterator[tuple[str, Figure]]:
    """Yield the names and values of a record's figures that have a range."""
    if "median_us" in record:
        yield "time", Figure(record["median_us"], record["p10_us"], record["p90_us"], time=True)
    yield from _intervals(record, "")


def _intervals(value: Any, name: str) -> Iterator[tuple[str, Figure]]:
    if isinstance(value, dict):
        middle = value.get("ratio", value.get("value"))
        if middle is not None and value.get("low") is not None and value.get("high") is not None:
            yield name, Figure(middle, value["low"], value["high"], time=False)
            return
        for key, inner in value.items():
            yield from _intervals(inner, f"{name}, {key}" if name else key)


def by_case(records: list[Record]) -> dict[tuple[str, str], Figure]:
    """Return all figures by case and name."""
    found = {}
    for record in records:
        parts = [f"{key} {json.dumps(record[key], sort_keys=True)}" for key in CASE if record.get(key) is not None]
        case = ", ".join([record["benchmark"], *parts])
        found |= {(case, name): figure for name, figure in figures(record)}
    return found


def compare(before: list[Record], after: list[Record]) -> tuple[list[str], list[str], int]:
    """Return lines for what got slower and what got faster, the largest change first, and the number of comparisons."""
    old, new = by_case(before), by_case(after)
    slower, faster = [], []
    both = old.keys() & new.keys()
    for case, name in sorted(both):
        a, b = old[case, name], new[case, name]
        if a.low <= b.high and b.low <= a.high:
            continue
        ratio = b.value / a.value
        worse = (ratio > 1) == a.time
        line = f"{ratio:.2f} times ({a.value:.4g} to {b.value:.4g}{' us' if a.time else ''}): {name} of {case}"
        (slower if worse else faster).append((ratio if a.time else 1 / ratio, line))
    return (
        [line for _, line in sorted(slower, reverse=True)],
        [line for _, line in sorted(faster)],
        len(both),
    )


def main(argv: list[str] | None = None) -> int:
    """Print what changed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", help="FILE or FILE@COMMIT")
    parser.add_argument("after", help="the same")
    args = parser.parse_args(argv)
    try:
        slower, faster, count = compare(load(args.before), load(args.after))
    except ValueError as error:
        parser.error(str(error))
    for title, lines in (("slower", slower), ("faster", faster)):
        print(f"{title}: {len(lines)} of {count} figures in both")
        print("".join(f"  {line}\n" for line in lines), end="")
    if not count:
        print("nothing was compared: the two sets have no case in common")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
