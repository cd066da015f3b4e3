"""Predict what trees cost and gain on a device.

The prediction is a roofline of the step; it also says where speculation stops paying.

    medusa simulate --model vicuna-7b --device a100-80 --batch 1,4,16 --sequence 1024 --nodes 16,64
    medusa simulate --model FOLDER --device cpu --accuracies heads.json --heads 4 --json

A roofline counts operations and bytes only. Real steps are slower, most of all those with trees; docs/simulation.md
compares them with measurements.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from medusa_decoding.cli._arguments import add_option, at_least_one, counts, factor
from medusa_decoding.roofline.devices import DEVICES
from medusa_decoding.roofline.shapes import SHAPES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    words = f"{', '.join(SHAPES)}, or a folder or hub id with a transformers config"
    add_option(parser, "--model MODEL", str, words, "vicuna-7b")
    words = f"{', '.join(DEVICES)}; cpu or cuda: measured now, in seconds; or a JSON file"
    add_option(parser, "--device DEVICE", str, words, "a100-80")
    add_option(parser, "--save-device FILE", Path, "write the device as JSON, to be edited")
    add_option(parser, "--batch B,B", counts, "batch sizes", [1, 4, 16])
    add_option(parser, "--sequence S,S", counts, "cached rows", [1024])
    add_option(parser, "--nodes N,N", counts, "root included", [1, 16, 32, 64])
    add_option(
        parser,
        "--accuracies FILE",
        Path,
        "JSON: for each head a list of how often each rank is right, or counts (hits, total); each size has its best "
        "tree then (default: the paper's model, 1 + 0.477 ln n)",
    )
    add_option(parser, "--heads K", at_least_one, "default: 4, or those in the accuracies")
    add_option(parser, "--head-vocabulary V", at_least_one, "rows of a trimmed projection")
    parser.add_argument("--shared", action="store_true", help="heads project with the model's lm_head")
    add_option(parser, "--weight-bytes X", factor, "bytes per weight, as 0.5 for 4 bits")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_option(parser, "--plot FOLDER", Path, "draw the speedups there (needs matplotlib)")
