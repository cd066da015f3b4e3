"""Checks an installed wheel from outside the checkout: run by the wheel's own interpreter, see `make wheel-test`."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import torch

import medusa_decoding
import medusa_kernels
from medusa_kernels import _native


def medusa(*arguments: str) -> object:
    """Run the installed command and read its JSON."""
    command = [str(Path(sys.executable).parent / "medusa"), *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
    return json.loads(done.stdout)


def main() -> None:
    """Import, move rows through C++, run the commands."""
    for package in (medusa_kernels, medusa_decoding):
        folder = Path(package.__file__ or "").parent
        assert sys.prefix in str(folder), f"{folder} is not the installed package"
        assert (folder / "py.typed").exists(), f"py.typed is missing in {folder}"
        print(f"{package.__name__}: {folder}")
    tag = [line for line in (importlib.metadata.distribution("medusa-kernels").read_text("WHEEL") or "").splitlines()]
    platforms = ("linux", "manylinux", "macos")
    assert any(line.startswith(tuple(f"Tag: py3-none-{platform}" for platform in platforms)) for line in tag), tag

    assert _native.cpu_library() is not None, _native.why_missing("cpu")
    print(f"build: {json.dumps(_native.build_info())}")
    served = medusa_kernels.served_by("kv_compact", "cpu")
    print(f"kv_compact on the CPU: {served.name} ({served.reason})")
    kv = torch.arange(2 * 2 * 7, dtype=torch.float32).reshape(1, 2, 1, 2, 7, 1)
    lens, path, accepted = (torch.tensor(values, dtype=torch.int32) for values in ([2], [[0, 2, 4]], [2]))
    medusa_kernels.kv_compact(kv, lens, path, accepted)
    assert kv[0, 0, 0, 0, :, 0].tolist() == [0, 1, 2, 4, 6, 5, 6], kv

    medusa("doctor")
    print("medusa doctor --json: well")
    checkpoint = Path(medusa_decoding.__file__ or "").parent / "demo" / "checkpoint"
    if any(checkpoint.glob("**/*.safetensors")):
        medusa("demo", "--max-new-tokens", "16")
        print("medusa demo --max-new-tokens 16 --json: well")
    else:
        print("medusa demo: left out, this wheel holds no demo checkpoint")


if __name__ == "__main__":
    main()
