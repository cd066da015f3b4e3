"""Look into data: what records there are, and whether a training run takes them.

    medusa data check sharegpt.jsonl
    medusa data check records.jsonl --model lmsys/vicuna-7b-v1.5 --template vicuna --length 2048
    medusa data check prompts.jsonl --seeds

`check` reads files as `medusa train` does, or with --seeds as `medusa distill` does. It counts records by kind,
answers, repeated prompts and keys that are not read, and says where bad records are and why. With --model it also
counts tokens, and compares records that have token ids with the tokenizer and with their text; of the model it reads
only the config and the tokenizer. Exit code 0 if a run would take the data, 1 with the run's own reason if not.
"""

from __future__ import annotations

import argparse

from medusa_decoding.cli import _arguments
from medusa_decoding.cli._arguments import add_option


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    form, words = argparse.RawDescriptionHelpFormatter, "count what is in data, and say whether a run takes them"
    check = actions.add_parser("check", help=words, description=__doc__, formatter_class=form)
    check.add_argument(
        "files", type=_arguments.text, nargs="+", metavar="FILE", help="file, folder or hub name of data"
    )
    add_option(check, "--model NAME", _arguments.text, "folder or hub id of the model whose tokenizer counts tokens")
    add_option(
        check, "--template NAME", _arguments.text, "auto, vicuna, plain or a Jinja file, as data.template", "auto"
    )
    add_option(check, "--length N", _arguments.at_least_one, "tokens per row, as data.length", 4096)
    check.add_argument("--seeds", action="store_true", help="read prompts for `medusa distill`, which need no answers")
    check.add_argument("--json", action="store_true", help="print the result as JSON")
