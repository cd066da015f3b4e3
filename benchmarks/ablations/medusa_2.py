"""Medusa-1 heads and a Medusa-2 model for the embedded demo model, of one budget: settings of `benchmarks.table2`.

Both see the same text in as many gradient steps (300 of 1,024 tokens by default), from heads that know nothing.
`table-3` takes them as `--medusa-1 OUT/medusa-1/heads --medusa-2 OUT/medusa-2/heads`. What is trained in the folder
already is kept; `python -m benchmarks.table2 --out OUT` measures the same models' perplexity.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import table2

NAME = "medusa-2"
WANTED = ("medusa-1", "medusa-2")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--out", type=Path, default=Path("runs/ablations/table2"), help="folder (default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=table2.Sizes.steps, help="gradient steps of each (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Train both."""
    settings = [setting for setting in table2.SETTINGS if setting.name in WANTED]
    table2.prepare(settings, table2.Sizes(steps=args.steps), args.out)
    print(*(args.out / setting.folder / "heads" for setting in settings), sep="\n")
    return 0
