"""Continue a prompt with a model and its Medusa heads.

The prompt comes from --prompt, --file or standard input, heads and base model from --model and --base-model (default:
the embedded demo checkpoint). The text is the base model's own greedy text, unless --temperature asks for sampling.
At a terminal, colours show which draft tokens each step accepted; text is plain with NO_COLOR or TERM=dumb.

--prompts answers many prompts at once, and writes a line of JSON to --out as soon as an answer ends. Each answer is the
one that its prompt gets alone; when sampling, prompt I (from 0) has the seed --seed + I. A stopped run continues with
--resume.

    medusa generate --chat --prompt "Write a command line parser with path and --verbose."
    medusa generate --file prompt.txt --temperature 0.8 --top-p 0.95 --seed 7 --tree chain:4+lookup:8 --metrics
    medusa generate --chat --prompts questions.jsonl --out answers.jsonl --slots 16
    medusa generate --model FasterDecoding/medusa-vicuna-7b-v1.3 --dtype float16 --device cuda --file prompt.txt
    torchrun --nproc-per-node 2 -m medusa_decoding generate --tensor-parallel --chat --prompt "What is a tree?"
"""

from __future__ import annotations

import argparse
from pathlib import Path

from medusa_decoding.cli import _arguments
from medusa_decoding.options import SLOTS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", type=_arguments.text, help="the prompt itself")
    source.add_argument("--file", type=Path, help="a UTF-8 file with the prompt; - for standard input")
    words = "files, folders or hub names with many prompts (docs/data.md): texts, or the first message of a user"
    source.add_argument("--prompts", nargs="+", metavar="FILE", help=words)
    _arguments.add_option(parser, "--out FILE", _arguments.path, "with --prompts: the JSON lines to write")
    words = f"with --prompts: how many of them run at once (default: {SLOTS})"
    _arguments.add_option(parser, "--slots N", _arguments.at_least_one, words)
    parser.add_argument("--resume", action="store_true", help="with --prompts: continue a run that was stopped")
    _arguments.add_model(parser)
    parser.add_argument(
        "--tensor-parallel",
        action="store_true",
        help="shard the base model over the processes that torchrun started (with --device cuda: one GPU each); every "
        "process keeps whole heads, the first one prints",
    )
    parser.add_argument("--chat", action="store_true", help="the prompt is a user message: apply the chat template")
    _arguments.add_template(parser)
    _arguments.add_dtypes(parser)
    _arguments.add_decoding(parser, new_tokens=256)
    _arguments.add_sampling(parser)
    parser.add_argument("--metrics", action="store_true", help="also print acceptance and times of the steps")
