"""Triton's launches, compiled for a target that is not there and given to the emulator."""

from __future__ import annotations

import os
import struct
from typing import Any

from emulator import native
from emulator.machine import Emulator


class _Driver:
    """The part of a GPU driver that Triton needs to compile."""

    def __init__(self, sm: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", sm, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


def _argument(kind: str, value: Any) -> Any:
    """Return an argument as `Emulator.launch` takes it; `kind` is Triton's name of its type."""
    if kind.startswith("*"):
        return value
    if kind in ("fp32", "fp64"):
        return struct.pack("f" if kind == "fp32" else "d", value)
    return (int(value) & (2**64 - 1)).to_bytes(8, "little")


def take_over(emulator: Emulator) -> None:
    """Let every launch of a Triton kernel in this process run in the emulator.

    Compiled kernels are kept in a cache of their own: the assembler does not run, so they are of no use elsewhere.
    """
    os.environ["TRITON_CACHE_DIR"] = str(native.CACHE / "triton")
    from triton.backends.nvidia.compiler import CUDABackend
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    CUDABackend.make_cubin = lambda *_args: b""
    driver.set_active(_Driver(emulator.settings.sm))
    compile_only = JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernel = compile_only(self, *args, grid=grid, warmup=True, **options)
        if warmup:
            return kernel
        given = dict(zip(self.arg_names, args, strict=False)) | options
        program = emulator.load(kernel.hash, kernel.asm["ptx"], kernel.metadata.name)
        kinds = {name: kind for name, kind in kernel.src.signature.items() if kind != "constexpr"}
        emulator.launch(
            program,
            grid(given) if callable(grid) else grid,
            32 * kernel.metadata.num_warps,
            kernel.metadata.shared,
            [_argument(kind, given[name]) for name, kind in kinds.items()],
            bool(getattr(kernel.metadata, "launch_pdl", False)),
        )
        return kernel

    JITFunction.run = run
