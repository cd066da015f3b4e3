"""Search and show trees: which combinations of the heads' guesses a step verifies.

    medusa tree show medusa_tree.json
    medusa tree show cartesian:5,3 --accuracies calibration.json --image tree.png
    medusa tree search --calibration calibration.json --nodes 4,8,16,32,64
    medusa tree search --calibration calibration.json --nodes 32 --save medusa_tree.json

`search` takes the file of `medusa calibrate` and compares the tree that is best if heads were right independently with
the one that is best by how often whole paths were right. Its figures are tokens at a position drawn at random: real
steps commit fewer, as they pass over easy positions (`medusa eval --tree FILE` measures them).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from medusa_decoding.cli import _arguments
from medusa_decoding.tree import MAX_CHOICES, Tree
from medusa_decoding.tuning import drawing
from medusa_decoding.tuning.acceleration import read_accuracies
from medusa_decoding.tuning.accuracy import Calibration
from medusa_decoding.tuning.search import Comparison, compare

NODES = [4, 8, 16, 32, 64]


def sizes(text: str) -> list[int]:
    """Parse sizes of trees, separated by commas."""
    found = [_arguments.at_least_one(part) for part in text.split(",")]
    for size in found:
        if size > MAX_CHOICES + 1:
            raise argparse.ArgumentTypeError(f"expected at most {MAX_CHOICES + 1} nodes, got {size}")
    return found


def shape(text: str) -> Tree:
    """Parse a tree that has a shape of its own."""
    found = _arguments.tree(text)
    if not isinstance(found, Tree):
        raise argparse.ArgumentTypeError(f"expected a tree, got {text!r}, which is chosen anew before each step")
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    summary = "Draw a tree in the terminal, and as an image."
    show = actions.add_parser("show", help=summary, description=summary)
    show.add_argument(
        "tree", type=shape, metavar="TREE", help="JSON file, chain:4, cartesian:7,6 or root, with or without +lookup:8"
    )
    show.add_argument(
        "--accuracies",
        type=Path,
        metavar="FILE",
        help="of `medusa calibrate` (how often whole paths are right), or accuracies as in `medusa simulate`, heads "
        "taken as independent: likelier nodes are darker",
    )
    show.add_argument("--width", type=_arguments.at_least_one, metavar="N", help="columns (default: the terminal's)")
    show.add_argument("--image", type=Path, metavar="FILE", help="draw it into a PNG (or SVG, PDF) as well")
    show.set_defaults(act=run_show)
    summary = "Search the best trees of given sizes, with heads taken as independent and by whole paths."
    search = actions.add_parser("search", help=summary, description=summary)
    search.add_argument("--calibration", type=Path, required=True, metavar="FILE", help="of `medusa calibrate`")
    search.add_argument(
        "--nodes", type=sizes, default=NODES, metavar="N,N", help="root included (default: 4,8,16,32,64)"
    )
    search.add_argument(
        "--held-out", type=Path, metavar="FILE", help="a calibration on other prompts, by which the trees are judged"
    )
    search.add_argument("--save", type=Path, metavar="FILE", help="write the tree of whole paths (one size) as JSON")
    search.add_argument("--json", action="store_true", help="print one JSON object a size, trees included")
    search.set_defaults(act=run_search)


def run(args: argparse.Namespace) -> int:
    """Do what was asked."""
    code: int = args.act(args)
    return code


def run_show(args: argparse.Namespace) -> int:
    """Draw a tree."""
    if args.image is not None:
        drawing.check_matplotlib()
        if args.image.is_dir() or not args.image.absolute().parent.is_dir():
            raise ValueError(f"--image: expected a file in a folder that exists, got {args.image}")
    shares = None if args.accuracies is None else find_shares(args.tree, args.accuracies)
    text = drawing.as_text(args.tree, args.width or shutil.get_terminal_size().columns, shares)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = text.translate(drawing.PLAIN_CHARACTERS)
    if args.image is not None:
        drawing.save_figure(drawing.as_figure(args.tree, shares), args.image)
    print(text)
    return 0


def find_shares(tree: Tree, file: Path) -> list[float]:
    """Return how likely each of a tree's choices is right.

    Raises:
        ValueError: a file with neither a calibration nor accuracies, or for fewer heads or ranks than the tree has.
    """
    accuracies = read_accuracies(file)
    if "paths" in json.loads(file.read_text(encoding="utf-8")):
        return Calibration.load(file).shares(tree)
    return drawing.path_shares(tree, accuracies)


def run_search(args: argparse.Namespace) -> int:
    """Search trees."""
    if args.save is not None:
        if len(args.nodes) != 1:
            raise ValueError(f"--save: expected one size in --nodes with it, got {len(args.nodes)}")
        if args.save.is_dir() or not args.save.absolute().parent.is_dir():
            raise ValueError(f"--save: expected a file in a folder that exists, got {args.save}")
    calibration = Calibration.load(args.calibration)
    held_out = None if args.held_out is None else Calibration.load(args.held_out)
    found = compare(calibration, args.nodes, held_out)
    if args.save is not None:
        found[0].joint.save(args.save)
    if args.json:
        for one in found:
            print(json.dumps(as_json(one)))
    else:
        print(as_text(found))
    return 0


def as_json(found: Comparison) -> dict[str, Any]:
    """Return a comparison as JSON has it."""
    figures: dict[str, Any] = {
        "nodes": found.joint.num_nodes,
        "if_independent": {
            "tree": found.independent.choices,
            "estimate": found.estimate,
            "tokens": found.independent_tokens,
        },
        "whole_paths": {"tree": found.joint.choices, "tokens": found.joint_tokens},
        "different_nodes": found.different,
    }
    if found.held_out is not None:
        figures["if_independent"]["held_out"], figures["whole_paths"]["held_out"] = found.held_out
    return figures


def as_text(found: list[Comparison]) -> str:
    """Return comparisons as a table: expected tokens a step."""
    held_out = found[0].held_out is not None
    rows = [["nodes", "if independent", "its tree by paths", "best by paths", "difference", "other nodes"]]
    rows[0] += ["held out: if independent", "by paths"] if held_out else []
    for one in found:
        difference = one.joint_tokens / one.estimate - 1
        rows.append(
            [
                str(one.joint.num_nodes),
                *(f"{tokens:.3f}" for tokens in (one.estimate, one.independent_tokens, one.joint_tokens)),
                f"{100 * difference:+.1f} %",
                str(one.different),
                *(f"{tokens:.3f}" for tokens in one.held_out or ()),
            ]
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
