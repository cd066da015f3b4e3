"""`python -m benchmarks.variants NAME`: one suite. See the package for the names."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import benchmarks.variants
from benchmarks import harness
from benchmarks.ablations import measuring
from benchmarks.variants import heads, table_2
from medusa_decoding.files import only_writer


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and measure what the command line asks for, print the table and append the record."""
    about = benchmarks.variants.__doc__
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks.variants", description=about, formatter_class=formatter)
    suites = parser.add_subparsers(required=True, metavar="NAME")
    for name, suite in (("table-2", table_2), ("heads", heads)):
        one = suites.add_parser(name)
        one.set_defaults(run=suite.run_suite)
        one.add_argument("--out", type=Path, required=True, help="folder for data and trained variants, which are kept")
        one.add_argument("--prompts", type=int, default=64, help="held-out prompts (default: %(default)s)")
        one.add_argument("--only", nargs="+", default=[], metavar="VARIANT", help="of the variants, only these")
        one.add_argument("--quick", action="store_true", help="a few steps of everything, to see that it runs")
        one.add_argument("--dry", action="store_true", help="append nothing to the results")
        suite.add_arguments(one)
    args = parser.parse_args(arguments)
    try:
        with only_writer("--out", args.out):
            record, figures, words = args.run(args)
    except (ValueError, measuring.OtherTextError) as error:
        parser.error(str(error))
    if record:
        (args.out / "figures.json").write_text(json.dumps(figures | harness.provenance(), indent=1), encoding="utf-8")
        print(words, end="")
        if not (args.quick or args.dry):
            print(harness.write_record(record, figures))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
