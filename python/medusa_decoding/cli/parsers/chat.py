"""Chat with a model; the conversation stays in the KV cache.

Each line is a message; a backslash at its end continues it on the next line. Lines that begin with a slash are
commands, /help lists them. Ctrl-C stops an answer and keeps it as far as it got; Ctrl-D leaves. Messages may also come
from a pipe: standard output then has the answers (with --json, one JSON line each) and the output of commands, and the
exit code is 2 if a line failed.

At a terminal, colours show which draft tokens each step accepted, and a line after each answer has its figures; text is
plain with NO_COLOR or TERM=dumb.

An answer ends with an EOS token of the model's generation config, or with the special token that the chat template
puts directly after an answer.

    medusa chat --model HEADS --dtype bfloat16 --device cuda
    medusa chat --model HEADS --system "Answer briefly." --temperature 0.7 --save talk.json
    echo "What is a tree?" | medusa chat --model HEADS --json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from medusa_decoding.cli import _arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    _arguments.add_model(parser)
    _arguments.add_option(parser, "--system TEXT", _arguments.text, "system message; replaces a loaded one")
    _arguments.add_option(parser, "--load FILE", Path, "start with the history in a JSON file")
    _arguments.add_option(parser, "--save FILE", Path, "write the history to a JSON file after each answer")
    _arguments.add_template(parser)
    _arguments.add_dtypes(parser)
    _arguments.add_decoding(parser, new_tokens=512)
    _arguments.add_sampling(parser)
