"""Search and show trees: which combinations of the heads' drafts a step verifies; and measure what they give.

    medusa tree show medusa_tree.json
    medusa tree show cartesian:5,3 --accuracies calibration.json --image tree.png
    medusa tree search --calibration calibration.json --nodes 4,8,16,32,64
    medusa tree search --calibration calibration.json --nodes 32 --save medusa_tree.json
    medusa tree measure --model HEADS --calibration calibration.json --prompts others.jsonl --nodes 4,16,64

`search` takes the file of `medusa calibrate` and compares the trees that are best by three measures: products of
accuracies, as if heads were right independently; how often whole paths were right at a position drawn at random; and
walked along the texts as steps do, which pass over easy positions. `measure` writes texts to other prompts with the
trees that are best when walked, and puts the tokens a step that decoding made beside what was expected.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_decoding.calibration.compare import PATHS, PRODUCTS, WALK, Judged, compare
from medusa_decoding.calibration.expected import Expected, as_figure
from medusa_decoding.calibration.texts import Settings, Writer, shared_prompts
from medusa_decoding.checkpoints import tuning_paths
from medusa_decoding.checkpoints.accuracies import read_accuracies
from medusa_decoding.cli import _arguments
from medusa_decoding.decode.runtime.steps import BACKENDS
from medusa_decoding.evaluation import interval, read_prompts
from medusa_decoding.evaluation.prompts import TURNS
from medusa_decoding.files import read_json
from medusa_decoding.trees import plot
from medusa_decoding.trees.calibration import Calibration
from medusa_decoding.trees.replay import texts_of
from medusa_decoding.trees.search import walked_tree
from medusa_decoding.trees.tree import MAX_CHOICES, Tree

if TYPE_CHECKING:
    from medusa_decoding.calibration.validate import Beside

NODES = [4, 8, 16, 32, 64]
NO_TEXTS = (
    "Not walked: the calibration was made before texts were kept; with a new one of `medusa calibrate`, trees are "
    "walked and figures have intervals."
)
DRAWN = f"In brackets: {interval.WORDS}."


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
        "tree",
        type=shape,
        metavar="TREE",
        help="JSON file, chain:4, cartesian:7,6, dynamic:16,4 (its candidates) or root, with or without +lookup:8",
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
    summary = "Search the best trees of given sizes: with heads taken as independent, by whole paths, and walked."
    search = actions.add_parser("search", help=summary, description=summary)
    search.add_argument("--calibration", type=Path, required=True, metavar="FILE", help="of `medusa calibrate`")
    search.add_argument(
        "--nodes", type=sizes, default=NODES, metavar="N,N", help="root included (default: 4,8,16,32,64)"
    )
    search.add_argument(
        "--held-out", type=Path, metavar="FILE", help="a calibration on other prompts, by which the trees are judged"
    )
    search.add_argument("--save", type=Path, metavar="FILE", help="write the tree (one size) as JSON")
    search.add_argument(
        "--by",
        choices=(PRODUCTS, PATHS, WALK),
        help="with --save: which one (default: walk; paths for a calibration without texts)",
    )
    search.add_argument("--json", action="store_true", help="print one JSON object a size, trees included")
    search.set_defaults(act=run_search)
    summary = "Tokens a step that decoding makes on other prompts, beside what a calibration expects."
    measure = actions.add_parser("measure", help=summary, description=summary)
    _arguments.add_model(measure)
    _arguments.add_template(measure)
    measure.add_argument("--calibration", type=Path, required=True, metavar="FILE", help="of `medusa calibrate`")
    measure.add_argument("--prompts", nargs="+", required=True, metavar="FILE", help="as for `medusa calibrate`")
    measure.add_argument("--limit", type=_arguments.at_least_one, metavar="N", help="the first N of each category")
    measure.add_argument(
        "--turns", type=_arguments.at_least_one, default=TURNS, metavar="N", help=f"at most (default: {TURNS})"
    )
    measure.add_argument(
        "--nodes", type=sizes, default=NODES, metavar="N,N", help="root included (default: 4,8,16,32,64)"
    )
    measure.add_argument("--backend", choices=BACKENDS, default="auto", help="how steps run, as in medusa generate")
    measure.add_argument("--json", action="store_true", help="print one JSON object a size")
    measure.set_defaults(act=run_measure, tree=Tree([]))


def run(args: argparse.Namespace) -> int:
    """Do what was asked."""
    code: int = args.act(args)
    return code


def run_show(args: argparse.Namespace) -> int:
    """Draw a tree."""
    if args.image is not None:
        plot.check_matplotlib()
        tuning_paths.check_writable("--image", args.image)
    shares = None if args.accuracies is None else find_shares(args.tree, args.accuracies)
    text = plot.as_text(args.tree, args.width or shutil.get_terminal_size().columns, shares)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        text = text.translate(plot.PLAIN_CHARACTERS)
    if args.image is not None:
        plot.save_figure(plot.as_figure(args.tree, shares), args.image)
    print(text)
    return 0


def find_shares(tree: Tree, file: Path) -> list[float]:
    """Return how likely each of a tree's choices is right.

    Raises:
        ValueError: a file with neither a calibration nor accuracies, or for fewer heads or ranks than the tree has.
    """
    accuracies = read_accuracies(file)
    if "paths" in read_json(file):
        return Calibration.load(file).shares(tree)
    return plot.path_shares(tree, accuracies)


def run_search(args: argparse.Namespace) -> int:
    """Search trees."""
    if args.save is not None:
        if len(args.nodes) != 1:
            raise ValueError(f"--save: expected one size in --nodes with it, got {len(args.nodes)}")
        tuning_paths.check_writable("--save", args.save)
    elif args.by is not None:
        raise ValueError("--by: expected --save with it, got none")
    calibration = Calibration.load(args.calibration)
    if args.by == WALK:
        texts_of(calibration)
    held_out = None if args.held_out is None else Calibration.load(args.held_out)
    unknown = [] if held_out is None else check_held_out(calibration, held_out, args)
    found = compare(calibration, args.nodes, held_out)
    if args.save is not None:
        by = args.by or found[0][-1].by
        next(one for one in found[0] if one.by == by).tree.save(args.save)
    if args.json:
        for trees in found:
            print(json.dumps(as_json(trees)))
        return 0
    print(as_text(found))
    print(f"\n{DRAWN if calibration.texts is not None else NO_TEXTS}")
    if unknown:
        print(f"Not checked, as one of the files does not say: that {' and that '.join(unknown)}.")
    return 0


def check_held_out(calibration: Calibration, held_out: Calibration, args: argparse.Namespace) -> list[str]:
    """Check that trees are judged by other prompts, of the same heads and base model.

    Returns:
        What the files do not tell.

    Raises:
        ValueError: they are of other heads or another base model, or some prompts are the same.
    """
    unknown: list[str] = []
    for name, words in (("heads", "heads are the same"), ("base_model", "base models are the same")):
        before, after = calibration.made.get(name), held_out.made.get(name)
        if before is None or after is None:
            unknown.append(words)
        elif before != after:
            raise ValueError(f"--held-out: expected {name} {before} as in {args.calibration}, got {after}")
    check_others("--held-out", held_out.made.get("prompts"), calibration, args.calibration, unknown)
    return unknown


def check_others(name: str, prompts: Any, calibration: Calibration, file: Path, unknown: list[str]) -> None:
    """Check that prompts are not those of a calibration, nor some of them.

    Args:
        name: the argument that they came with.
        prompts: what `Writer.described` says of them.
        calibration: on other prompts.
        file: of the calibration.
        unknown: what cannot be told is added here.

    Raises:
        ValueError: some are the same.
    """
    same = shared_prompts(prompts, calibration.made.get("prompts"))
    if same:
        raise ValueError(f"{name}: expected others than the prompts of {file}, got {same} of them")
    if same is None:
        unknown.append("prompts are others")


def run_measure(args: argparse.Namespace) -> int:
    """Write texts with trees, and count steps."""
    from tqdm.auto import tqdm

    from medusa_decoding.calibration.validate import beside, steps_made

    _arguments.check_device(args)
    calibration = Calibration.load(args.calibration)
    texts_of(calibration)
    trees = [walked_tree(calibration, size) for size in args.nodes]
    try:
        prompts = read_prompts(args.prompts, limit=args.limit, turns=args.turns)
    except ModuleNotFoundError as error:
        raise ValueError(str(error)) from error
    tokenizer = _arguments.load_tokenizer(args)
    with _arguments.load_model(args) as model:
        writer = Writer(model, tokenizer, settings_of(calibration, args))
        unknown = check_same(calibration, writer.described(prompts), args.calibration)
        found = []
        with tqdm(total=len(prompts) * len(trees), unit="prompt", disable=None) as bar:
            for tree in trees:
                rows = steps_made(writer, prompts, tree, bar.update)
                found.append(beside(calibration, tree, rows))
    if args.json:
        for one in found:
            print(json.dumps(one.to_json()))
        return 0
    print(as_measured(found))
    others = "prompts (not checked to be others)" if unknown else "other prompts"
    print(f"\nTrees searched by walking {args.calibration}; texts to {len(prompts)} {others}. {DRAWN}")
    return 0


def settings_of(calibration: Calibration, args: argparse.Namespace) -> Settings:
    """Return the settings of a calibration's texts, so that others are like them.

    Raises:
        ValueError: the calibration does not say them.
    """
    try:
        made = calibration.made["settings"]
        told = made["max_new_tokens"], made["prompt_tokens"], args.template, made["temperature"], made.get("seed", 0)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{args.calibration}: expected settings of its texts, got {error!r}") from error
    return Settings(*told)


def check_same(calibration: Calibration, now: dict[str, Any], file: Path) -> list[str]:
    """Check that texts to other prompts are of the calibration's model, heads and settings.

    Returns:
        What the file does not tell.

    Raises:
        ValueError: they are not, or some prompts are the same.
    """
    made = calibration.made
    unknown: list[str] = []
    before, after = ({**of["settings"], "device": None, "backend": None} for of in (made, now))
    for name in sorted({*before, *after}):
        if before.get(name) != after.get(name):
            raise ValueError(f"settings.{name}: expected {before.get(name)} as in {file}, got {after.get(name)}")
    for name in ("heads", "base_model"):
        if made.get(name) != now[name]:
            raise ValueError(f"{name}: expected {made.get(name)} as in {file}, got {now[name]}")
    check_others("--prompts", now["prompts"], calibration, file, unknown)
    return unknown


def as_json(found: list[Judged]) -> dict[str, Any]:
    """Return the trees of one size as JSON has them."""
    figures: dict[str, Any] = {"nodes": found[0].tree.num_nodes}
    for one in found:
        figures[one.by] = {
            "tree": one.tree.choices,
            "different_nodes": one.different,
            "expected": one.expected.to_json(),
        }
        if one.held_out is not None:
            figures[one.by]["held_out"] = one.held_out.to_json()
    return figures


def as_text(found: list[list[Judged]]) -> str:
    """Return trees as a table: expected tokens a step."""
    trees = [one for of_size in found for one in of_size]
    held_out = trees[0].held_out is not None
    rows = [["nodes", "best by", "other nodes", "if independent", "by paths", "walked"]]
    rows[0] += ["held out: by paths", "walked"] if held_out else []
    for one in trees:
        figures = [*three(one.expected), *(three(one.held_out)[1:] if one.held_out is not None else [])]
        rows.append([str(one.tree.num_nodes), one.by, str(one.different), *figures])
    return in_columns(rows)


def as_measured(found: list[Beside]) -> str:
    """Return expectations and measurements as a table."""
    rows = [["nodes", "if independent", "by paths", "walked", "measured", "steps", "walked over measured"]]
    for one in found:
        figures = [*three(one.expected), as_figure(one.measured)]
        rows.append([str(one.tree.num_nodes), *figures, str(one.steps), as_figure(one.ratio)])
    return in_columns(rows)


def three(expected: Expected) -> list[str]:
    """Return expectations in the three ways, for a person."""
    return [as_figure(one) for one in (expected.independent, expected.paths, expected.walked)]


def in_columns(rows: list[list[str]]) -> str:
    """Return a table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
