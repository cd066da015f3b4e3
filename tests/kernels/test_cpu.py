"""What serves the CPU ops with and without the C++ library, and the threads that it runs on."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import test_decode_linear
import test_decoder_layers
import torch
from modes import of_the_cpu

from medusa_kernels import _cpu, _native, _registry, selftest, served_by
from medusa_kernels._registry import OPS

pytestmark = of_the_cpu
SERVED = {op for op in OPS if served_by(op, "cpu").name == "cpp"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of libraries, and choices that are made anew."""
    monkeypatch.setattr(_registry, "_chosen", {})
    monkeypatch.setattr(_native, "LIBRARY_FOLDER", tmp_path)
    return tmp_path


def test_ops_that_the_library_serves() -> None:
    assert {"decode_linear", "decoder_layers", "heads_topk", "tree_verify", "tree_accept"} <= SERVED
    for op in SERVED - {"kv_compact"}:
        assert f"C++ with {_native.instruction_set()}, on PyTorch's threads" in served_by(op, "cpu").reason


@pytest.mark.usefixtures("folder")
def test_without_the_library_every_op_is_served_and_says_why() -> None:
    assert _native.instruction_set() == ""
    for op in OPS:
        chosen = served_by(op, "cpu")
        assert chosen.name != "cpp"
        assert (_native.why_missing("cpu") in chosen.reason) == (op in SERVED)
    assert "install with `pip install .`" in _native.why_missing("cpu")
    assert [result.op for result in selftest.run("cpu") if not result.passed] == []


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_without_the_library_int8_and_layers_are_right(dtype: torch.dtype) -> None:
    test_decode_linear.check(test_decode_linear.make_form("gate", 5, 40, (20, 0, 0), int8=True, dtype=dtype))
    test_decoder_layers.check(test_decoder_layers.make(7, [9, 70], norms=True, biases=True, int8=("o",), dtype=dtype))


def test_without_openmp_one_thread_serves_and_the_reason_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = test_decoder_layers.make(7, [9, 70])
    monkeypatch.undo()
    wanted, _ = test_decoder_layers.run(case)
    monkeypatch.setattr(_registry, "_chosen", {})
    monkeypatch.setattr(_native, "_parallel", lambda: 0)
    # A copy is another library, with its own variables.
    shutil.copy(_native.LIBRARY_FOLDER / "libmedusa_cpu.so", folder)
    monkeypatch.setattr(_native, "LIBRARY_FOLDER", folder)
    got, _ = test_decoder_layers.run(case)
    assert torch.equal(got, wanted)
    for op in SERVED - {"kv_compact"}:
        assert "on one thread: PyTorch's OpenMP runtime was not found" in served_by(op, "cpu").reason


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The numbers of threads that the library asks for; its work is then done by this one."""
    numbers: list[int] = []
    work_type = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

    @ctypes.CFUNCTYPE(None, work_type, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    def parallel(work, data, threads, flags):  # type: ignore[no-untyped-def]
        numbers.append(threads)
        for _ in range(threads):
            work(data)

    library = _native.cpu_library()
    assert library is not None, _native.why_missing("cpu")
    library.medusa_cpu_set_parallel(ctypes.cast(parallel, ctypes.c_void_p))
    yield numbers
    library.medusa_cpu_set_parallel(_native._parallel())


@pytest.mark.parametrize("threads", [1, 3])
def test_ops_ask_for_as_many_threads_as_pytorch_has(asked: list[int], threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        test_decode_linear.check(test_decode_linear.make_form("one", 5, 64, (1000, 0, 0)))
        test_decoder_layers.check(test_decoder_layers.make(7, [9, 70]))
    finally:
        torch.set_num_threads(before)
    assert max(asked, default=1) == threads
    assert (min(asked, default=1) >= 2) or threads == 1


@pytest.mark.usefixtures("folder")
def test_triton_s_interpreter_comes_before_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(_registry, "_chosen", {})
    for module in (_registry, _cpu):
        monkeypatch.setattr(module, "interpreted", lambda: True)
    assert {served_by(op, "cpu").name for op in SERVED - {"kv_compact"}} <= {"triton", "composed"}
