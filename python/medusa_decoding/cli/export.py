"""Run `medusa export`: see `cli.parsers.export` for its arguments."""

from __future__ import annotations

import argparse
import json
from typing import Any

from medusa_decoding.checkpoints import export, export_plain, hub
from medusa_decoding.cli._arguments import torch_dtype
from medusa_decoding.options import VLLM_LATER, VLLM_VERSIONS


def run(args: argparse.Namespace) -> int:
    """Read, convert and write the heads; print what was written, and what is uploaded."""
    if args.format != "hub" and (args.push or args.license):
        raise ValueError(f"--push and --license need --format hub, got --format {args.format}")
    if args.push is None and (args.private or args.yes):
        raise ValueError("--private and --yes need --push OWNER/NAME")
    if args.format == "plain":
        if args.storage or args.base_model or args.base_revision or args.overwrite or args.file != "pt":
            raise ValueError(
                "--storage, --base-model, --base-revision, --file, --overwrite need a format of heads, got plain"
            )
        dtype = torch_dtype(args.dtype) if args.dtype else None
        folder = export_plain(args.model, args.out, dtype=dtype, revision=args.revision)
        print(json.dumps({"folder": str(folder), "format": "plain"}) if args.json else f"as plain in {folder}")
        return 0
    if args.push is not None:
        hub.check_repository("--push", args.push)
        if args.yes and args.out.exists() and not args.overwrite:  # as it was looked at, with what was changed in it
            files = hub.files_to_push(args.out)
            if f"{hub.CODE}/generate.py" not in files:
                raise ValueError(f"--out: expected a folder written with --format hub, got {args.out}")
            if args.license or args.push not in (args.out / hub.CARD).read_text(encoding="utf-8"):
                raise ValueError(
                    f"{args.out / hub.CARD}: expected a card for {args.push}, and no --license now: an existing folder "
                    "is uploaded as it is; --overwrite writes it again"
                )
            pushed = _pushed(args, files, hub.push(args.out, args.push, private=args.private))
            print(json.dumps({"folder": str(args.out), "push": pushed}) if args.json else _shown(pushed))
            return 0
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
    url = hub.push(done.folder, args.push, private=args.private) if args.yes else None
    pushed = _pushed(args, hub.files_to_push(done.folder), url) if args.push else {}
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
            figures["push"] = pushed
        print(json.dumps(figures))
        return 0
    print(f"{done.heads.extra_repr()}\nas {done.format} in {done.folder} ({size / 1e6:.1f} MB)")
    for note in done.notes:
        print(f"note: {note}")
    if done.launch is not None:
        print(f"vLLM {VLLM_VERSIONS} serves it with:\n    {done.launch}\nvLLM {VLLM_LATER} (integrations/vllm)")
    if args.push:
        print(_shown(pushed))
    return 0


def _pushed(args: argparse.Namespace, files: dict[str, int], url: str | None) -> dict[str, Any]:
    return {"repository": args.push, "private": args.private, "files": files, "commit": url}


def _shown(pushed: dict[str, Any]) -> str:
    done, kind = pushed["commit"], "private" if pushed["private"] else "public if it is new"
    lines = [f"{'uploaded' if done else 'would upload'} to {pushed['repository']} ({kind}), in one commit:"]
    lines += [f"    {length:>12,}  {name}" for name, length in pushed["files"].items()]
    return "\n".join([*lines, done or "nothing was uploaded: look at the folder, then add --yes to upload it"])
