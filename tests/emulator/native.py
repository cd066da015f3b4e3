"""Build the emulator's C++ on first use, and load it."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / "build" / "emulator"
"""Compiled kernels and the emulator itself."""

# -ffp-contract=off: a product and a sum are fused where PTX says so only.
FLAGS = ["-std=c++20", "-O3", "-march=native", "-fwrapv", "-ffp-contract=off", "-fno-math-errno"]
FLAGS += ["-fopenmp-simd", "-fPIC"]


class Settings(ctypes.Structure):
    """How to run a stream of launches."""

    _fields_ = [
        *((name, ctypes.c_uint32) for name in ("order", "residents", "burst", "races", "copies", "poison")),
        ("seed", ctypes.c_uint64),
    ]


class Launch(ctypes.Structure):
    """One launch."""

    _fields_ = [
        ("kernel", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32),
        ("shared", ctypes.c_uint32),
        ("programmatic", ctypes.c_uint32),
        ("parameters", ctypes.c_void_p),
        ("ranges", ctypes.c_void_p),
        ("range_count", ctypes.c_uint64),
    ]


def _build() -> Path:
    """Compile the sources, unless that was done, and return the library."""
    sources = sorted((HERE / "ptx").glob("*.cpp"))
    compiler = os.environ.get("CXX", "g++")
    texts = b"".join(path.read_bytes() for path in sorted((HERE / "ptx").iterdir()))
    digest = hashlib.sha256(texts + " ".join([compiler, *FLAGS]).encode()).hexdigest()[:16]
    library = CACHE / f"libptx-{digest}.so"
    if library.exists():
        return library
    CACHE.mkdir(parents=True, exist_ok=True)
    suffix = f"{digest}-{os.getpid()}"
    objects = [CACHE / f"{source.stem}-{suffix}.o" for source in sources]

    def compile_one(pair: tuple[Path, Path]) -> None:
        source, target = pair
        command = [compiler, *FLAGS, "-c", source, "-o", target]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"the emulator needs a C++20 compiler such as g++ 11; {compiler} said:\n{done.stderr}")

    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(compile_one, zip(sources, objects, strict=True)))
        partial = CACHE / f"{suffix}.so"
        subprocess.run([compiler, "-shared", *objects, "-o", partial], check=True)
        partial.replace(library)
    finally:
        for path in objects:
            path.unlink(missing_ok=True)
    return library


@functools.cache
def library() -> ctypes.CDLL:
    """Return the emulator's C interface; see ptx/interface.cpp."""
    lib = ctypes.CDLL(str(_build()))
    lib.ptx_load.restype = ctypes.c_void_p
    lib.ptx_load.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t]
    lib.ptx_unload.argtypes = [ctypes.c_void_p]
    lib.ptx_parameters.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint32), ctypes.c_uint32]
    return lib
