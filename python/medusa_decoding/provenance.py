"""What figures and files depend on: which weights, and which versions.

A fingerprint says whether weights are those that something was made with; it is no proof against forgery. This module
does not know what it is asked about.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import platform

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

SAMPLED = 1024
"""Values of each weight that a fingerprint looks at."""


def fingerprint(module: torch.nn.Module) -> str:
    """Return what tells models apart: a hash of the shape, dtype and some evenly spaced values of every weight.

    Training changes about every value. A change of single values between those that are looked at is not seen.
    """
    digest = hashlib.blake2b(digest_size=8)
    for weight in module.state_dict().values():
        if isinstance(weight, torch.Tensor):
            _digest(weight.detach(), digest)
    return digest.hexdigest()


def _digest(weight: torch.Tensor, digest: hashlib.blake2b) -> None:
    digest.update(f"{list(weight.shape)} {weight.dtype}".encode())
    if is_traceable_wrapper_subclass(weight):  # quantised by torchao, say: made of plain tensors
        names, _ = weight.__tensor_flatten__()
        for name in names:
            _digest(getattr(weight, name), digest)
        return
    values = weight.as_subclass(torch.Tensor).reshape(-1)
    sample = values[:: max(1, len(values) // SAMPLED)][:SAMPLED].contiguous().cpu()
    digest.update(sample.view(torch.uint8).numpy().tobytes())


def versions(*libraries: str) -> dict[str, str]:
    """Return the version of Python, and of those libraries that are installed."""
    found = {"python": platform.python_version()}
    for name in libraries:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
