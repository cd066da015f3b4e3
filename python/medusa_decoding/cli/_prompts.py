"""How many prompts of a file are taken, and how much of each: arguments of the commands that read prompts."""

from __future__ import annotations

import argparse

from medusa_decoding.cli import _arguments
from medusa_decoding.evaluation.prompts import TURNS
from medusa_decoding.evaluation.run import PROMPT_TOKENS


def add_amounts(parser: argparse.ArgumentParser) -> None:
    """Add `--limit`, `--turns` and `--prompt-tokens`."""
    parser.add_argument(
        "--limit", type=_arguments.at_least_one, metavar="N", help="the first N prompts of each category (default: all)"
    )
    parser.add_argument(
        "--turns",
        type=_arguments.at_least_one,
        default=TURNS,
        metavar="N",
        help=f"at most N turns of a prompt (default: {TURNS})",
    )
    parser.add_argument(
        "--prompt-tokens",
        type=_arguments.at_least_one,
        default=PROMPT_TOKENS,
        metavar="N",
        help=f"of a plain text, its first N tokens are the prompt (default: {PROMPT_TOKENS})",
    )
