"""The C ABI itself, called with numpy buffers, and the loader that says why a library is missing."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from medusa_kernels import _native


def call(
    kv: np.ndarray,
    cache_lens: list[int],
    path: list[list[int]],
    accept_lens: list[int],
) -> int:
    library = _native.cpu_library()
    assert library is not None, _native.why_missing("cpu")
    lens, paths, accepted = (np.array(values, dtype=np.int32) for values in (cache_lens, path, accept_lens))
    stored, batch = kv.shape[1], len(lens)
    assert stored >= batch == len(paths) == len(accepted)
    sizes = kv.shape[0], stored, batch, batch, *kv.shape[2:]
    return library.medusa_kv_compact_cpu(
        kv.ctypes.data, *sizes, lens.ctypes.data, paths.ctypes.data, paths.shape[1], accepted.ctypes.data, None,
    )  # fmt: skip


def random_bytes(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def gathered(kv: np.ndarray, cache_lens: list[int], path: list[list[int]], accept_lens: list[int]) -> np.ndarray:
    """The expected cache if all sources are gathered first, so that the order of moves cannot matter."""
    expected = kv.copy()
    for b, (length, steps, accepted) in enumerate(zip(cache_lens, path, accept_lens, strict=True)):
        sources = [length + step for step in steps[: accepted + 1]]
        expected[:, b, :, length : length + accepted + 1] = kv[:, b][:, :, sources]
    return expected


@pytest.mark.parametrize("row_bytes", [1, 2, 6, 12, 16, 24, 33])
@pytest.mark.parametrize("offset", [0, 1, 2, 4, 8])
def test_any_alignment_and_row_size(row_bytes: int, offset: int) -> None:
    # Every unit from 16 bytes down to 1 is used by some pair; guard bytes on both sides stay unchanged.
    shape = (2, 2, 3, 11, row_bytes)
    size = int(np.prod(shape))
    memory = random_bytes(size + 64, seed=row_bytes)
    start = -memory.ctypes.data % 16 + 16 + offset
    kv = memory[start : start + size].reshape(shape)
    lens, path, accepted = [4, 0], [[0, 2, 3, 6], [1, 2, 9, 10]], [3, 2]
    expected = memory.copy()
    expected[start : start + size] = gathered(kv, lens, path, accepted).ravel()
    assert call(kv, lens, path, accepted) == 0
    np.testing.assert_array_equal(memory, expected)


@pytest.mark.parametrize("row_bytes", [1, 6, 16])
@pytest.mark.parametrize("steps", [1, 7, 8, 9, 17, 64, 257])
def test_paths_longer_than_a_chunk(steps: int, row_bytes: int) -> None:
    """Rows move in chunks of eight: sources within, across and after the chunk of their targets."""
    random = np.random.default_rng(steps * 31 + row_bytes)
    for room in {steps, steps + 1, steps + 5, 2 * steps, 2 * steps + 40}:
        path = sorted(int(node) for node in random.choice(room, steps, replace=False))
        for accepted in {-1, 0, int(random.integers(-1, steps)), steps - 1}:
            kv = random_bytes(1, 1, 2, room + 3, row_bytes, seed=room)
            expected = gathered(kv, [2], [path], [accepted])
            assert call(kv, [2], [path], [accepted]) == 0
            np.testing.assert_array_equal(kv, expected)


@pytest.mark.parametrize("bad", [7, 8, 19])
def test_a_path_that_stops_ascending_late_is_refused(bad: int) -> None:
    """At a chunk's last index, the next one's first index and in the last chunk; shorter accepted lengths pass."""
    path = list(range(1, 21))
    path[bad] = path[bad - 1]
    kv = random_bytes(1, 1, 1, 30, 4)
    before = kv.copy()
    for accepted in range(bad, 20):
        assert call(kv, [2], [path], [accepted]) == 2
        np.testing.assert_array_equal(kv, before)
    expected = gathered(kv, [2], [path], [bad - 1])
    assert call(kv, [2], [path], [bad - 1]) == 0
    np.testing.assert_array_equal(kv, expected)


@pytest.mark.parametrize(
    ("cache_len", "path", "accepted", "code"),
    [
        (6, [0, 1, 4], 2, 1),
        (10, [0, 1, 2], 0, 1),
        (-1, [1, 2, 3], 2, 1),
        (2147483647, [0, 1, 2], 2, 1),
        (2, [0, 2, 2], 2, 2),
        (2, [1, 0, 2], 2, 2),
        (2, [-1, 1, 2], 2, 2),
        (2, [0, 2, -2147483648], 2, 2),
        (2, [0, 1, 2], 3, 3),
        (2, [0, 1, 2], -2, 3),
    ],
    ids=["beyond", "full", "negative", "overflow", "equal", "descending", "before", "lowest", "accept", "accept-low"],
)
def test_refused_arguments_move_nothing(cache_len: int, path: list[int], accepted: int, code: int) -> None:
    # The first batch row is valid and would move; the second is refused.
    kv = random_bytes(2, 2, 1, 10, 16)
    before = kv.copy()
    assert call(kv, [1, cache_len], [[0, 3, 5], path], [2, accepted]) == code
    np.testing.assert_array_equal(kv, before)


def test_only_the_first_slots_of_each_layer_move() -> None:
    kv = random_bytes(4, 5, 2, 9, 8)
    before, (lens, path, accepted) = kv.copy(), ([3, 2], [[1, 4], [2, 6]], [1, 1])
    assert call(kv, lens, path, accepted) == 0
    np.testing.assert_array_equal(kv[:, :2], gathered(before[:, :2], lens, path, accepted))
    np.testing.assert_array_equal(kv[:, 2:], before[:, 2:])


READ_ONLY = """
import ctypes, mmap, sys
import numpy as np
library = ctypes.CDLL(sys.argv[1])
# Eight rows of 64 bytes that the system lets no one write to.
page = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ), dtype=np.uint8)
lens, path, accepted = (np.array(a, np.int32) for a in ([1], eval(sys.argv[2]), [3]))
integers = [ctypes.c_int64(n) for n in (1, 1, 1, 1, 1, 8, 64)]
at = lambda array: ctypes.c_void_p(array.ctypes.data)
sys.exit(library.medusa_kv_compact_cpu(at(page), *integers, at(lens), at(path), ctypes.c_int64(4), at(accepted), None))
"""


@pytest.mark.parametrize(("path", "status"), [("[0, 1, 2, 3]", 0), ("[0, 1, 2, 4]", -signal.SIGSEGV)])
def test_rows_already_in_place_are_not_written(path: str, status: int) -> None:
    library = str(_native.LIBRARY_FOLDER / "libmedusa_cpu.so")
    assert subprocess.run([sys.executable, "-c", READ_ONLY, library, path], check=False).returncode == status


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(_native, "LIBRARY_FOLDER", tmp_path)
    return tmp_path


def test_missing_library_repeats_the_build_error(empty_folder: Path) -> None:
    facts = {"cpu": {"built": True}, "cuda": {"built": False, "why": "no compiler of that kind"}}
    (empty_folder / "build.json").write_text(json.dumps(facts))
    assert _native.cuda_library() is None
    assert _native.why_missing("cuda") == "the CUDA library was not built: no compiler of that kind"
    assert _native.build_info() == facts


def test_library_of_another_version_is_refused(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = Path(_native.__file__).parent / "_lib" / "libmedusa_cpu.so"
    shutil.copy(built, empty_folder)
    monkeypatch.setattr(_native, "ABI_VERSION", _native.ABI_VERSION + 41)
    assert _native.cpu_library() is None
    assert re.search(r"expected ABI version 48, got 7\b", _native.why_missing("cpu"))


def test_cuda_library_loads_without_a_device() -> None:
    library = _native.cuda_library()
    if library is None:
        assert not _native.build_info()["cuda"]["built"], _native.why_missing("cuda")
        pytest.skip(_native.why_missing("cuda"))
    assert _native.why_missing("cuda") == ""
    assert library.medusa_cuda_error_string(1) == b"invalid argument"
    # Nothing is launched, so no device is needed.
    assert library.medusa_kv_compact_cuda(None, 0, 1, 1, 1, 1, 8, 16, None, None, 4, None, None, None) == 0
