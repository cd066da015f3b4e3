"""This project's ops on CPU tensors, served by their GPU kernels in the emulator."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import pkgutil
import re
import shutil
import subprocess
import sys
from typing import Any

import torch

from emulator import native, triton_launches
from emulator.machine import Emulator, Settings

TARGETS = (80, 86, 89, 90)
"""What the emulator knows the instructions of; see `benchmarks.inspection.TARGETS` for the GPUs."""


def install(settings: Settings | None = None) -> Emulator:
    """Let launches of Triton kernels, and the project's ops on CPU tensors, run in the emulator from now on.

    It holds for the whole process and cannot be undone. Call it before ops run.
    """
    emulator = Emulator(settings)
    triton_launches.take_over(emulator)
    _serve_triton_ops(emulator)
    if shutil.which("nvcc"):
        _serve_kv_compact(emulator)
    return emulator


def _serve_triton_ops(emulator: Emulator) -> None:
    """Tell the host code which device it has, and all choosers of implementations that Triton serves CPU tensors."""
    import medusa_kernels._triton as kernels
    from medusa_kernels import _registry
    from medusa_kernels._triton import launch

    for module in pkgutil.iter_modules(kernels.__path__):
        importlib.import_module(f"{kernels.__name__}.{module.name}")
    sys.path.append(str(native.HERE.parents[1]))  # benchmarks/ is not installed
    from benchmarks import inspection

    device = inspection.TARGETS[str(emulator.settings.sm)]
    if emulator.settings.multiprocessors:
        device = dataclasses.replace(device, multiprocessors=emulator.settings.multiprocessors)

    for name, module in list(sys.modules.items()):
        if name.startswith(kernels.__name__):
            if hasattr(module, "describe"):
                module.describe = lambda _device: device
        elif name.startswith("medusa_kernels") and hasattr(module, "interpreted"):
            # Outside the kernels, this asks whether Triton takes CPU tensors; within, for smaller configurations.
            module.interpreted = lambda: True
    launch.programmatic = lambda _device: launch.PROGRAMMATIC_LAUNCH and device.programmatic
    _registry._chosen.clear()


def _serve_kv_compact(emulator: Emulator) -> None:
    """Launch the CUDA kernel of csrc/ as its host code does."""
    from medusa_kernels import _checks, _registry

    source = native.HERE.parents[1] / "csrc" / "kv_compact.cu"
    sm = emulator.settings.sm
    texts = b"".join(path.read_bytes() for path in sorted(source.parent.glob("kv_compact.*")))
    digest = hashlib.sha256(texts).hexdigest()[:16]
    compiled = native.CACHE / f"kv_compact-sm_{sm}-{digest}.ptx"
    if not compiled.exists():
        native.CACHE.mkdir(parents=True, exist_ok=True)
        command = ["nvcc", "-ptx", "-lineinfo", f"-arch=sm_{sm}", "-std=c++17", "-O3", source, "-o", compiled]
        subprocess.run(command, check=True, capture_output=True)
    ptx = compiled.read_text()
    # Mangled names of the types that the kernel moves.
    names = {16: r"N\w*Unit16E", 8: "m", 4: "j", 2: "t", 1: "h"}
    entries = {size: re.search(rf"\.entry (\w*compact_kernelI{name}E\w*)\(", ptx) for size, name in names.items()}

    def number(value: int) -> bytes:
        return value.to_bytes(8, "little", signed=True)

    def move(
        kv: torch.Tensor,
        cache_lens: torch.Tensor,
        path: torch.Tensor,
        accept_lens: torch.Tensor,
        *,
        slots: torch.Tensor | None = None,
    ) -> None:
        layers, two, sequences, kv_heads, rows, head_dim = kv.shape
        batch, row_bytes, path_len = len(cache_lens), head_dim * kv.itemsize, path.shape[1]
        if 0 in (*kv.shape, path_len, batch):
            return
        unit = (kv.data_ptr() | row_bytes | 16) & -(kv.data_ptr() | row_bytes | 16)
        entry = entries[unit]
        assert entry is not None, f"csrc/kv_compact.cu: no kernel that moves {unit} bytes"
        program = emulator.load((unit, digest), ptx, entry[1], f"kv_compact ({unit}-byte units)")
        columns = kv_heads * row_bytes // unit
        sizes = (_checks.cache_slots("kv", kv), sequences, kv_heads, rows, row_bytes // unit, columns)
        lens, nodes, accepted = (tensor.contiguous() for tensor in (cache_lens, path, accept_lens))
        own = number(0) if slots is None else slots.contiguous()
        values: list[Any] = [kv, *map(number, sizes), lens, nodes, number(path_len), accepted, own]
        emulator.launch(program, (-(-columns // 128), batch, layers * two), 128, 0, values)

    chosen = _registry.Implementation("cuda", move, "the CUDA kernel of csrc/ in the emulator")
    _registry._choosers["kv_compact", "cpu"] = lambda _device: chosen
