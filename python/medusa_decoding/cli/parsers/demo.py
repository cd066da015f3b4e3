"""Show Medusa decoding on the embedded model, next to plain decoding.

An answer is streamed first, then plain and Medusa decoding run side by side. Three methods continue the same prompts in
one process, in turn, for several rounds: transformers' generate, this package's plain loop, and Medusa. The texts are
compared token by token.

On a terminal, a plain and a Medusa generation are recorded, then replayed side by side, at their own speed and slowed
down; colours show which draft tokens each step accepted. Text is plain with NO_COLOR or TERM=dumb.

    medusa demo
    medusa demo --prompt "def read_lines(path):" --tree chain:3 --max-new-tokens 64 --backend compiled
"""

from __future__ import annotations

import argparse

from medusa_decoding.cli import _arguments
from medusa_decoding.cli._arguments import at_least_one
from medusa_decoding.options import DTYPES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--prompt", type=_arguments.text, help="what to continue (default: three short pieces of code)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of the weights (default: float32)")
    parser.add_argument("--rounds", type=at_least_one, default=3, metavar="N", help="timed rounds (default: 3)")
    _arguments.add_decoding(parser, new_tokens=128)
