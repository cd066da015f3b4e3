"""Arguments of the commands that read prompts: how many prompts are taken, and how much of each."""

from __future__ import annotations

import argparse

from medusa_decoding.cli import _arguments
from medusa_decoding.evaluation.prompts import TURNS
from medusa_decoding.evaluation.run import PROMPT_TOKENS


def add_amounts(parser: argparse.ArgumentParser, prompt_tokens: bool = True) -> None:
    """Add `--limit`, `--turns` and, unless it is left out, `--prompt-tokens`."""
    for name, default, words in (
        ("--limit", None, "first N prompts per category (default: all)"),
        ("--turns", TURNS, f"at most N turns per prompt (default: {TURNS})"),
        (
            "--prompt-tokens",
            PROMPT_TOKENS,
            f"of a plain text, the first N tokens are the prompt (default: {PROMPT_TOKENS})",
        ),
    ):
        if prompt_tokens or name != "--prompt-tokens":
            parser.add_argument(name, type=_arguments.at_least_one, default=default, metavar="N", help=words)
