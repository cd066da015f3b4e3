"""Draw trees, and search them for your heads.

A tree says which draft tokens a step verifies. `show` draws a tree; for heads, it says which trees are used with them
on this device, and why. `search` reads the file of `medusa calibrate` and compares the best trees by three measures:
the products of accuracies, as if heads were right independently; how often whole paths were right at a random position;
and steps walked along the texts, which skip easy positions as decoding does.

    medusa tree show HEADS
    medusa tree show medusa_tree.json
    medusa tree show cartesian:5,3 --accuracies calibration.json
    medusa tree search --calibration calibration.json --nodes 4,8,16,32,64
    medusa tree search --calibration calibration.json --nodes 32 --save medusa_tree.json
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from medusa_decoding.cli import _arguments
from medusa_decoding.cli._arguments import add_option
from medusa_decoding.files import read_json
from medusa_decoding.trees.tree import Tree

NODES = [4, 8, 16, 32, 64]


def shown(text: str) -> Tree | str:
    """Parse a tree with a fixed shape; the name of heads or of a tuning file is returned as it is."""
    is_hub_id = text.count("/") == 1 and ":" not in text and not text.endswith(".json")
    if Path(text).expanduser().is_dir() or (is_hub_id and not Path(text).exists()) or _is_tuning(text):
        return text
    found = _arguments.tree(text)
    if not isinstance(found, Tree):
        raise argparse.ArgumentTypeError(f"expected a tree, got {text!r}, which picks one for each step")
    return found


def _is_tuning(text: str) -> bool:
    """Return whether a file is what `medusa tune` writes, as far as its keys tell."""
    try:
        found = read_json(Path(text)) if Path(text).is_file() else None
    except ValueError:
        return False
    return isinstance(found, dict) and "cases" in found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    summary = "Draw a tree in the terminal; for heads, say which tree is used with them here, and why."
    show = _add_action(actions, "show", summary)
    words = (
        "folder or hub id of heads, for the trees that are used with them here; tuning.json; or a tree: JSON file, "
        "chain:4, cartesian:7,6, dynamic:16,4 (its candidates) or root, with or without +lookup:8"
    )
    show.add_argument("tree", type=shown, metavar="TREE", help=words)
    add_option(
        show,
        "--accuracies FILE",
        Path,
        "draw likelier nodes darker: a file of `medusa calibrate` (how often whole paths are right), or a JSON list of "
        "how often each rank of each head is right (as if heads were right independently)",
    )
    add_option(show, "--width N", _arguments.at_least_one, "columns (default: the terminal's)")
    _arguments.add_placement(show)
    _arguments.add_backend(show, "how steps run, for heads: a tuning holds for one backend only (default: auto)")
    show.set_defaults(action="show")
    summary = "Search the best trees of given sizes: as if heads were independent, by whole paths, and walked."
    search = _add_action(actions, "search", summary)
    search.add_argument("--calibration", type=Path, required=True, metavar="FILE", help="of `medusa calibrate`")
    add_option(search, "--nodes N,N", _arguments.counts, "tree sizes, root included", NODES)
    search.add_argument("--json", action="store_true", help="print one JSON object per size, with its trees")
    add_option(search, "--held-out FILE", Path, "a calibration on other prompts, to judge the trees by")
    add_option(
        search,
        "--save FILE",
        Path,
        "write the tree (of one size) as JSON; into a folder, a checkpoint of heads, as medusa_tree.json, or as "
        "medusa_tree_sampling.json for a calibration at a temperature",
    )
    search.add_argument(
        "--by",
        choices=("products", "paths", "walk"),
        help="with --save: which tree (default: walk)",
    )
    search.set_defaults(action="search")


def _add_action(actions: Any, name: str, summary: str) -> argparse.ArgumentParser:
    """Add the parser of an action; its help has the examples of the command that are about it."""
    examples = [line for line in (__doc__ or "").splitlines() if line.startswith(f"    medusa tree {name} ")]
    added: argparse.ArgumentParser = actions.add_parser(
        name,
        help=summary,
        description="\n".join([summary, "", *examples]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return added
