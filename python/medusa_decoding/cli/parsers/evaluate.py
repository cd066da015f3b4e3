"""Measure speed and acceptance on prompts.

Figures are tokens per step, speedups, equal texts, and how often heads are right. Prompts are JSON lines such as
{"prompt": ..}, conversations, MT-Bench questions (each turn follows the model's own answer), HumanEval, GSM8K and plain
texts; docs/data.md shows a line of each. Figures are by category. Medusa, this package's plain loop and transformers'
generate write each text in turn within one process. A chat template is put around questions if the tokenizer has one
(or --template is given); a model without one continues them as plain text.

    medusa eval --model HEADS --prompts mt_bench.jsonl --dtype bfloat16 --device cuda
    medusa eval --model HEADS --prompts mt_bench.jsonl --categories coding math --limit 5 --json --out figures.json
    medusa eval --prompts requests.jsonl --limit 10 --max-new-tokens 64 --tree chain:3 --no-transformers
"""

from __future__ import annotations

import argparse

from medusa_decoding.cli import _arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    _arguments.add_prompts(parser)
    parser.add_argument("--categories", nargs="+", metavar="NAME", help="only these (default: all)")
    _arguments.add_model(parser)
    _arguments.add_template(parser)
    _arguments.add_dtypes(parser)
    _arguments.add_decoding(parser, new_tokens=256)
    _arguments.add_sampling(parser)
    words = "times that each text is written and timed by each way"
    _arguments.add_option(parser, "--rounds R", _arguments.at_least_one, words, 1)
    parser.add_argument("--no-transformers", action="store_true", help="leave transformers' generate out")
    _arguments.add_option(parser, "--out FILE.json", _arguments.path, "write the figures as JSON into a file as well")
