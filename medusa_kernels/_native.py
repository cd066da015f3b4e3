"""Loads the compiled libraries of csrc/ through ctypes, and tells why one is missing.

Loading is lazy and cached; two threads at worst load a library twice, which gives the same one. This file knows the C
ABI and how the libraries were built, but neither tensors nor ops. A missing library raises nothing: callers ask
`why_missing`.
"""

from __future__ import annotations

import ctypes
import functools
import json
from pathlib import Path
from typing import Any, Literal

Kind = Literal["cpu", "cuda"]

# The same number as kAbiVersion in csrc/kv_compact.h.
ABI_VERSION = 7
LIBRARY_FOLDER = Path(__file__).parent / "_lib"


def cpu_library() -> ctypes.CDLL | None:
    """Return the C++ library, or None; then `why_missing("cpu")` tells why."""
    return _load(LIBRARY_FOLDER, "cpu")[0]


def cuda_library() -> ctypes.CDLL | None:
    """Return the CUDA library, or None; then `why_missing("cuda")` tells why. It loads without a GPU too."""
    return _load(LIBRARY_FOLDER, "cuda")[0]


def why_missing(kind: Kind) -> str:
    """Return in one sentence why a library is missing, or "" if it is loaded."""
    return _load(LIBRARY_FOLDER, kind)[1]


def build_info() -> dict[str, Any]:
    """Return the record of the build (compilers, CUDA targets or why there are none), or {} if nothing was built."""
    try:
        return json.loads((LIBRARY_FOLDER / "build.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}


CPU_OPS = ("decode_linear", "decoder_layers", "heads_topk", "argmax", "gumbel_noise", "tree_accept")
"""Functions medusa_<op>_cpu of csrc/cpu, each of one struct."""


def instruction_set() -> str:
    """Return the C++ ops' instruction set: base, avx2, avx512, avx512_vnni or avx512_bf16; "" without them."""
    library = cpu_library()
    return "" if library is None else library.medusa_cpu_isa().decode()


@functools.cache
def _load(folder: Path, kind: Kind) -> tuple[ctypes.CDLL | None, str]:
    name = "C++" if kind == "cpu" else "CUDA"
    path = folder / f"libmedusa_{kind}.so"
    if not path.exists():
        facts = build_info()
        why = facts.get(kind, {}).get("why") or f"{path} does not exist"
        if not facts:
            why = f"{folder} holds no build; install with `pip install .` or `pip install -e .`"
        return None, f"the {name} library was not built: {why}"
    try:
        library = ctypes.CDLL(str(path))
        version = library.medusa_abi_version()
    except (OSError, AttributeError) as error:
        return None, f"the {name} library could not be loaded: {error}"
    if version != ABI_VERSION:
        wanted = f"expected ABI version {ABI_VERSION}, got {version}; install again"
        return None, f"the {name} library at {path} belongs to another version of this package: {wanted}"
    _declare(library, kind)
    return library, ""


def _declare(library: ctypes.CDLL, kind: Kind) -> None:
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    # kv, layers2, stored, sequences, batch, kv_heads, rows, row_bytes, cache_lens, path, path_len, accept_lens, slots
    arguments: list[Any] = [pointer, *[integer] * 7, pointer, pointer, integer, pointer, pointer]
    if kind == "cpu":
        # -> 0: done. Nothing was moved if 1: a row is outside [0, rows), 2: a path does not ascend strictly from 0 or
        #    more, 3: an accepted length is outside [-1, path_len), 4: a slot is outside [0, sequences)
        library.medusa_kv_compact_cpu.argtypes = arguments
        for op in CPU_OPS:  # struct -> the enum Result of csrc/cpu/ops.h
            getattr(library, f"medusa_{op}_cpu").argtypes = [ctypes.c_char_p]
        library.medusa_cpu_isa.restype = ctypes.c_char_p
        library.medusa_cpu_use.argtypes = [ctypes.c_char_p]
        return
    # ..., stream -> cudaError_t
    library.medusa_kv_compact_cuda.argtypes = [*arguments, pointer]
    # count -> cudaError_t
    library.medusa_cuda_device_count.argtypes = [ctypes.POINTER(ctypes.c_int)]
    # cudaError_t -> its description
    library.medusa_cuda_error_string.argtypes = [ctypes.c_int]
    library.medusa_cuda_error_string.restype = ctypes.c_char_p
