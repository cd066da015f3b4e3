"""What a figure or a file depends on: weights, library versions, commit, machine and command.

A fingerprint tells whether weights are the ones that a file was made with; it is no proof against forgery.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import hashlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

SAMPLED = 1024
"""How many values of each weight a fingerprint reads."""
LIBRARIES = ("torch", "triton", "transformers", "medusa-kernels")
"""The libraries that step times depend on."""


def fingerprint(module: torch.nn.Module) -> str:
    """Return a hash of a model's weights: of the shape, the dtype and some evenly spaced values of each.

    Training changes nearly every value. A change of single values between the ones that are read goes unnoticed.
    """
    digest = hashlib.blake2b(digest_size=8)
    for weight in module.state_dict().values():
        if isinstance(weight, torch.Tensor):
            _digest(weight.detach(), digest)
    return digest.hexdigest()


def _digest(weight: torch.Tensor, digest: hashlib.blake2b) -> None:
    digest.update(f"{list(weight.shape)} {weight.dtype}".encode())
    if is_traceable_wrapper_subclass(weight):  # such as torchao's quantised ones: made of plain tensors
        names, _ = weight.__tensor_flatten__()
        for name in names:
            _digest(getattr(weight, name), digest)
        return
    values = weight.as_subclass(torch.Tensor).reshape(-1)
    sample = values[:: max(1, len(values) // SAMPLED)][:SAMPLED].contiguous().cpu()
    digest.update(sample.view(torch.uint8).numpy().tobytes())


def provenance(command: str, device: torch.device | None = None, file: str | Path = __file__) -> dict[str, Any]:
    """Return machine, versions, commit, command and date, as records of measurements store them.

    `command` is the command that measures, `device` the device that it measures on (see `machine`), and `file` any file
    of the checkout.
    """
    return {
        "machine": machine(device),
        "versions": versions(*LIBRARIES),
        "commit": commit(file),
        "command": command,
        "date": datetime.date.today().isoformat(),
    }


def machine(device: torch.device | None = None) -> dict[str, Any]:
    """Describe the machine that a device (by default the GPU if there is one) belongs to."""
    on_gpu = torch.cuda.is_available() if device is None else device.type == "cuda"
    if on_gpu:
        # The newest CUDA version that the driver supports; torch does not tell the driver's own version.
        supported = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
        return {
            "name": torch.cuda.get_device_name(device),
            "cuda": torch.version.cuda,
            "driver_cuda": f"{supported // 1000}.{supported % 1000 // 10}" if supported else None,
            "gpus": torch.cuda.device_count(),
        }
    return {
        "name": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "isa": torch.backends.cpu.get_cpu_capability(),
    }


def without_folders(arguments: Iterable[str]) -> list[str]:
    """Return a command's arguments with paths to elsewhere (absolute, `~`, `..`) replaced by their last part."""
    found = []
    for word in arguments:
        option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
        found.append(option + equals + (Path(value).name if value.startswith(("/", "~", "../")) else value))
    return found


def versions(*libraries: str) -> dict[str, str]:
    """Return the versions of Python and of those libraries that are installed."""
    found = {"python": platform.python_version()}
    for name in libraries:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


@functools.cache
def commit(file: str | Path = __file__) -> str:
    """Return the commit of the checkout that a file belongs to, with "+changes" if tracked files differ from it.

    The environment variable MEDUSA_COMMIT comes first, for copies of a checkout without its own repository. The commit
    of a file that git does not track, such as one of an installed package, is "unknown".
    """
    if os.environ.get("MEDUSA_COMMIT"):
        return os.environ["MEDUSA_COMMIT"]
    file = Path(file).resolve()

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=file.parent, capture_output=True, text=True, check=True).stdout

    try:
        # A package may be installed into a folder of another project's repository.
        git("ls-files", "--error-unmatch", file.name)
        head = git("rev-parse", "--short=12", "HEAD").strip()
        # Records that benchmarks append do not change what is measured.
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", ":!/benchmarks/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+changes" if changed else "")


@functools.cache
def cpu_name() -> str:
    """Return the processor's name."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def device_name(device: torch.device) -> str:
    """Name a device by the properties that step times depend on; a new driver does not change the name."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        memory = round(found.total_memory / 2**30)
        return f"{found.name}, {found.multi_processor_count} SMs, {memory} GiB, sm_{found.major}{found.minor}"
    if device.type == "cpu":
        threads = torch.get_num_threads()
        capability = torch.backends.cpu.get_cpu_capability()
        return f"{cpu_name()}, {threads} thread{'s' if threads > 1 else ''}, {capability}"
    return device.type
