"""Read and write weight files: safetensors, PyTorch files and the index of a sharded model.

Tensors are listed with shape and dtype before any of their bytes are read. PyTorch files are read with
`weights_only=True`: tensors, never code.
"""

from __future__ import annotations

import functools
import os
import reprlib
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from medusa_decoding.files import read_json_object

MODEL_WEIGHTS = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip
"""Weight files of a model, in the order in which transformers looks for them."""

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
        dtype: its torch dtype, or the file's own name of a dtype that this package does not use.
        file: the file that holds it.
        load: reads it onto the CPU.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | str
    file: Path
    load: Callable[[], torch.Tensor]

    @classmethod
    def from_tensor(cls, name: str, tensor: torch.Tensor, file: Path) -> StoredTensor:
        """Describe a tensor in memory as one of a file."""
        return cls(name, tuple(tensor.shape), tensor.dtype, file, tensor.detach)

    def refused(self, expected: str, got: object) -> ValueError:
        """Return the error that says what was expected of this tensor."""
        return ValueError(f"{self.name} in {self.file}: expected {expected}, got {got}")


def own_file(file: Path) -> Path:
    """Return a file if it may be copied out of its folder; a link that leads elsewhere is a `ValueError`.

    A stranger's folder may hold links to any file of this machine. In the hub's cache every file of a folder
    `snapshots/REVISION` is a link into the same model's `blobs`; those are allowed.
    """
    folder, target = file.parent.resolve(), file.resolve()
    places = [folder, folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else [folder]
    if not any(target.is_relative_to(place) for place in places):
        raise ValueError(
            f"{file}: expected a file in {folder}, got a link to {target} (copy that file to the folder if it belongs "
            "there)"
        )
    return file


def open_tensors(file: Path, prefix: str = "") -> dict[str, StoredTensor]:
    """List the tensors of one weight file whose names start with `prefix`, by name.

    The file is a `.safetensors` file, or one written by `torch.save` that holds a dict of tensors. No code in it is
    run.
    """
    return _open_safetensors(file, prefix) if file.suffix == ".safetensors" else _open_pytorch(file, prefix)


def model_tensors(folder: Path, prefix: str) -> dict[str, StoredTensor]:
    """List the tensors of a model's folder whose names start with `prefix`, by name; other shards stay closed."""
    file = model_weights(folder)
    if file is None or file.suffix != ".json":
        return {} if file is None else open_tensors(file, prefix)
    wanted = read_index(file, prefix)
    found: dict[str, StoredTensor] = {}
    for shard in sorted(set(wanted.values())):
        for name, tensor in open_tensors(folder / shard, prefix).items():
            if wanted.get(name) != shard:
                holder = wanted.get(name, "no file")
                raise ValueError(f"{name}: expected in {holder} ({file.name}), got it in {shard}")
            found[name] = tensor
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        raise ValueError(f"{missing[0]}: expected in {wanted[missing[0]]} ({file.name}), got no such tensor")
    return found


def model_weights(folder: Path) -> Path | None:
    """Return the weight file or index that transformers would read from a model's folder, or None."""
    return next((folder / name for name in MODEL_WEIGHTS if (folder / name).is_file()), None)


def read_index(index_file: Path, prefix: str = "") -> dict[str, str]:
    """Return which file of a sharded model holds which of the tensors whose names start with `prefix`."""
    weight_map = read_json_object(index_file).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise ValueError(f"{index_file}: weight_map, which maps tensor names to file names, is missing")
    wanted = {name: shard for name, shard in weight_map.items() if name.startswith(prefix)}
    for shard in sorted(set(wanted.values())):
        # An index comes from strangers: it must not point to other files of this machine.
        if Path(shard).name != shard:
            raise ValueError(f"{index_file}: weight_map: expected names of files beside it, got {shard[:99]!r}")
        if not os.path.isfile(index_file.parent / shard):  # False also for what can be no name of a file
            raise ValueError(f"{index_file}: weight_map names {shard[:99]}, which is not in this folder")
    return wanted


def _open_safetensors(file: Path, prefix: str) -> dict[str, StoredTensor]:
    try:
        handle = safe_open(str(file), framework="pt")
        names = handle.keys()
        slices = {name: handle.get_slice(name) for name in names if name.startswith(prefix)}
    except SafetensorError as error:
        raise ValueError(f"{file}: expected a safetensors file, got a truncated or damaged one ({error})") from error

    tensors = {}
    for name, info in slices.items():
        dtype = _SAFETENSORS_DTYPES.get(info.get_dtype(), info.get_dtype())
        load = functools.partial(handle.get_tensor, name)
        tensors[name] = StoredTensor(name, tuple(info.get_shape()), dtype, file, load)
    return tensors


def _open_pytorch(file: Path, prefix: str) -> dict[str, StoredTensor]:
    try:
        # Only the zip format can be mapped into memory; files of torch before 1.6 are read as a whole.
        content = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:  # torch.load raises many types on damaged bytes, OSError among them
        if "Unsupported" in str(error):  # torch's message goes on with how to load it all the same
            raise ValueError(
                f"{file}: expected tensors only, got other objects, which are refused: they can be code"
            ) from None
        said = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{file}: expected a PyTorch file, got a truncated or damaged one ({said})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: expected a dict of tensors, got {type(content).__name__}")
    tensors = {}
    for name, value in content.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise ValueError(f"{file}: {reprlib.repr(name)}: expected a named tensor, got {type(value).__name__}")
        if not name.startswith(prefix):
            continue
        if value.layout != torch.strided or value.is_quantized or value.device.type != "cpu":
            raise ValueError(
                f"{file}: {name}: expected a plain tensor, got a sparse or quantised one, or one without values"
            )
        wanted, held = value.numel() * value.element_size(), value.untyped_storage().nbytes()
        if wanted > held:
            raise ValueError(
                f"{file}: {name}: expected {wanted} bytes of values, got {held} that {list(value.shape)} is a view of"
            )
        tensors[name] = StoredTensor.from_tensor(name, value, file)
    return tensors


def save_tensors(tensors: Mapping[str, torch.Tensor], file: Path) -> None:
    """Write tensors as safetensors if any suffix says so, else as a PyTorch file; raise `OSError` if that fails."""
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    # safetensors writes for the owner alone; a checkpoint should be as readable as any new file.
    file.touch()
    mode = file.stat().st_mode
    try:
        if ".safetensors" in file.suffixes:
            seen: set[int] = set()
            for name, tensor in held.items():  # which refuses shared memory: equal tensors become copies
                if tensor.data_ptr() in seen:
                    held[name] = tensor.clone()
                seen.add(tensor.data_ptr())
            save_file(held, file, metadata={"format": "pt"})
        else:
            # torch would write the whole tensor that a view is cut from. A tensor with several names is written once.
            copies = {(tensor.data_ptr(), tensor.shape): tensor.clone() for tensor in held.values()}
            torch.save({name: copies[tensor.data_ptr(), tensor.shape] for name, tensor in held.items()}, file)
    except (SafetensorError, RuntimeError) as error:  # torch's writer has errors of its own for a full disk
        raise OSError(f"{file.parent}: the weights could not be written ({error})") from error
    file.chmod(mode)


def listed(names: Iterable[str]) -> str:
    """Return the first names of tensors and how many more there are, for messages."""
    names = list(names)
    return ", ".join(name[:99] for name in names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
