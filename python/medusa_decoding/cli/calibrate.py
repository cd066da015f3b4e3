"""Run `medusa calibrate`: see `cli.parsers.calibrate` for its arguments."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from medusa_decoding.checkpoints import tuning_paths
from medusa_decoding.checkpoints.accuracies import CALIBRATION
from medusa_decoding.cli import _arguments
from medusa_decoding.cli.parsers.tree import NODES
from medusa_decoding.cli.tree import DRAWN
from medusa_decoding.evaluation import read_prompts
from medusa_decoding.evaluation.report import in_columns
from medusa_decoding.files import only_writer
from medusa_decoding.trees.tree import most_nodes
from medusa_decoding.tuning.calibration import Calibration
from medusa_decoding.tuning.collect import calibrate, check_fresh, progress_file
from medusa_decoding.tuning.expected import expect
from medusa_decoding.tuning.search import walked_tree

RANKS = (1, 2, 3, 5, 10)


def run(args: argparse.Namespace) -> int:
    """Read prompts, load the model, calibrate and print."""
    _arguments.resolve_device(args)
    if args.seed is not None and not args.temperature:
        raise ValueError("--seed needs --temperature above 0")
    out = output_file(args)
    _arguments.heads_folder(args)
    with only_writer("--out", out):
        check_fresh(out, args.resume)
        prompts = read_prompts(args.prompts, limit=args.limit, turns=args.turns, distinct=True)
        tokenizer = _arguments.load_tokenizer(args)
        try:
            with _arguments.load_model(args) as model:
                calibration = calibrate(
                    model,
                    tokenizer,
                    prompts,
                    max_new_tokens=args.max_new_tokens,
                    prompt_tokens=args.prompt_tokens,
                    template=args.template,
                    temperature=args.temperature,
                    seed=args.seed or 0,
                    slots=args.slots,
                    out=out,
                    resume=args.resume,
                    progress=True,
                )
        except KeyboardInterrupt:
            if progress_file(out).exists():
                print(f"medusa: progress is in {progress_file(out)}; continue with --resume", file=sys.stderr)
            raise
    print(json.dumps(calibration.to_json()) if args.json else f"{as_text(calibration)}\n\nin {out}")
    return 0


def output_file(args: argparse.Namespace) -> Path:
    """Return the file for the result; raise `ValueError` if its folder is missing or read-only."""
    if args.out is not None:
        tuning_paths.check_writable("--out", args.out)
        return args.out
    folder = None if args.model is None else _arguments.path(args.model)
    if folder is None or not tuning_paths.is_writable(folder):
        named = "the embedded demo checkpoint" if args.model is None else args.model
        raise ValueError(f"--out is needed, because {named} is no folder of yours to write into")
    return folder / CALIBRATION


def as_text(calibration: Calibration) -> str:
    """Return the counts as tables for a terminal: percent of positions per rank, and what the best trees give."""
    ranks = [n for n in RANKS if n <= calibration.ranks]
    rows = [["", *(f"top-{n}" for n in ranks)]]
    for head, hits in enumerate(calibration.hits, start=1):
        rows.append([f"head {head}", *(f"{100 * hits[n - 1] / calibration.positions:.1f}" for n in ranks)])
    made = calibration.made
    temperature = made["settings"]["temperature"]
    how = f"drawn at temperature {temperature}" if temperature else "greedy"
    trees = [["nodes", "walked tokens per step", "if heads were independent", "by paths at random positions"]]
    largest = most_nodes([calibration.ranks] * calibration.num_heads)
    for size in [size for size in NODES if size <= largest]:
        independent, paths, walked = expect(calibration, walked_tree(calibration, size)).cells()
        trees.append([str(size), walked, independent, paths])
    return (
        f"{in_columns(rows)}\n\nPercent of {calibration.positions} positions in {made['texts']} texts "
        f"({made['tokens']} tokens, {how})\n\n"
        f"{in_columns(trees)}\n\nThe best trees when walked as steps do. {DRAWN}"
    )
