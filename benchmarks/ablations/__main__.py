"""`python -m benchmarks.ablations NAME`: one ablation, or what prepares one. See the package for the names."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.ablations import measuring, setup, writing
from medusa_decoding.checkpoints import tuning_paths
from medusa_decoding.files import write_json

ABLATIONS = ("figure-3b", "figure-4", "figure-5", "figure-7", "table-3", "dynamic")
APART = ("draft",)
"""Those that write no record of their own kind."""


def module(name: str) -> Any:
    """Return the module of a command."""
    return importlib.import_module(f"benchmarks.ablations.{name.replace('-', '_')}")


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    whole = argparse.ArgumentParser(
        prog="python -m benchmarks.ablations", description="The paper's ablations again, one command each."
    )
    names = whole.add_subparsers(dest="name", required=True, metavar="NAME")
    for name in (*ABLATIONS, *APART):
        one = module(name)
        doc = one.__doc__ or ""
        sub = names.add_parser(
            name, help=doc.splitlines()[0], description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        one.add_arguments(sub)
    again = names.add_parser("redraw", help="Draw the pictures of records again.")
    again.add_argument("records", nargs="+", type=Path, metavar="FILE.json")
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    commands = parser()
    args = commands.parse_args(given)
    try:
        if args.name == "redraw":
            for path in args.records:
                draw(read(path), path.with_suffix(".svg"))
            return 0
        if args.name in APART:
            return int(module(args.name).run(args))
        return _ablation(args, given[1:])
    except (ValueError, OSError, measuring.OtherTextError) as error:
        commands.exit(2, f"{commands.prog} {args.name}: {error}\n")


def _ablation(args: argparse.Namespace, given: Sequence[str]) -> int:
    if not args.no_picture:
        writing.pyplot()  # what is missing is found out first
    one, folder = module(args.name), setup.folder(args)
    path = folder / f"{args.name}.json"
    folder.mkdir(parents=True, exist_ok=True)
    tuning_paths.check_writable("--out", path)  # and what cannot be written to
    described, figures = one.run(args)
    record = writing.record(args.name, described, figures, given)
    print(one.as_text(record))
    write_json(path, record)
    print(path)
    if not args.no_picture:
        draw(record, path.with_suffix(".svg"))
        print(path.with_suffix(".svg"))
    return 0


def read(path: Path) -> dict[str, Any]:
    """Read one record, or raise `ValueError`."""
    record = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(record, dict) or record.get("ablation") not in ABLATIONS:
        raise ValueError(f"{path}: expected the record of one of {', '.join(ABLATIONS)}, got another file")
    return record


def draw(record: dict[str, Any], path: Path) -> None:
    """Draw one record."""
    plt = writing.pyplot()
    writing.save_picture(module(record["ablation"]).draw(plt, record), record, path)


if __name__ == "__main__":
    sys.exit(main())
