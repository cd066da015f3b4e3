"""Calibrate heads on your own prompts: how often each rank, and each whole path of ranks, is right.

The base model answers the prompts without its heads, greedily or sampled with --temperature, and the heads are measured
on its answers. Prompts are read as by `medusa eval`. The result is a JSON file for `medusa tree search`, `medusa tree
show`, `medusa tune` and `medusa simulate --accuracies`. --resume continues a stopped run after its last prompt.

    medusa calibrate --model HEADS --prompts mine.jsonl --dtype bfloat16 --device cuda
    medusa calibrate --model HEADS --prompts mt_bench.jsonl --limit 5 --out calibration.json --resume
    medusa calibrate --model HEADS --prompts mine.jsonl --temperature 0.7 --seed 1
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from medusa_decoding.calibration.collect import calibrate, check_fresh, progress_file
from medusa_decoding.calibration.expected import expect
from medusa_decoding.checkpoints import tuning_paths
from medusa_decoding.checkpoints.accuracies import CALIBRATION
from medusa_decoding.cli import _arguments
from medusa_decoding.cli.tree import DRAWN, NODES
from medusa_decoding.evaluation import read_prompts
from medusa_decoding.evaluation.report import in_columns
from medusa_decoding.files import only_writer
from medusa_decoding.trees.calibration import Calibration, wilson
from medusa_decoding.trees.search import most_nodes, walked_tree
from medusa_decoding.trees.tree import Tree

NEW_TOKENS = 256
RANKS = (1, 2, 3, 5, 10)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    _arguments.add_model(parser)
    # The base model writes the texts alone.
    parser.set_defaults(tree=Tree([]))
    _arguments.add_template(parser)
    _arguments.add_prompts(parser)
    _arguments.add_option(parser, "--max-new-tokens N", _arguments.at_least_one, "per text", NEW_TOKENS)
    parser.add_argument(
        "--temperature",
        type=_arguments.temperature,
        default=0.0,
        metavar="T",
        help="above 0: sample the texts, for heads that are to serve sampling (default: 0, greedy); top-k, top-p, "
        "repetition penalty and so on are those of the base model's own generation config",
    )
    words = "of sampling: the same seed, the same texts"
    _arguments.add_option(parser, "--seed N", _arguments.at_least_zero, words)
    _arguments.add_backend(parser)
    words = f"default: {CALIBRATION} in the folder of the heads"
    _arguments.add_option(parser, "--out FILE", tuning_paths.expand_user, words)
    parser.add_argument("--resume", action="store_true", help="continue a stopped run")
    parser.add_argument("--json", action="store_true", help="print the file's content instead of tables")


def run(args: argparse.Namespace) -> int:
    """Read prompts, load the model, calibrate and print."""
    _arguments.check_device(args)
    if args.seed is not None and not args.temperature:
        raise ValueError("--seed: expected --temperature above 0 with it, got none")
    out = output_file(args)
    with only_writer("--out", out):
        check_fresh(out, args.resume)
        prompts = read_prompts(args.prompts, limit=args.limit, turns=args.turns)
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
    folder = None if args.model is None else tuning_paths.expand_user(args.model)
    if folder is None or not tuning_paths.is_writable(folder):
        named = "the embedded demo checkpoint" if args.model is None else args.model
        raise ValueError(f"--out: expected a file, because {named} is no folder of yours to write into, got none")
    return folder / CALIBRATION


def as_text(calibration: Calibration) -> str:
    """Return the counts as tables for a terminal: percent of positions per rank, and what the best trees give."""
    ranks = [n for n in RANKS if n <= calibration.ranks]
    rows = [["", *(f"top-{n}" for n in ranks)]]
    for head, hits in enumerate(calibration.hits, start=1):
        cells = []
        for n in ranks:
            low, high = wilson(hits[n - 1], calibration.positions)
            share = hits[n - 1] / calibration.positions
            cells.append(f"{100 * share:.1f} ({100 * low:.1f} to {100 * high:.1f})")
        rows.append([f"head {head}", *cells])
    made = calibration.made
    temperature = made["settings"]["temperature"]
    how = f"drawn at temperature {temperature}" if temperature else "greedy"
    trees = [["nodes", "walked tokens per step", "if heads were independent", "by paths at random positions"]]
    largest = most_nodes(calibration.num_heads, calibration.ranks)
    for size in [size for size in NODES if size <= largest]:
        independent, paths, walked = expect(calibration, walked_tree(calibration, size)).cells()
        trees.append([str(size), walked, independent, paths])
    return (
        f"{in_columns(rows)}\n\nPercent of {calibration.positions} positions in {made['texts']} texts "
        f"({made['tokens']} tokens, {how}); 95 % intervals, as if positions were independent\n\n"
        f"{in_columns(trees)}\n\nThe best trees when walked as steps do. {DRAWN}"
    )
