"""Writing the weights of checkpoints. This module does not know whose they are."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file


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
