"""Measure how often heads are right on your own prompts.

Counted are each rank of each head, and each whole path of ranks. The base model answers the prompts without its heads,
greedily or sampled with --temperature, and the heads are measured on its answers. Prompts are read as by `medusa eval`.
The result is a JSON file for `medusa tree search`, `medusa tree show` and `medusa tune`. --resume continues a stopped
run after its last prompt.

    medusa calibrate --model HEADS --prompts mine.jsonl --dtype bfloat16 --device cuda
    medusa calibrate --model HEADS --prompts mt_bench.jsonl --limit 5 --out calibration.json --resume
    medusa calibrate --model HEADS --prompts mine.jsonl --temperature 0.7 --seed 1
"""

from __future__ import annotations

import argparse

from medusa_decoding.cli import _arguments
from medusa_decoding.options import SLOTS
from medusa_decoding.trees.tree import Tree


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    _arguments.add_model(parser)
    # The base model writes the texts alone.
    parser.set_defaults(tree=Tree([]))
    _arguments.add_template(parser)
    _arguments.add_prompts(parser)
    _arguments.add_option(parser, "--max-new-tokens N", _arguments.at_least_one, "per text", 256)
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
    _arguments.add_option(parser, "--slots N", _arguments.at_least_one, "texts that are written at once", SLOTS)
    words = "default: calibration.json in the folder of the heads"
    _arguments.add_option(parser, "--out FILE", _arguments.path, words)
    parser.add_argument("--resume", action="store_true", help="continue a stopped run")
    parser.add_argument("--json", action="store_true", help="print the file's content instead of tables")
