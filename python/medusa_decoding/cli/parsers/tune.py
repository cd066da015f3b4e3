"""Time trees on this device, and store the fastest for these heads.

Steps of the decode loop are timed for each tree size, batch size and prefix length, on the backend in use (captured on
a GPU). For each size the best tree is taken: searched along the texts of `medusa calibrate` if the checkpoint has them,
else by the heads' accuracies (the trainer's, or published ones of other heads). A tree looks a little better on the
texts it was searched on than on others, mostly a large tree on few texts. The checkpoint's medusa_tree.json and
medusa_tree_sampling.json are timed too, if it has them.

The choice is stored in tuning.json next to the heads, or in the user's cache folder (XDG_CACHE_HOME) if the heads are
part of the package or read-only. It is used only on the same device, with the same model, heads, dtypes and backend;
otherwise a warning says what has changed, and each step picks a tree (--tree auto). If the times are so noisy that they
cannot tell the fastest tree from plain decoding, nothing is stored.

    medusa tune --model HEADS --dtype bfloat16 --device cuda --batch 1,4 --prefix 128,1024
    medusa tune --model HEADS --check
"""

from __future__ import annotations

import argparse

from medusa_decoding.cli import _arguments
from medusa_decoding.cli._arguments import add_option, at_least_one
from medusa_decoding.trees.tree import Tree


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    _arguments.add_model(parser)
    add_option(parser, "--batch B,B", _arguments.counts, "batch sizes", [1])
    words = "tokens of each row before the step (default: 128,1024, or those that fit the model's context)"
    add_option(parser, "--prefix T,T", _arguments.counts, words)
    add_option(
        parser,
        "--nodes N,N",
        _arguments.counts,
        "tree sizes, root included; 1 (plain decoding) is always added (default: 1,2,4,8,16,32,64, or those that the "
        "heads can fill, and 5,6,9 where a library's quantised modules run)",
    )
    add_option(parser, "--repeats N", at_least_one, "rounds over all sizes, three timed steps each", 7)
    words = (
        "what to do if the times cannot tell the fastest tree from plain decoding: refuse to store (default), or store "
        "auto, which picks a tree for each step"
    )
    parser.add_argument("--undecided", choices=("refuse", "auto"), default="refuse", help=words)
    words = "how steps run, as in medusa generate; the choice holds for this backend only (default: auto)"
    _arguments.add_backend(parser, words)
    _arguments.add_dtypes(parser)
    add_option(
        parser, "--calibration FILE", _arguments.path, "of medusa calibrate (default: calibration.json of the heads)"
    )
    add_option(
        parser,
        "--out FILE",
        _arguments.path,
        "file to write, or to read with --check, instead of the heads' tuning.json; loading a model does not look "
        "there",
    )
    words = "only check whether the stored choice holds; exit 2 if not"
    parser.add_argument("--check", action="store_true", help=words)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    # What is stored already must not be loaded with the model.
    parser.set_defaults(tree=Tree([]))
