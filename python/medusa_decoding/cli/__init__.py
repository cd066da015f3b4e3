"""The `medusa` command: one file a subcommand.

Bad input ends with exit code 2 and one clear line; Ctrl-C with 130.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType

from medusa_decoding.cli import (
    calibrate,
    chat,
    demo,
    distill,
    doctor,
    evaluate,
    export,
    generate,
    simulate,
    train,
    tree,
    tune,
)

COMMANDS = (demo, generate, chat, evaluate, train, distill, calibrate, tree, tune, export, simulate, doctor)


def name_of(command: ModuleType) -> str:
    """Return a command's name: its NAME (for words that Python has taken), or else its module's."""
    name: str = getattr(command, "NAME", command.__name__.rsplit(".", 1)[-1])
    return name


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; return the process's exit code."""
    parser = argparse.ArgumentParser(
        prog="medusa", description="Medusa decoding for Llama-family models of Hugging Face Transformers."
    )
    subparsers = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        summary = (command.__doc__ or "").splitlines()[0]
        subparser = subparsers.add_parser(
            name_of(command),
            help=summary,
            description=command.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, OSError, MemoryError, FloatingPointError, ModuleNotFoundError) as error:
        print(f"medusa: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("medusa: interrupted", file=sys.stderr)
        return 130
