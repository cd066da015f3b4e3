"""Run `medusa tree`: see `cli.parsers.tree` for its arguments."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_decoding.calibration.expected import WALK, SearchedTree, search_trees
from medusa_decoding.checkpoints import tuning_paths
from medusa_decoding.checkpoints.accuracies import default_accuracies, find_accuracies, read_accuracies
from medusa_decoding.cli import _arguments
from medusa_decoding.decode.adaptive.acceptance import TreeSet, sizes_for
from medusa_decoding.evaluation import interval
from medusa_decoding.evaluation.report import in_columns
from medusa_decoding.files import read_json
from medusa_decoding.options import DTYPES
from medusa_decoding.progress import Progress
from medusa_decoding.trees import plot
from medusa_decoding.trees.calibration import Calibration, shared_prompts
from medusa_decoding.trees.replay import texts_of
from medusa_decoding.trees.search import walked_tree
from medusa_decoding.trees.tree import Tree

if TYPE_CHECKING:  # trees are drawn and searched without torch and transformers
    from medusa_decoding.calibration.texts import Settings
    from medusa_decoding.calibration.validate import Validation
    from medusa_decoding.checkpoints import HeadsCheckpoint
    from medusa_decoding.checkpoints.tuning_file import Tuning

NO_TEXTS = (
    "Not walked: the calibration was made before texts were kept. Make a new one with `medusa calibrate` for walked "
    "trees and intervals."
)
DRAWN = f"In brackets: {interval.WORDS}."


def run(args: argparse.Namespace) -> int:
    """Run the action."""
    actions = {"show": run_show, "search": run_search, "measure": run_measure}
    return actions[args.action](args)


def run_show(args: argparse.Namespace) -> int:
    """Draw a tree, or those of a tuning file or of heads."""
    if args.image is not None:
        plot.check_matplotlib()
        tuning_paths.check_writable("--image", args.image)
    if isinstance(args.tree, Tree):
        found = [("", args.tree)]
    elif Path(args.tree).is_file():
        from medusa_decoding.checkpoints.tuning_file import Tuning

        found = tuned_trees(Tuning.load(Path(args.tree)))
    else:
        found = trees_in_force(args)
    if args.image is not None and len({tree for _, tree in found}) > 1:
        raise ValueError(f"--image: expected one tree to draw, got {len(found)}; save the one you want as a JSON file")
    for title, tree in found:
        shares = None if args.accuracies is None else find_shares(tree, args.accuracies)
        text = plot.as_text(tree, args.width or shutil.get_terminal_size().columns, shares)
        try:
            text.encode(sys.stdout.encoding or "utf-8")
        except UnicodeEncodeError:
            text = text.translate(plot.PLAIN_CHARACTERS)
        print(f"{title}\n{text}" if title else text)
    if args.image is not None:
        plot.save_figure(plot.as_figure(tree, shares), args.image)
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
    elif args.by is not None:
        raise ValueError("--by: expected --save with it, got none")
    calibration = Calibration.load(args.calibration)
    if args.save is not None:
        if args.save.is_dir():
            args.save /= tree_file(calibration)
        tuning_paths.check_writable("--save", args.save)
    if args.by == WALK:
        texts_of(calibration)
    held_out = None if args.held_out is None else Calibration.load(args.held_out)
    unknown = [] if held_out is None else check_held_out(calibration, held_out, args.calibration)
    found = search_trees(calibration, args.nodes, held_out)
    if args.save is not None:
        by = args.by or found[0][-1].by
        next(one for one in found[0] if one.by == by).tree.save(args.save)
    if args.json:
        for trees in found:
            print(json.dumps({"nodes": trees[0].tree.num_nodes} | {one.by: one.to_json() for one in trees}))
        return 0
    print(as_text([one for trees in found for one in trees]))
    print(f"\n{DRAWN if calibration.texts is not None else NO_TEXTS}")
    if unknown:
        print(f"Not checked, as one of the files does not say: that {' and that '.join(unknown)}.")
    return 0


def tree_file(calibration: Calibration) -> str:
    """Return the file name under which heads keep a tree for a calibration's kind of texts, sampled or greedy."""
    from medusa_decoding.checkpoints import tuning_file

    settings = calibration.made.get("settings")
    sampled = isinstance(settings, dict) and bool(settings.get("temperature"))
    return tuning_file.SAMPLING_TREE_FILE if sampled else tuning_file.TREE_FILE


