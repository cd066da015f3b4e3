"""Tensors in weight files, listed with shape and dtype before any of their bytes are read.

Opens safetensors files, PyTorch files (`weights_only=True`: tensors, never code) and the index of a sharded model. This
module does not know what the tensors mean.
"""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

_SAFETENSORS_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a weight file.

    Attributes:
        name: the tensor's name in the file, for messages.
        shape: its shape.
        dtype: its torch dtype, or the file's own word for a dtype this package has no use for.
        file: the file that holds it.
        load: reads it, on the CPU.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | str
    file: Path
    load: Callable[[], torch.Tensor]


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object from a file.

    Raises:
        ValueError: the file holds something else; it names the file.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # also a number of too many digits
        raise ValueError(f"{file}: expected JSON, got text that does not parse ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(content).__name__}")
    return content


def open_tensors(file: Path) -> dict[str, StoredTensor]:
    """List the tensors of one weight file by name.

    Args:
        file: a `.safetensors` file, or a file written by `torch.save` that holds a dict of tensors.

    Raises:
        ValueError: the file is truncated, damaged, or holds anything but tensors; it names the file.
    """
    return _open_safetensors(file) if file.suffix == ".safetensors" else _open_pytorch(file)


def open_sharded(index_file: Path, prefix: str) -> dict[str, StoredTensor]:
    """List the tensors of a sharded model whose names start with `prefix`; other shards stay closed.

    Args:
        index_file: the `*.index.json` with its `weight_map` from tensor names to file names.
        prefix: the beginning of the wanted names.

    Raises:
        ValueError: a damaged index or shard, a shard that is missing or lies outside the folder, or shards that
            disagree with the index about the wanted names.
    """
    wanted = read_index(index_file, prefix)
    found: dict[str, StoredTensor] = {}
    for shard in sorted(set(wanted.values())):
        for name, tensor in open_tensors(index_file.parent / shard).items():
            if name.startswith(prefix):
                if wanted.get(name) != shard:
                    listed = wanted.get(name, "no file")
                    raise ValueError(f"{name}: expected in {listed} ({index_file.name}), got it in {shard}")
                found[name] = tensor
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        raise ValueError(f"{missing[0]}: expected in {wanted[missing[0]]} ({index_file.name}), got no such tensor")
    return found


def read_index(index_file: Path, prefix: str = "") -> dict[str, str]:
    """Return which file of a sharded model holds which of the tensors whose names start with `prefix`.

    Raises:
        ValueError: a damaged index, or a shard of these that is missing or lies outside the folder.
    """
    weight_map = read_json(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ValueError(f"{index_file}: expected a weight_map from tensor names to file names, got none")
    wanted = {name: shard for name, shard in weight_map.items() if name.startswith(prefix)}
    for shard in sorted(set(wanted.values())):
        # An index comes from strangers: it must not point to other files of this machine.
        if Path(shard).name != shard:
            raise ValueError(f"{index_file}: weight_map: expected names of files beside it, got {shard!r}")
        if not (index_file.parent / shard).is_file():
            raise ValueError(f"{index_file}: weight_map: expected the file {shard} beside it, got none")
    return wanted


def _open_safetensors(file: Path) -> dict[str, StoredTensor]:
    try:
        handle = safe_open(str(file), framework="pt")
        listed = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118 (a handle is no mapping)
    except SafetensorError as error:
        raise ValueError(f"{file}: expected a safetensors file, got a truncated or damaged one ({error})") from error

    def loader(name: str) -> Callable[[], torch.Tensor]:
        return lambda: handle.get_tensor(name)

    return {
        name: StoredTensor(
            name,
            tuple(info.get_shape()),
            _SAFETENSORS_DTYPES.get(info.get_dtype(), info.get_dtype()),
            file,
            loader(name),
        )
        for name, info in listed.items()
    }


def _open_pytorch(file: Path) -> dict[str, StoredTensor]:
    try:
        # Only the zip format can be mapped into memory; files of torch before 1.6 are read as a whole.
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except (FileNotFoundError, PermissionError):
        raise
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{file}: expected tensors only, got a damaged file or pickled Python objects, which are refused because "
            f"loading them can run code ({str(error).partition('.')[0]})"
        ) from error
    except Exception as error:  # torch.load raises many types on damaged bytes, OSError among them
        raise ValueError(f"{file}: expected a PyTorch file, got a truncated or damaged one ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: expected a dict of tensors, got {type(content).__name__}")
    tensors = {}
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
            kind = value.layout if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(f"{file}: {name}: expected a named dense tensor, got {kind}")
        if value.is_meta:
            raise ValueError(f"{file}: {name}: expected a tensor with values, got one on the meta device")
        tensors[name] = StoredTensor(name, tuple(value.shape), value.dtype, file, _returning(value))
    return tensors


def _returning(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: tensor
