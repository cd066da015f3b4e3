"""Train heads from a YAML file; --init writes a first one.

    medusa train --init MODEL mine.jsonl --out heads.yaml
    medusa distill --config heads.yaml
    medusa train --init MODEL mine.jsonl --recipe given-answers --out heads.yaml
    medusa train --config heads.yaml --check
    medusa train --config heads.yaml --check --on "8 x A100-80GB"
    medusa train --config heads.yaml
    medusa train --config heads.yaml --set optimisation.epochs=1 --set output.folder=trial
    medusa train --config heads.yaml --resume
    accelerate launch --multi_gpu --num_processes 8 -m medusa_decoding train --config heads.yaml

With method medusa-2 the model is trained too. --settings lists all settings; the repository has recipes.

--init looks at the model's config, the data and this machine, writes a first config that fits them, and says why.
Heads predict best what the model writes itself, so the config is for `medusa distill`: the model answers the data's
questions, then the heads learn its answers. --recipe given-answers learns the data's own answers; --recipe paper does
so with the settings of the paper's appendix B.
--check says what a config would run: data, steps, memory, time, and which programs can read the heads.
--curve says how many more answers would help: it also trains on parts of the records (nearly twice the time), and
prints the held-out accuracies of each size, and those that it predicts for twice and ten times the records.

With --resume a stopped run continues from its last checkpoint. At the end the output folder holds `heads` with a model
card, for `medusa generate --model FOLDER/heads`, and the trained model or its adapter if there is one.
"""

from __future__ import annotations

import argparse

from medusa_decoding.cli import _arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "--init",
        nargs=2,
        type=_arguments.model,
        metavar=("MODEL", "DATA"),
        help="write a first config for a model (folder, hub id, GGUF file) and data (file, folder, hub name), and stop",
    )
    words = "with --init: where to write the config (default: MODEL.yaml, by the model's name)"
    parser.add_argument("--out", type=_arguments.path, metavar="FILE", help=words)
    words = "with --init: cpu, cuda, or auto: cuda if there is a GPU that torch can use, else cpu (default)"
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), help=words)
    words = (
        "with --init: learn the model's own-answers (default), the data's given-answers, or those with the paper's "
        "settings (paper)"
    )
    parser.add_argument("--recipe", choices=("own-answers", "given-answers", "paper"), help=words)
    add_config(parser)
    parser.add_argument("--resume", action="store_true", help="continue from the last checkpoint in the output folder")
    one = parser.add_mutually_exclusive_group()
    words = "train on an eighth, a quarter, a half and all of the records, and predict what more records would give"
    one.add_argument("--curve", action="store_true", help=words)
    one.add_argument(
        "--check", action="store_true", help="read settings and data, print what would run and what it takes, and stop"
    )
    words = "with --check: predict memory and time for GPUs that are not here, by name, for example '8 x A100-80GB'"
    parser.add_argument("--on", type=_arguments.text, metavar="GPUS", help=words)
    parser.add_argument("--settings", action="store_true", help="print every setting with its default, and stop")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and no progress")


def add_config(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that name a configuration."""
    parser.add_argument("--config", metavar="FILE", help="settings, in YAML")
    parser.add_argument(
        "--set",
        type=_arguments.text,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a setting of the file; VALUE is YAML, for example optimisation.epochs=1; may be repeated",
    )
