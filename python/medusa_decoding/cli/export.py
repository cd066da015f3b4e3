"""Write heads in another format: for vLLM, the original project, text-generation-inference, or as one full model.

    medusa export --model runs/vicuna-7b/heads --out for-vllm --format vllm
    medusa export --model HEADS --out small --format native --storage int8
    medusa export --model HEADS --out model --format embedded --dtype bfloat16
    medusa export --model HEADS --out v1 --format original-v1 --file safetensors

What is written drafts what the heads guess; their model card, its figures and their tree go along (not the counts of
heads whose storage changes). Heads that a format cannot hold are refused, in a line that says what can be done.

For vLLM the command that serves the result is printed. vLLM also takes native and original folders, but passes over the
heads' biases without a word and accepts fewer of their drafts, or none. The formats:

"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from medusa_decoding.checkpoints import TARGETS, export
from medusa_decoding.checkpoints.vllm import VERSIONS
from medusa_decoding.cli import _arguments

__doc__ = (__doc__ or "") + "".join(f"    {name:<13}{words}\n" for name, words in TARGETS.items())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("--model", required=True, metavar="HEADS", help="folder or hub id of the heads")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of the heads on the hub")
    parser.add_argument("--out", required=True, type=Path, metavar="FOLDER", help="where to write")
    parser.add_argument("--format", required=True, choices=TARGETS, help="see above")
    parser.add_argument(
        "--storage",
        choices=("float", "int8", "fp8"),
        help="of the projections: in 8 bits with a scale a row, or floats again (default: as they are)",
    )
    parser.add_argument(
        "--dtype",
        choices=_arguments.DTYPES,
        help="of all of the heads that is not in 8 bits (default: the checkpoint's); embedded converts the heads alone "
        "and copies the base model's files as they are",
    )
    parser.add_argument(
        "--base-model",
        metavar="BASE",
        help="folder or hub id of the base model (default: the one the heads name); its weights are read where the "
        "format asks for them",
    )
    parser.add_argument(
        "--base-revision", metavar="REV", help="branch, tag or commit of the base model (default: the heads')"
    )
    parser.add_argument(
        "--file",
        choices=("pt", "safetensors"),
        default="pt",
        help="of the original formats: pt, which the project's own code reads (default), or safetensors, which "
        "text-generation-inference reads (with the base model's tokenizer, where that is a folder)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace a folder of heads in which nothing else is")
    parser.add_argument("--json", action="store_true", help="print what was written as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Read, convert, write, say what was written."""
    done = export(
        args.model,
        args.out,
        args.format,
        storage=args.storage,
        dtype=_arguments.DTYPES[args.dtype] if args.dtype else None,
        base_model=args.base_model,
        base_revision=args.base_revision,
        file=args.file,
        overwrite=args.overwrite,
        revision=args.revision,
    )
    size = sum(file.stat().st_size for file in done.folder.iterdir())
    if args.json:
        figures = {
            "folder": str(done.folder),
            "format": done.format,
            "base_model": done.base_model,
            "bytes": size,
            "notes": done.notes,
        }
        if done.format == "vllm":
            figures |= {"vllm": VERSIONS, "launch": done.launch}
        print(json.dumps(figures))
        return 0
    print(f"{done.heads.extra_repr()}\nas {done.format} in {done.folder} ({size / 1e6:.1f} MB)")
    for note in done.notes:
        print(f"note: {note}")
    if done.launch is not None:
        print(f"vLLM {VERSIONS} (0.33 has no Medusa any more) serves it with:\n    {done.launch}")
    return 0
