"""Run `medusa tree`: see `cli.parsers.tree` for its arguments."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_decoding.checkpoints import tuning_paths
from medusa_decoding.checkpoints.accuracies import default_accuracies, find_accuracies, read_accuracies
from medusa_decoding.cli import _arguments
from medusa_decoding.decode.adaptive.acceptance import TreeSet, sizes_for
from medusa_decoding.evaluation import interval
from medusa_decoding.evaluation.report import in_columns
from medusa_decoding.files import read_json
from medusa_decoding.options import DTYPES
from medusa_decoding.trees import plot
from medusa_decoding.trees.tree import Tree
from medusa_decoding.tuning.calibration import Calibration, shared_prompts
from medusa_decoding.tuning.expected import WALK, SearchedTree, search_trees

if TYPE_CHECKING:  # trees are drawn and searched without torch and transformers
    from medusa_decoding.checkpoints import HeadsCheckpoint
    from medusa_decoding.checkpoints.tuning_file import Tuning

DRAWN = f"In brackets: {interval.WORDS}."


def run(args: argparse.Namespace) -> int:
    """Run the action."""
    actions = {"show": run_show, "search": run_search}
    return actions[args.action](args)


def run_show(args: argparse.Namespace) -> int:
    """Draw a tree, or those of a tuning file or of heads."""
    if isinstance(args.tree, Tree):
        found = [("", args.tree)]
    elif Path(args.tree).is_file():
        from medusa_decoding.checkpoints.tuning_file import Tuning

        found = tuned_trees(Tuning.load(Path(args.tree)))
    else:
        found = trees_in_force(args)
    for title, tree in found:
        shares = None if args.accuracies is None else find_shares(tree, args.accuracies)
        text = plot.as_text(tree, args.width or shutil.get_terminal_size().columns, shares)
        try:
            text.encode(sys.stdout.encoding or "utf-8")
        except UnicodeEncodeError:
            text = text.translate(plot.PLAIN_CHARACTERS)
        print(f"{title}\n{text}" if title else text)
    return 0


def tuned_trees(tuning: Tuning) -> list[tuple[str, Tree]]:
    """Return the tree of each case with a title; for an undecided case, the one that seemed the fastest."""
    from medusa_decoding.generation.tree_choice import tuned_choice

    return [
        (
            f"Batch {case.batch}, prefix {case.prefix}: {tuned_choice(case)}"
            + ("; the one that seemed the fastest:" if case.chosen is None else ""),
            (case.chosen or case.fastest).tree,
        )
        for case in tuning.cases
    ]


def trees_in_force(args: argparse.Namespace) -> list[tuple[str, Tree]]:
    """Print which tree heads decode with on this device by default and why; return what to draw, with titles.

    The base model is not loaded, so its weights are not compared with those that a tuning was made with.
    """
    import torch

    from medusa_decoding.checkpoints import read_heads, tuning_file
    from medusa_decoding.generation.tree_choice import CHANGED, UNTUNED, TreeChoice

    _arguments.resolve_device(args)
    checkpoint = read_heads(args.tree)
    folder, device = checkpoint.path, torch.device(args.device)
    dtype = _arguments.torch_dtype(args.dtype or stated_dtype(checkpoint))
    heads = checkpoint.heads.place(torch.device("cpu"), dtype)
    conditions = tuning_file.Conditions.without_model(device, dtype, args.backend, heads)
    stored = tuning_file.stored_trees(folder, heads)
    try:
        file, tuning = tuning_file.find(folder, conditions, heads)
    except ValueError as error:
        refused = tuning_paths.stored_files(folder)
        print(f"Tree: {TreeChoice('auto', CHANGED if refused else UNTUNED)}")
        if refused:
            print(f"  {error}")
        accuracies = find_accuracies(folder, heads) or default_accuracies(heads)
        own = stored.get(tuning_file.TREE_FILE)
        trees = TreeSet(accuracies.by_rank, own, sizes_for(conditions.backend)).trees
        print(
            f"Each step picks plain decoding or a tree of {', '.join(str(tree.num_nodes) for tree in trees[1:])} nodes."
        )
        found = [("The largest, which contains the others:", trees[-1])]
        if own is not None:
            found = [(f"The one of {own.num_nodes} nodes is {folder / tuning_file.TREE_FILE}:", own)]
        sampling = stored.get(tuning_file.SAMPLING_TREE_FILE)
        if sampling is not None:
            file = folder / tuning_file.SAMPLING_TREE_FILE
            found.append((f"When sampling, one of {sampling.num_nodes} nodes is {file}:", sampling))
        return found
    print(f"{file} holds here: {conditions.device}, {conditions.dtype}, {conditions.backend}")
    print(f"  not compared, because the base model is not loaded: its weights (tuned with {tuning.conditions.model})")
    for name, tree in stored.items():
        if tree not in tuning.trees:
            print(f"  {folder / name} was not timed and is not used; run `medusa tune` again")
    return tuned_trees(tuning)


def stated_dtype(checkpoint: HeadsCheckpoint) -> str:
    """Return the dtype that the base model's config states, else (or if it is out of reach) the heads' own."""
    from medusa_decoding.checkpoints import pretrained

    found = None
    if checkpoint.base_model is not None:
        with contextlib.suppress(ValueError):
            config = pretrained.read_file(checkpoint.base_model, **pretrained.at(checkpoint.base_revision))
            found = config.get("dtype") or config.get("torch_dtype")
    return found if found in DTYPES else str(checkpoint.heads.w1.dtype).removeprefix("torch.")


def find_shares(tree: Tree, file: Path) -> list[float]:
    """Return how likely each of a tree's choices is right."""
    accuracies = read_accuracies(file)
    if "texts" in read_json(file):
        return Calibration.load(file).shares(tree)
    return plot.path_shares(tree, accuracies)


