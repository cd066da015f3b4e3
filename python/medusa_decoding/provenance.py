"""What figures and files depend on: which weights, which versions, which commit, which device.

A fingerprint says whether weights are those that something was made with; it is no proof against forgery. This module
does not know what it is asked about.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path

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


@functools.cache
def commit(file: str | Path = __file__) -> str:
    """Return the commit of the checkout that a file is part of, marked if tracked files differ from it.

    The environment variable MEDUSA_COMMIT goes first, for copies of a checkout whose repository is missing or is not
    the checkout's own. A file that git does not track, of an installed package say, has none: "unknown".
    """
    if os.environ.get("MEDUSA_COMMIT"):
        return os.environ["MEDUSA_COMMIT"]
    try:
        # A package may be installed into a folder of somebody else's repository.
        file = Path(file).resolve()
        _git(file.parent, "ls-files", "--error-unmatch", file.name)
        head = _git(file.parent, "rev-parse", "--short=12", "HEAD").strip()
        # Records that benchmarks append change nothing that is measured.
        changed = _git(
            file.parent, "status", "--porcelain", "--untracked-files=no", "--", ":/", ":!/benchmarks/results"
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+changes" if changed else "")


def without_folders(arguments: Iterable[str]) -> list[str]:
    """Return a command's arguments as anyone would give them: of paths on this machine, only the names."""
    found = []
    for word in arguments:
        option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
        found.append(option + equals + (Path(value).name if value.startswith(("/", "~")) else value))
    return found


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


@functools.cache
def cpu_name() -> str:
    """Return the processor's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """Name a device by what step times depend on, and nothing that a new driver changes."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        memory = round(found.total_memory / 2**30)
        return f"{found.name}, {found.multi_processor_count} SMs, {memory} GiB, sm_{found.major}{found.minor}"
    if device.type == "cpu":
        threads = torch.get_num_threads()
        capability = torch.backends.cpu.get_cpu_capability()
        return f"{cpu_name()}, {threads} thread{'s' if threads > 1 else ''}, {capability}"
    return device.type
