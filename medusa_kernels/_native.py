"""Loads the compiled libraries of csrc through ctypes, and says why one is missing.

Loading is lazy, cached and thread-safe. This file knows the C ABI and how the libraries were built; it knows no torch,
no tensors and no ops, and it never raises because a library is absent: callers ask `why_missing`.
"""

from __future__ import annotations

import ctypes
import json
import threading
from pathlib import Path
from typing import Any, Literal

Kind = Literal["cpu", "cuda"]

# The same number as kAbiVersion in csrc/kv_compact.h.
ABI_VERSION = 1
LIBRARY_FOLDER = Path(__file__).parent / "_lib"

_lock = threading.Lock()
_loaded: dict[tuple[Path, Kind], tuple[ctypes.CDLL | None, str]] = {}


def cpu_library() -> ctypes.CDLL | None:
    """Return the C++ library, or None; `why_missing("cpu")` then says why."""
    return _load("cpu")[0]


def cuda_library() -> ctypes.CDLL | None:
    """Return the CUDA library, or None; `why_missing("cuda")` then says why. A loaded library does not mean a GPU."""
    return _load("cuda")[0]


def why_missing(kind: Kind) -> str:
    """Return one sentence saying why a library is not there, or "" if it is loaded.

    Raises:
        ValueError: if `kind` is neither "cpu" nor "cuda".
    """
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"kind: expected 'cpu' or 'cuda', got {kind!r}")
    return _load(kind)[1]


def build_info() -> dict[str, Any]:
    """Return what the build recorded (compilers, CUDA targets or why there are none), or {} if nothing was built."""
    try:
        facts: dict[str, Any] = json.loads((LIBRARY_FOLDER / "build.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    return facts


def _load(kind: Kind) -> tuple[ctypes.CDLL | None, str]:
    key = (LIBRARY_FOLDER, kind)
    with _lock:
        if key not in _loaded:
            _loaded[key] = _open(kind)
        return _loaded[key]


def _open(kind: Kind) -> tuple[ctypes.CDLL | None, str]:
    name = "C++" if kind == "cpu" else "CUDA"
    path = LIBRARY_FOLDER / f"libmedusa_{kind}.so"
    if not path.exists():
        facts = build_info()
        why = facts.get(kind, {}).get("why") or f"{path} does not exist"
        if not facts:
            why = f"{LIBRARY_FOLDER} holds no build; install with `pip install .` or `pip install -e .`"
        return None, f"the {name} library was not built: {why}"
    try:
        library = ctypes.CDLL(str(path))
        version = library.medusa_abi_version()
    except (OSError, AttributeError) as error:
        return None, f"the {name} library could not be loaded: {error}"
    if version != ABI_VERSION:
        wanted = f"expected ABI version {ABI_VERSION}, got {version}; install again"
        return None, f"the {name} library at {path} belongs to another version of this package: {wanted}"
    if kind == "cpu":
        _declare_cpu(library)
    else:
        _declare_cuda(library)
    return library, ""


def _declare_cpu(library: ctypes.CDLL) -> None:
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    # kv, layers2, batch, kv_heads, rows, row_bytes, cache_lens, path, path_len, accept_lens
    # -> 0 done; nothing was moved if 1 a row lies outside [0, rows), 2 a path is not strictly ascending from 0 or more,
    #    3 an accepted length lies outside [-1, path_len)
    library.medusa_kv_compact_cpu.argtypes = [pointer, *[integer] * 5, pointer, pointer, integer, pointer]
    library.medusa_kv_compact_cpu.restype = ctypes.c_int


def _declare_cuda(library: ctypes.CDLL) -> None:
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    # kv, layers2, batch, kv_heads, rows, row_bytes, cache_lens, path, path_len, accept_lens, stream -> cudaError_t
    library.medusa_kv_compact_cuda.argtypes = [pointer, *[integer] * 5, pointer, pointer, integer, pointer, pointer]
    library.medusa_kv_compact_cuda.restype = ctypes.c_int
    # count -> cudaError_t
    library.medusa_cuda_device_count.argtypes = [ctypes.POINTER(ctypes.c_int)]
    library.medusa_cuda_device_count.restype = ctypes.c_int
    # cudaError_t -> its description
    library.medusa_cuda_error_string.argtypes = [ctypes.c_int]
    library.medusa_cuda_error_string.restype = ctypes.c_char_p
