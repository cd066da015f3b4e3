"""Write heads in the format of another program.

For vLLM, the original project, text-generation-inference, the Hugging Face hub, or as one full model.

    medusa export --model runs/vicuna-7b/heads --out for-vllm --format vllm
    medusa export --model HEADS --out small --format native --storage int8
    medusa export --model HEADS --out model --format embedded --dtype bfloat16
    medusa export --model HEADS --out v1 --format original-v1 --file safetensors
    medusa export --model MODEL.gguf --out folder --format plain --dtype bfloat16
    medusa export --model HEADS --out repository --format hub --license apache-2.0 --push OWNER/NAME

The exported heads draft the same tokens. The model card, its figures and the tree are copied too (not the calibration,
if the storage changes). Heads that a format cannot represent are refused with a line that says what to do.

For vLLM 0.28 to 0.32, the command that serves the result is printed. Later versions have no Medusa of their own: the
plugin in integrations/vllm reads heads without an export, unless they have feature layers. vLLM also loads native and
original folders, but silently ignores the biases of the heads, so that few or none of their draft tokens are accepted.

`--push` prints what it would upload to the hub, and uploads only with `--yes`: the folder `--out` as it is if it is
there, unless `--overwrite` writes it again. The formats:

"""

from __future__ import annotations

import argparse
from pathlib import Path

from medusa_decoding.cli._arguments import add_option
from medusa_decoding.options import DTYPES, TARGETS

_FORMATS = TARGETS | {"plain": "the model alone that --model names, such as a GGUF file, as an ordinary folder"}
__doc__ = (__doc__ or "") + "".join(f"    {name:<13}{words}\n" for name, words in _FORMATS.items())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--model", required=True, metavar="HEADS", help="folder or hub id of the heads (or model)")
    add_option(parser, "--revision REV", str, "branch, tag or commit of the heads (or model) on the hub")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="where to write")
    parser.add_argument("--format", required=True, choices=_FORMATS, help="see above")
    parser.add_argument(
        "--storage",
        choices=("float", "int8", "fp8"),
        help="storage of the projections: 8 bits with one scale per row, or floats (default: unchanged)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="dtype of all head weights that are not in 8 bits, or of a plain model (default: the checkpoint's); the "
        "embedded format converts only the heads and copies the base model's files unchanged",
    )
    add_option(
        parser,
        "--base-model BASE",
        str,
        "folder or hub id of the base model (default: the one the heads name); its weights are read if the format "
        "needs them",
    )
    add_option(parser, "--base-revision REV", str, "branch, tag or commit of the base model (default: the heads')")
    parser.add_argument(
        "--file",
        choices=("pt", "safetensors"),
        default="pt",
        help="file type of the original formats: pt, which the project's own code reads (default), or safetensors, "
        "which text-generation-inference reads (with the base model's tokenizer, if that is a folder)",
    )
    add_option(parser, "--license ID", str, "license of the heads for the model card of the hub format, as apache-2.0")
    add_option(parser, "--push OWNER/NAME", str, "with the hub format: show what would be uploaded to this repository")
    parser.add_argument("--private", action="store_true", help="with --push: create a private repository")
    parser.add_argument("--yes", action="store_true", help="with --push: upload, in one commit")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing folder that contains only heads")
    parser.add_argument("--json", action="store_true", help="print what was written as one JSON object")
