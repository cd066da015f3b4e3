"""Run `medusa export`: see `cli.parsers.export` for its arguments."""

from __future__ import annotations

import argparse
import json

from medusa_decoding.checkpoints import export
from medusa_decoding.cli._arguments import torch_dtype
from medusa_decoding.options import VLLM_VERSIONS


def run(args: argparse.Namespace) -> int:
    """Read, convert and write the heads; print what was written."""
    done = export(
        args.model,
        args.out,
        args.format,
        storage=args.storage,
        dtype=torch_dtype(args.dtype) if args.dtype else None,
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
            figures |= {"vllm": VLLM_VERSIONS, "launch": done.launch}
        print(json.dumps(figures))
        return 0
    print(f"{done.heads.extra_repr()}\nas {done.format} in {done.folder} ({size / 1e6:.1f} MB)")
    for note in done.notes:
        print(f"note: {note}")
    if done.launch is not None:
        print(f"vLLM {VLLM_VERSIONS} (0.33 has no Medusa any more) serves it with:\n    {done.launch}")
    return 0
