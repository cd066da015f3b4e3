"""Have a model write its own training data, then train heads on it.

The model answers seed prompts (self-distillation, Medusa paper, section 2.3.2).

    medusa distill --config heads.yaml
    medusa distill --config heads.yaml --only-data --limit 100
    medusa distill --config heads.yaml --resume

The configuration is that of `medusa train` (`medusa train --init MODEL DATA` writes a first one). Its data are the
seeds: prompts, conversations whose answers are dropped, or texts to continue (docs/data.md). The model answers up to
generation.turns questions of each, sampling as its own generation config says unless the section `generation` says
otherwise. It must be the model as it is deployed: a copy quantised for training is refused, unless
generation.quantized is true. If generation.heads or heads.initial names heads, the model generates with them: the
same text, faster with small batches. Records are in OUTPUT/generated. --resume continues a stopped run, during
generation or training. Method self-distillation trains the model's adapter towards the model itself; medusa-1 trains
only the heads.
"""

from __future__ import annotations

import argparse

from medusa_decoding.cli._arguments import at_least_one
from medusa_decoding.cli.parsers.train import add_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_config(parser)
    parser.add_argument("--resume", action="store_true", help="continue a stopped run of the same settings")
    parser.add_argument("--only-data", action="store_true", help="generate the records and do not train")
    parser.add_argument("--limit", type=at_least_one, metavar="N", help="use the first N seeds (overrides data.limit)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and no progress")