def check_held_out(calibration: Calibration, held_out: Calibration, file: Path) -> list[str]:
    """Check that two calibrations are of the same heads and base model, on different prompts.

    Returns:
        What cannot be checked because a file does not say it.

    Raises:
        ValueError: they are of other heads or another base model, or share prompts.
    """
    unknown: list[str] = []
    for name, words in (("heads", "heads are the same"), ("base_model", "base models are the same")):
        before, after = calibration.made.get(name), held_out.made.get(name)
        if before is None or after is None:
            unknown.append(words)
        elif before != after:
            raise ValueError(f"--held-out: expected {name} {before} as in {file}, got {after}")
    if not are_others("--held-out", held_out.made.get("prompts"), calibration, file):
        unknown.append("prompts are others")
    return unknown


def are_others(name: str, prompts: Any, calibration: Calibration, file: Path) -> bool:
    """Return whether prompts are known to be none of a calibration's; False if one of the two does not tell.

    Prompts are as `Writer.describe` returns them. If some are the same, a `ValueError` names their argument, `name`.
    """
    same = shared_prompts(prompts, calibration.made.get("prompts"))
    if same:
        raise ValueError(f"{name}: expected others than the prompts of {file}, got {same} of them")
    return same is not None


def run_measure(args: argparse.Namespace) -> int:
    """Generate with trees and compare the steps with what was expected."""
    from medusa_decoding.calibration.texts import Writer
    from medusa_decoding.calibration.validate import validate
    from medusa_decoding.evaluation import read_prompts

    _arguments.resolve_device(args)
    calibration = Calibration.load(args.calibration)
    texts_of(calibration)
    _arguments.heads_folder(args)
    trees = [walked_tree(calibration, size) for size in args.nodes]
    prompts = read_prompts(args.prompts, limit=args.limit, turns=args.turns, distinct=True)
    tokenizer = _arguments.load_tokenizer(args)
    with _arguments.load_model(args) as model:
        writer = Writer(model, tokenizer, settings_of(calibration, args))
        checked = check_same(calibration, writer.describe(prompts), args.calibration)
        with Progress(len(prompts) * len(trees), "prompt") as bar:
            found = [validate(calibration, writer, prompts, tree, bar.update) for tree in trees]
    if args.json:
        for one in found:
            print(json.dumps(one.to_json()))
        return 0
    print(as_measured(found))
    others = "other prompts" if checked else "prompts (not checked to be others)"
    print(f"\nTrees searched by walking {args.calibration}; texts to {len(prompts)} {others}. {DRAWN}")
    return 0


def settings_of(calibration: Calibration, args: argparse.Namespace) -> Settings:
    """Return the settings of a calibration's texts, to write texts like them; raise `ValueError` if there are none."""
    from medusa_decoding.calibration.texts import Settings

    try:
        made = calibration.made["settings"]
        found = made["max_new_tokens"], made["prompt_tokens"], args.template, made["temperature"], made.get("seed", 0)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{args.calibration}: expected settings of its texts, got {error!r}") from error
    return Settings(*found)


def check_same(calibration: Calibration, now: dict[str, Any], file: Path) -> bool:
    """Raise `ValueError` unless answers to other prompts have the model, heads and settings of a calibration.

    `now` is what `Writer.describe` says about the answers. Return whether the prompts are known to be others (see
    `are_others`).
    """
    before, after = (
        {f"settings.{name}": value for name, value in made["settings"].items() if name not in ("device", "backend")}
        | {name: made.get(name) for name in ("heads", "base_model")}
        for made in (calibration.made, now)
    )
    for name in sorted({*before, *after}, reverse=True):
        if before.get(name) != after.get(name):
            raise ValueError(f"{name}: expected {before.get(name)} as in {file}, got {after.get(name)}")
    return are_others("--prompts", now["prompts"], calibration, file)


def as_text(trees: list[SearchedTree]) -> str:
    """Return searched trees as a table."""
    rows = [["nodes", "best by", "other nodes", "if independent", "by paths", "walked"]]
    rows[0] += ["held out: by paths", "walked"] if trees[0].held_out is not None else []
    for one in trees:
        held_out = [] if one.held_out is None else one.held_out.cells()[1:]
        rows.append([str(one.tree.num_nodes), one.by, str(one.different), *one.expected.cells(), *held_out])
    return in_columns(rows)


def as_measured(found: Iterable[Validation]) -> str:
    """Return expectations and measurements as a table."""
    rows = [["nodes", "if independent", "by paths", "walked", "measured", "steps", "walked over measured"]]
    for one in found:
        figures = [*one.expected.cells(), interval.as_text(one.measured)]
        rows.append([str(one.tree.num_nodes), *figures, str(one.steps), interval.as_text(one.ratio)])
    return in_columns(rows)
