"""What serves the CPU ops with and without the C++ library, and in a forked process."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
import test_decode_linear
import test_decoder_layers
import torch
from modes import of_the_cpu

from medusa_kernels import _native, _registry, selftest, served_by
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
    assert {"decode_linear", "decoder_layers", "heads_topk", "tree_verify", "tree_accept", "gumbel_noise"} <= SERVED
    for op in SERVED - {"kv_compact"}:
        assert f"C++ with {_native.instruction_set()}" in served_by(op, "cpu").reason


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
    case = test_decoder_layers.make(7, [9, 70], norms="heads", biases=True, int8=("o",), dtype=dtype)
    test_decoder_layers.check(case)


def forked(case: test_decoder_layers.Case, wanted: torch.Tensor) -> None:
    os._exit(0 if torch.equal(test_decoder_layers.run(case)[0], wanted) else 3)


def test_a_process_forked_after_a_call_computes_too() -> None:
    """The threads of the library are not in the new process."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        case = test_decoder_layers.make(7, [9, 70], width=256, inner=512)
        wanted, _ = test_decoder_layers.run(case)
        child = multiprocessing.get_context("fork").Process(target=forked, args=(case, wanted))
        child.start()
        child.join(60)
        still_running = child.is_alive()
        if still_running:
            child.kill()
        assert not still_running
        assert child.exitcode == 0
    finally:
        torch.set_num_threads(before)
