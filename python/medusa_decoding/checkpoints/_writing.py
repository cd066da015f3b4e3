"""Folders and weight files that appear whole or not at all. This module does not know what is in them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file


@contextlib.contextmanager
def whole_folder(folder: Path, replace: bool = False) -> Iterator[Path]:
    """Give a folder to write into, which gets its name when the block ends well, and goes when it does not.

    Args:
        folder: the name; its parents are made.
        replace: put it in the place of a folder of that name, which is removed then.

    Raises:
        ValueError: there is something of that name and `replace` is not set.
        OSError: the files could not be written; what was there before is unchanged. A Ctrl-C also leaves that, or the
            new folder in its place.
    """
    if folder.exists() and not replace:
        raise ValueError(f"folder: expected a new one, got {folder}")
    mark = secrets.token_hex(4)
    staging, aside = (folder.parent / f".{folder.name}.{mark}.{end}" for end in ("tmp", "old"))
    staging.mkdir(parents=True)
    try:
        yield staging
        for file in staging.iterdir():
            with open(file, "rb+") as written:
                os.fsync(written.fileno())
        if folder.exists():
            os.rename(folder, aside)
        os.rename(staging, folder)
    finally:
        # Also behind a Ctrl-C between any two of these lines there is the old folder or the new one.
        if aside.exists():
            if folder.exists():
                shutil.rmtree(aside, ignore_errors=True)
            else:
                os.rename(aside, folder)
        shutil.rmtree(staging, ignore_errors=True)


def save_tensors(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Write tensors into a `.safetensors` file, or into a PyTorch file of any other name.

    Raises:
        OSError: it could not be written.
    """
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # safetensors writes for its owner alone; a checkpoint is as readable as any new file here.
    file.touch()
    mode = file.stat().st_mode
    try:
        if file.suffix == ".safetensors":
            # Which holds no memory twice: equal tensors become copies.
            seen: set[int] = set()
            for name, tensor in held.items():
                if tensor.data_ptr() in seen:
                    held[name] = tensor.clone()
                seen.add(tensor.data_ptr())
            save_file(held, file, metadata={"format": "pt"})
        else:
            # Views are cut out of what they are views of, which would be written as a whole.
            # One that has several names is written once.
            copies = {(tensor.data_ptr(), tensor.shape): tensor.clone() for tensor in held.values()}
            torch.save({name: copies[tensor.data_ptr(), tensor.shape] for name, tensor in held.items()}, file)
    except (SafetensorError, RuntimeError) as error:  # torch's writer has errors of its own for a full disk
        raise OSError(f"{file.parent}: the weights could not be written ({error})") from error
    file.chmod(mode)


def save_json(values: Mapping[str, Any], file: Path) -> None:
    """Write a JSON object."""
    file.write_text(json.dumps(dict(values), indent=2) + "\n", encoding="utf-8")
