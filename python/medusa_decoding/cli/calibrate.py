"""Calibrate heads on your own prompts: how often each guess is right, alone, along whole paths, and step by step.

The base model answers the prompts without its heads, greedily or with --temperature by drawing, and the heads are
measured on what it wrote. Prompts are read as `medusa eval` reads them. The result is a JSON file for `medusa tree
search`, `medusa tree show`, `medusa tune` and `medusa simulate --accuracies`; a run that was stopped goes on with
--resume, prompt by prompt.

    medusa calibrate --model HEADS --prompts mine.jsonl --dtype bfloat16 --device cuda
    medusa calibrate --model HEADS --prompts mt_bench.jsonl --limit 5 --out calibration.json --resume
    medusa calibrate --model HEADS --prompts mine.jsonl --temperature 0.7 --seed 1
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from medusa_decoding.calibration.expected import expect
from medusa_decoding.checkpoints import tuning_paths
from medusa_decoding.checkpoints.accuracies import CALIBRATION
from medusa_decoding.cli import _arguments, _prompts
from medusa_decoding.cli.tree import DRAWN, NODES, in_columns, three
from medusa_decoding.decode.runtime.steps import BACKENDS
from medusa_decoding.evaluation import read_prompts
from medusa_decoding.files import only_writer
from medusa_decoding.trees.calibration import Calibration, wilson
from medusa_decoding.trees.search import most_nodes, walked_tree
from medusa_decoding.trees.tree import Tree

NEW_TOKENS = 256
SHOWN = (1, 2, 3, 5, 10)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    _arguments.add_model(parser)
    # The base model alone writes the texts.
    parser.set_defaults(tree=Tree([]))
    _arguments.add_template(parser)
    parser.add_argument("--prompts", nargs="+", required=True, metavar="FILE", help="files, folders or hub names")
    _prompts.add_amounts(parser)
    parser.add_argument(
        "--max-new-tokens",
        type=_arguments.at_least_one,
        default=NEW_TOKENS,
        metavar="N",
        help=f"of each text (default: {NEW_TOKENS})",
    )
    parser.add_argument(
        "--temperature",
        type=_arguments.temperature,
        default=0.0,
        metavar="T",
        help="above 0: texts are drawn at it, for heads that are to serve sampling (default: 0, greedy); all else is "
        "as the base model's own generation config says (top-k, top-p, repetition penalty, ..)",
    )
    parser.add_argument(
        "--seed", type=_arguments.at_least_zero, metavar="N", help="of drawing: the same seed, the same texts"
    )
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="how steps run, as in medusa generate")
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"default: {CALIBRATION} in the folder of the heads")
    parser.add_argument("--resume", action="store_true", help="go on where a stopped run left off")
    parser.add_argument("--json", action="store_true", help="print the file's content instead of tables")


def run(args: argparse.Namespace) -> int:
    """Read, load, measure, print."""
    _arguments.check_device(args)
    if args.seed is not None and not args.temperature:
        raise ValueError("--seed: expected --temperature above 0 with it, got none")
    out = place(args)
    with only_writer("--out", out):
        return _run(args, out)


def _run(args: argparse.Namespace, out: Path) -> int:
    from medusa_decoding.calibration.collect import calibrate, check_fresh, progress_file

    check_fresh(out, args.resume)
    try:
        prompts = read_prompts(args.prompts, limit=args.limit, turns=args.turns)
    except ModuleNotFoundError as error:
        raise ValueError(str(error)) from error
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
            print(f"medusa: what was counted is in {progress_file(out)}; --resume goes on from there", file=sys.stderr)
        raise
    print(json.dumps(calibration.to_json()) if args.json else f"{as_text(calibration)}\n\nin {out}")
    return 0


def place(args: argparse.Namespace) -> Path:
    """Return where the result goes.

    Raises:
        ValueError: no such folder, or none that can be written to.
    """
    if args.out is not None:
        out = tuning_paths.expand_user(args.out)
        tuning_paths.check_writable("--out", out)
        return out
    folder = None if args.model is None else tuning_paths.expand_user(args.model)
    if folder is None or not tuning_paths.is_writable(folder):
        named = "the embedded demo checkpoint" if args.model is None else args.model
        raise ValueError(f"--out: expected a file, because {named} is no folder of yours to write into, got none")
    return folder / CALIBRATION


def as_text(calibration: Calibration) -> str:
    """Return the counts as a table for people: percent of positions, with 95 % intervals; and what trees give."""
    shown = [n for n in SHOWN if n <= calibration.ranks]
    rows = [["", *(f"top-{n}" for n in shown)]]
    for head, hits in enumerate(calibration.hits, start=1):
        cells = []
        for n in shown:
            low, high = wilson(hits[n - 1], calibration.positions)
            share = hits[n - 1] / calibration.positions
            cells.append(f"{100 * share:.1f} ({100 * low:.1f} to {100 * high:.1f})")
        rows.append([f"head {head}", *cells])
    made = calibration.made
    temperature = made["settings"]["temperature"]
    return "\n".join(
        [
            in_columns(rows),
            "",
            f"Percent of {calibration.positions} positions in {made['texts']} texts ({made['tokens']} tokens, "
            f"{f'drawn at temperature {temperature}' if temperature else 'greedy'}); 95 % intervals, positions taken "
            "as independent",
            "",
            as_trees(calibration),
        ]
    )


def as_trees(calibration: Calibration) -> str:
    """Return the tokens a step to expect of the best trees as a table."""
    most = most_nodes(calibration.num_heads, calibration.ranks)
    rows = [["nodes", "tokens a step, walked", "if heads were independent", "by paths at random positions"]]
    for size in [size for size in NODES if size <= most]:
        tree = walked_tree(calibration, size)
        independent, paths, walked = three(expect(calibration, tree))
        rows.append([str(size), walked, independent, paths])
    return f"{in_columns(rows)}\n\nThe best trees when walked as steps do. {DRAWN}"
