"""Programmatic launches: what a launch asks for, and that a kernel reads and writes nothing before it has waited."""

from __future__ import annotations

import importlib
import re
from typing import Any

import pytest
import torch
from triton.runtime.jit import JITFunction

from benchmarks import inspection
from benchmarks.inspection import TARGETS
from benchmarks.kernel_forms import FORMS
from medusa_kernels import _registry, selftest
from medusa_kernels._registry import Implementation, interpreted
from medusa_kernels._triton import launch, streaming

pytestmark = pytest.mark.skipif(interpreted(), reason="the interpreter has no programmatic launches")
OPS = ("heads_topk", "tree_verify", "tree_accept", "tree_select", "gumbel_noise")
MODULES = {op: importlib.import_module(f"medusa_kernels._triton.{op}") for op in OPS}
STREAMING = {"residual_kernel", "vocabulary_kernel", "project_kernel", "_decode_linear_kernel"}
OTHERS = {"merge_kernel", "_tree_accept_kernel", "_tree_select_kernel", "_gumbel_noise_kernel"}


def launched(monkeypatch: pytest.MonkeyPatch, *, pdl: bool) -> dict[str, dict[str, Any]]:
    """Launch the kernels of the self-test as on an H200; return the options of each by its name."""
    found: dict[str, dict[str, Any]] = {}
    cpu = torch.device("cpu")
    chosen = {(op, cpu): Implementation("triton", getattr(module, op), "") for op, module in MODULES.items()}
    monkeypatch.setattr(_registry, "_chosen", chosen)
    for module in (launch, *MODULES.values()):
        monkeypatch.setattr(module, "describe", lambda device: TARGETS["90"], raising=False)
    for module in MODULES.values():
        monkeypatch.setattr(module, "programmatic", lambda device: pdl)
    monkeypatch.setattr(JITFunction, "run", lambda self, *_, **options: found.update({self.fn.__name__: options}))
    selftest.run("cpu")
    return found


def test_every_kernel_is_launched_programmatically_and_lets_the_next_start_early(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = launched(monkeypatch, pdl=True)
    assert found.keys() == (STREAMING | OTHERS) - {"_decode_linear_kernel"}
    assert all(options["PDL"] and options["EARLY"] and options["launch_pdl"] for options in found.values())
    assert {name for name, options in found.items() if options.get("PREFETCH", 0) > 0} == STREAMING & found.keys()


def test_no_kernel_is_where_the_device_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    found = launched(monkeypatch, pdl=False)
    assert found.keys() == (STREAMING | OTHERS) - {"_decode_linear_kernel"}
    for options in found.values():
        assert not options["PDL"]
        assert not options["EARLY"]
        assert not options.get("PREFETCH", 0)
        assert "launch_pdl" not in options


def test_programs_that_wait_for_room_do_not_let_the_next_start_early(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (streaming, *MODULES.values()):
        monkeypatch.setattr(module, "at_once", lambda *_: False, raising=False)
    assert not any(options["EARLY"] for options in launched(monkeypatch, pdl=True).values())


def test_rows_are_prefetched_in_16_byte_units_of_their_own() -> None:
    weight = torch.zeros(8, 256, dtype=torch.bfloat16)
    assert streaming.prefetch_bytes(weight, 16, 128, True) == 256
    assert streaming.prefetch_bytes(weight, 8, 128, True) == 256
    assert streaming.prefetch_bytes(weight, 16, 4096, True) == 512  # no more than the row has
    assert streaming.prefetch_bytes(weight.to(torch.int8), 16, 128, True) == 128
    assert streaming.prefetch_bytes(weight, 16, 128, False) == 0
    assert streaming.prefetch_bytes(weight, 4, 128, True) == 0
    assert streaming.prefetch_bytes(weight.to(torch.int8), 8, 128, True) == 0
    assert streaming.prefetch_bytes(weight.view(-1)[1:-255].view(7, 256), 16, 128, True) == 0


def compiled(op: str, name: str, early: bool) -> tuple[str, str]:
    """Compile the first form of this kernel and kind for sm_90; return its PTX and its disassembly."""
    for spec in FORMS[op](TARGETS["90"]):
        constants, (kernel, *flags) = spec.constants, name.split()
        if spec.kernel.fn.__name__ == kernel and constants["EARLY"] == early and all(constants[flag] for flag in flags):
            module = importlib.import_module(f"medusa_kernels._triton.{op}")
            found = inspection.compiled(spec, "90", getattr(module, "OPTIONS", launch.OPTIONS))
            return found.asm["ptx"], inspection.disassembled(found)
    raise AssertionError(f"no form of {op} {name}, early: {early}")


KERNELS = [
    ("heads_topk", "residual_kernel", True),
    ("heads_topk", "vocabulary_kernel GATHER", True),
    ("heads_topk", "merge_kernel", True),
    ("tree_verify", "project_kernel", True),
    ("tree_verify", "merge_kernel", True),
    ("tree_verify", "merge_kernel", False),
    ("tree_accept", "_tree_accept_kernel", False),
    ("tree_select", "_tree_select_kernel", True),
    ("gumbel_noise", "_gumbel_noise_kernel", True),
    ("add_rms_norm", "_add_rms_norm_kernel", True),
    ("decode_linear", "_decode_linear_kernel", True),
    ("rope_append", "_rope_append_kernel HAS_NORM", True),
    ("tree_attention", "attend_kernel MERGES", True),
]


@pytest.mark.slow
@pytest.mark.parametrize(("op", "name", "early"), KERNELS)
def test_a_kernel_waits_before_it_reads_or_writes(op: str, name: str, early: bool) -> None:
    """In the order of the compiled code. Weights are prefetched before, but not those that a map names."""
    ptx, disassembly = compiled(op, name, early)
    (wait,) = (match.start() for match in re.finditer(r"griddepcontrol\.wait", ptx))
    (launches,) = (match.start() for match in re.finditer(r"griddepcontrol\.launch_dependents", ptx))
    assert (launches < wait) == early
    touches = [match.start() for match in re.finditer(r"\b(ld|st|red|atom)\.global|cp\.async\.[bc]\w*\.shared", ptx)]
    loads = [match.start() for match in re.finditer(r"\bld\.global|cp\.async\.[bc]\w*\.shared", ptx)]
    before = [place for place in touches if place < wait]
    assert not before
    if not early:
        assert launches > max(loads)
    prefetches = len(re.findall(r"cp\.async\.bulk\.prefetch\.L2", ptx[:wait]))
    assert (prefetches > 0) == (name.split()[0] in STREAMING and "GATHER" not in name)
    assert ("UBLKPF" in disassembly) == (prefetches > 0)
