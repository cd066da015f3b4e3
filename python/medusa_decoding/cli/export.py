"""Run `medusa export`: see `cli.parsers.export` for its arguments."""

from __future__ import annotations

import argparse
import json

from medusa_decoding.checkpoints import export, hub
from medusa_decoding.cli._arguments import torch_dtype
from medusa_decoding.options import VLLM_LATER, VLLM_VERSIONS


def run(args: argparse.Namespace) -> int:
    """Read, convert and write the heads; print what was written, and what is uploaded."""
    if args.format != "hub" and (args.push or args.license):
        raise ValueError(f"--push and --license need --format hub, got --format {args.format}")
    if args.push is None and (args.private or args.yes):
        raise ValueError("--private and --yes need --push OWNER/NAME")
    if args.push is not None:
        hub.check_repository("--push", args.push)
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
        license=args.license,
        repo_id=args.push,
    )
    size = sum(file.stat().st_size for file in done.folder.rglob("*") if file.is_file())
    files = hub.files_to_push(done.folder) if args.push else {}
    url = hub.push(done.folder, args.push, private=args.private) if args.yes else None
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
        if args.push:
            figures["push"] = {"repository": args.push, "private": args.private, "files": files, "commit": url}
        print(json.dumps(figures))
        return 0
    print(f"{done.heads.extra_repr()}\nas {done.format} in {done.folder} ({size / 1e6:.1f} MB)")
    for note in done.notes:
        print(f"note: {note}")
    if done.launch is not None:
        print(f"vLLM {VLLM_VERSIONS} serves it with:\n    {done.launch}\nvLLM {VLLM_LATER} (integrations/vllm)")
    if args.push:
        kind = "private" if args.private else "public if it is new"
        print(f"{'uploaded' if args.yes else 'would upload'} to {args.push} ({kind}), in one commit:")
        for name, length in files.items():
            print(f"    {length:>12,}  {name}")
        print(url or "nothing was uploaded: add --overwrite --yes to upload")
    return 0
