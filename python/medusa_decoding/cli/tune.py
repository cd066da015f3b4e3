"""Run `medusa tune`: see `cli.parsers.tune` for its arguments."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from medusa_decoding.checkpoints import tuning_file, tuning_paths
from medusa_decoding.checkpoints.tuning_file import WALKED, Case, Conditions, Tuning, fastest
from medusa_decoding.cli import _arguments
from medusa_decoding.decode.adaptive.acceptance import CLIFFS
from medusa_decoding.evaluation.interval import LEVEL
from medusa_decoding.files import only_writer
from medusa_decoding.model import MedusaModel
from medusa_decoding.progress import Progress
from medusa_decoding.provenance import LIBRARIES, versions
from medusa_decoding.trees.tree import Tree, most_nodes
from medusa_decoding.tuning.calibration import Calibration
from medusa_decoding.tuning.select import best_trees, expected_tokens, load_knowledge, new_case, new_tuning
from medusa_decoding.tuning.step_timer import longest_prefix, time_steps

PREFIXES, NODES = (128, 1024), (1, 2, 4, 8, 16, 32, 64)
FEW_TEXTS = 20
"""With fewer texts than this, a tree searched on them may do worse on others."""
ROUNDS = f"{LEVEL:.0%} interval, percentile bootstrap over rounds; one round tells nothing"


def run(args: argparse.Namespace) -> int:
    """Measure and store, or check."""
    _arguments.resolve_device(args)
    if args.calibration is not None and not args.calibration.is_file():
        raise ValueError(f"--calibration: expected a file that `medusa calibrate` wrote, got {args.calibration}")
    folder = _arguments.heads_folder(args)
    # The file's name depends on the model; whether there is a folder for it is known before it is loaded.
    if args.out is not None and not args.check:
        tuning_paths.check_writable("--out", args.out)
    elif not args.check:
        output = tuning_paths.output_folder(folder)
        output.mkdir(parents=True, exist_ok=True)
        tuning_paths.check_writable("--out", output / tuning_paths.FILE)
    with _arguments.load_model(args) as model:
        assert model.heads is not None
        conditions = Conditions.current(model.backbone, model.heads, model.backend)
        if not args.check:
            file = args.out or tuning_paths.output_file(folder, conditions.runtime)
            with only_writer("--out", file):
                tune(args, folder, model, conditions, file)
            return 0
        if args.out is not None:
            file, tuning = args.out, tuning_file.load_for(args.out, conditions, model.heads)
        else:
            file, tuning = tuning_file.find(folder, conditions, model.heads)
        check(args, folder, model, file, tuning)
    return 0


def tune(args: argparse.Namespace, folder: Path, model: MedusaModel, conditions: Conditions, file: Path) -> None:
    """Measure, choose, store and print."""
    assert model.heads is not None
    accuracies, texts = load_knowledge(args.calibration, folder, model.heads, conditions.base_model)
    warn_of_few(texts)
    cliffs = CLIFFS if model.backbone.runs_quantised_modules() else ()
    most = most_nodes(map(len, accuracies.by_rank))
    sizes = sorted({1, *(args.nodes or (size for size in (*NODES, *cliffs) if size <= most))})
    trees = best_trees(accuracies.by_rank, sizes, texts)
    stored = tuning_file.stored_trees(folder, model.heads)
    trees += [tree for tree in dict.fromkeys(stored.values()) if tree not in trees]
    tokens = expected_tokens(trees, accuracies.by_rank, texts)
    prefixes = args.prefix or [prefix for prefix in PREFIXES if prefix <= longest_prefix(model, trees)]
    if not prefixes:
        raise ValueError(f"--prefix: none fits the context of {model.backbone.context_limit}; give a shorter one")
    cases, measured = [], []
    blocks = len(args.batch) * len(prefixes) * (args.repeats + 1) * len(trees)
    with Progress(blocks, "block") as bar:
        # The longest first, so that what does not fit fails before anything is measured.
        for batch in reversed(args.batch):
            for prefix in reversed(prefixes):
                found = time_steps(model, trees, batch=batch, prefix=prefix, repeats=args.repeats, on_block=bar.update)
                cases.append(new_case(trees, tokens, found))
                measured += found
    tuning = new_tuning(conditions, accuracies, cases, measured)
    undecided = [
        f"{gain_of(case)} of plain decoding for batch {case.batch} and prefix {case.prefix}"
        for case in tuning.cases
        if case.chosen is None
    ]
    if undecided and args.undecided == "refuse":
        if not args.json:
            print(as_text(tuning, stored))
        raise ValueError(
            "tuning: expected times that can tell the fastest tree from plain decoding, got "
            f"{'; '.join(undecided)}. Nothing is stored. Try again on an idle machine or with more rounds (--repeats "
            f"{4 * args.repeats}), or store that each step picks a tree there (--undecided auto)"
        )
    tuning.save(file)
    print(json.dumps({"file": str(file)} | tuning.to_json()) if args.json else as_text(tuning, stored))
    if not args.json:
        print(f"stored in {file}")


def gain_of(case: Case) -> str:
    """Return the rate of the fastest tree over that of plain decoding, with its interval."""
    if case.gain is None:
        return f"{fastest(case.sizes[1:]).rate / case.sizes[0].rate:.2f} (unknown) times the rate"
    return "{:.2f} ({:.2f} to {:.2f}) times the rate".format(*case.gain)


def warn_of_few(calibration: Calibration | None) -> None:
    """Warn if there are too few texts to search trees on."""
    if calibration is None:
        return
    count = sum(len(text) > 0 for texts in calibration.texts for text in texts)
    if count < FEW_TEXTS:
        print(
            f"medusa: the calibration has {count} texts; a tree searched on so few may do worse on others "
            f"(use {FEW_TEXTS} or more)",
            file=sys.stderr,
        )


def check(args: argparse.Namespace, folder: Path, model: MedusaModel, file: Path, tuning: Tuning) -> None:
    """Print that a stored choice holds, and what has changed since then without making it invalid."""
    now = versions(*LIBRARIES)
    notes = [
        f"{name} was {tuning.versions.get(name, 'missing')}, is {now.get(name, 'missing')}"
        for name in sorted({*tuning.versions, *now})
        if tuning.versions.get(name) != now.get(name)
    ]
    notes += changes(tuning, args.calibration, folder, model)
    if args.json:
        print(json.dumps({"file": str(file), "holds": True, "notes": notes}))
        return
    conditions = tuning.conditions
    print(f"{file} holds: {conditions.device}, {conditions.dtype}, {conditions.backend}")
    if tuning.accuracies.calibration is not None:
        print(f"  weighed by {tuning.accuracies.calibration}")
    for note in notes:
        print(f"  since then: {note}; run medusa tune again to take it into account")


def changes(tuning: Tuning, file: Path | None, folder: Path, model: MedusaModel) -> list[str]:
    """Describe what has changed in the tuning's calibration, or in comparison with the calibration `file`."""
    assert model.heads is not None
    before = tuning.accuracies
    if file is None and before.calibration is not None:
        file = folder / before.calibration.path  # an absolute path stays what it is
    try:
        now, _ = load_knowledge(file, folder, model.heads, tuning.conditions.base_model)
    except (ValueError, OSError) as error:
        return [f"calibration: {error}"]
    both = before.calibration, now.calibration
    was, found = ("none" if one is None else f"{one.path} ({one.hash})" for one in both)
    notes = [] if was == found else [f"calibration was {was}, is {found}"]
    if now.by_rank != before.by_rank:
        notes.append(f"accuracies were {before.source}, are {now.source} with other values")
    return notes


