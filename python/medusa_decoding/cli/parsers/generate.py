"""Continue a prompt with a model and its Medusa heads.

The prompt comes from --prompt, --file or standard input, heads and base model from --model and --base-model (default:
the embedded demo checkpoint). The text is the base model's own greedy text, unless --temperature asks for sampling.
At a terminal, colours show which draft tokens each step accepted; text is plain with NO_COLOR or TERM=dumb.

    medusa generate --chat --prompt "Write a command line parser with path and --verbose."
    medusa generate --file prompt.txt --temperature 0.8 --top-p 0.95 --seed 7 --tree chain:4+lookup:8 --metrics
    medusa generate --model FasterDecoding/medusa-vicuna-7b-v1.3 --dtype float16 --device cuda --file prompt.txt
    torchrun --nproc-per-node 2 -m medusa_decoding generate --tensor-parallel --chat --prompt "What is a tree?"
"""

from __future__ import annotations

import argparse
from pathlib import Path

from medusa_decoding.cli import _arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", type=_arguments.text, help="the prompt itself")
    source.add_argument("--file", type=Path, help="a UTF-8 file with the prompt; - for standard input")
    _arguments.add_model(parser)
    parser.add_argument(
        "--tensor-parallel",
        action="store_true",
        help="shard the base model over the processes that torchrun started (with --device cuda: one GPU each); every "
        "process keeps whole heads, the first one prints",
    )
    parser.add_argument("--chat", action="store_true", help="the prompt is a user message: apply the chat template")
    _arguments.add_template(parser)
    _arguments.add_decoding(parser, new_tokens=256)
    _arguments.add_sampling(parser)
    parser.add_argument("--metrics", action="store_true", help="also print acceptance and times of the steps")
