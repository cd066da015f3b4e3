"""Arguments that several commands share, and what they stand for."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from medusa_decoding.decode.step_graph import BACKENDS
from medusa_decoding.tree import Tree

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def at_least_one(text: str) -> int:
    """Parse a count of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {value}")
    return value


def tree(text: str) -> Tree:
    """Parse a tree: a JSON file, `chain:4`, `cartesian:7,6` or `root` (plain decoding)."""
    kind, _, rest = text.partition(":")
    try:
        if text == "root":
            return Tree([])
        if kind == "chain":
            return Tree.chain(int(rest))
        if kind == "cartesian":
            return Tree.cartesian([int(width) for width in rest.split(",")])
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(
            f"expected a JSON file, root, chain:LENGTH or cartesian:WIDTH,WIDTH.., got {text!r}"
        )
    try:
        return Tree.load(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_decoding(parser: argparse.ArgumentParser, new_tokens: int) -> None:
    """Add what `demo` and `generate` have in common."""
    parser.add_argument(
        "--max-new-tokens", type=at_least_one, default=new_tokens, metavar="N", help=f"default: {new_tokens}"
    )
    parser.add_argument(
        "--tree",
        type=tree,
        metavar="TREE",
        help="JSON file, chain:4, cartesian:7,6 or root (plain decoding); default: the checkpoint's",
    )
    parser.add_argument(
        "--backend",
        choices=BACKENDS,
        default="auto",
        help="how steps run: eager; compiled by torch.compile first (seconds; needs a C++ compiler on a CPU); graph: "
        "captured as a CUDA graph; auto: graph on CUDA, else eager (default)",
    )
    parser.add_argument("--json", action="store_true", help="print figures as one JSON object")