def as_text(tuning: Tuning, stored: Mapping[str, Tree]) -> str:
    """Return the measurements and choices as tables for a terminal; `stored` are the trees stored with the heads."""
    conditions, source = tuning.conditions, tuning.accuracies.calibration
    lines = [
        f"{conditions.device}; {conditions.dtype}, {conditions.backend} steps; {conditions.model}",
        f"accuracies of the heads: {tuning.accuracies}",
    ]
    if source is not None:
        lines.append(f"calibration: {source}")
        if not source.checked:
            lines.append(
                f"  not checked to be of these heads and this base model: it has no fingerprints in {conditions.dtype}"
            )
    if tuning.weighed == WALKED:
        lines += [
            "expected tokens per step: along the texts that the trees were searched on. They are a little too high,",
            "  mostly for large trees and few texts",
        ]
    else:
        lines.append("expected tokens per step: as if heads were right independently")
    for case in tuning.cases:
        lines += [
            f"batch {case.batch}, prefix {case.prefix}:",
            "   nodes ms per step       quartiles  steps  of plain tokens per step  tokens per second and row",
        ]
        for size in case.sizes:
            mark = "*" if size is case.chosen else " "
            name = "".join(f"  {file}" for file, tree in stored.items() if tree == size.tree)
            lines.append(
                f" {mark}{size.nodes:6}{1e3 * size.seconds:12.3f}{1e3 * size.low:9.3f}..{1e3 * size.high:<7.3f}"
                f"{size.steps:5}{size.seconds / case.sizes[0].seconds:10.2f}{size.tokens:16.2f}{size.rate:27.1f}{name}"
            )
        if len(case.sizes) == 1:
            lines.append("  chosen: plain decoding, because no tree was timed")
        elif case.chosen is None:
            lines.append(f"  undecided: the fastest tree has {gain_of(case)} of plain decoding")
        elif case.chosen.nodes == 1:
            lines.append(f"  chosen: plain decoding; the fastest tree has {gain_of(case)}")
        else:
            lines.append(f"  chosen: the tree of {case.chosen.nodes} nodes, {gain_of(case)} of plain decoding")
    return "\n".join([*lines, f"in brackets: {ROUNDS}"])