def run_search(args: argparse.Namespace) -> int:
    """Search trees."""
    if args.save is not None:
        if len(args.nodes) != 1:
            raise ValueError(f"--save: expected one size in --nodes with it, got {len(args.nodes)}")
    elif args.by is not None:
        raise ValueError("--by needs --save")
    calibration = Calibration.load(args.calibration)
    if args.save is not None:
        if args.save.is_dir():
            args.save /= tree_file(calibration)
        tuning_paths.check_writable("--save", args.save)
    held_out = None if args.held_out is None else Calibration.load(args.held_out)
    if held_out is not None:
        check_held_out(calibration, held_out, args.calibration)
    found = search_trees(calibration, args.nodes, held_out)
    if args.save is not None:
        next(one for one in found[0] if one.by == (args.by or WALK)).tree.save(args.save)
    if args.json:
        for trees in found:
            print(json.dumps({"nodes": trees[0].tree.num_nodes} | {one.by: one.to_json() for one in trees}))
        return 0
    print(as_text([one for trees in found for one in trees]))
    print(f"\n{DRAWN}")
    return 0


def tree_file(calibration: Calibration) -> str:
    """Return the file name under which heads keep a tree for a calibration's kind of texts, sampled or greedy."""
    from medusa_decoding.checkpoints import tuning_file

    settings = calibration.made.get("settings")
    sampled = isinstance(settings, dict) and bool(settings.get("temperature"))
    return tuning_file.SAMPLING_TREE_FILE if sampled else tuning_file.TREE_FILE


def check_held_out(calibration: Calibration, held_out: Calibration, file: Path) -> None:
    """Raise `ValueError` if two calibrations are of other heads or another base model, or share prompts."""
    for name in ("heads", "base_model"):
        before, after = calibration.made.get(name), held_out.made.get(name)
        if before != after:
            raise ValueError(f"--held-out: expected {name} {before} as in {file}, got {after}")
    same = shared_prompts(held_out.made.get("prompts"), calibration.made.get("prompts"))
    if same:
        raise ValueError(f"--held-out: expected others than the prompts of {file}, got {same} of them")


def as_text(trees: list[SearchedTree]) -> str:
    """Return searched trees as a table."""
    rows = [["nodes", "best by", "other nodes", "if independent", "by paths", "walked"]]
    rows[0] += ["held out: by paths", "walked"] if trees[0].held_out is not None else []
    for one in trees:
        held_out = [] if one.held_out is None else one.held_out.cells()[1:]
        rows.append([str(one.tree.num_nodes), one.by, str(one.different), *one.expected.cells(), *held_out])
    return in_columns(rows)
