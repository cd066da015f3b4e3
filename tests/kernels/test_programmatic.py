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
from benchmarks.kernel_forms import forms
from medusa_kernels import _registry, selftest
from medusa_kernels._registry import Implementation, interpreted
from medusa_kernels._triton import launch

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
    monkeypatch.setattr(launch, "programmatic", lambda device: pdl)
    monkeypatch.setattr(JITFunction, "run", lambda self, *_, **options: found.update({self.fn.__name__: options}))
    selftest.run("cpu")
    return found


def test_every_kernel_is_launched_programmatically_(monkeypatch: pytest.MonkeyPatch) -> None:
    found = launched(monkeypatch, pdl=True)
    assert found.keys() == (STREAMING | OTHERS) - {"_decode_linear_kernel"}
    assert all(options["PDL"] and options["launch_pdl"] for options in found.values())


def test_no_kernel_is_where_the_device_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    found = launched(monkeypatch, pdl=False)
    assert found.keys() == (STREAMING | OTHERS) - {"_decode_linear_kernel"}
    for options in found.values():
        assert not options["PDL"]
        assert "launch_pdl" not in options


def compiled(op: str, name: str) -> str:
    """Compile the first form of this kernel and kind for sm_90; return its PTX."""
    for spec in forms(op, TARGETS["90"]):
        constants, (kernel, *flags) = spec.constants, name.split()
        if spec.kernel.fn.__name__ == kernel and constants["PDL"] and all(constants[flag] for flag in flags):
            return inspection.compiled(spec, "90").asm["ptx"]
    raise AssertionError(f"no form of {op} {name}")


KERNELS = {
    "heads_topk": ("residual_kernel", "vocabulary_kernel GATHER", "merge_kernel"),
    "tree_verify": ("project_kernel", "merge_kernel"),
    "tree_accept": ("_tree_accept_kernel",),
    "tree_select": ("_tree_select_kernel",),
    "gumbel_noise": ("_gumbel_noise_kernel",),
    "add_rms_norm": ("_add_rms_norm_kernel",),
    "decode_linear": ("_decode_linear_kernel",),
    "rope_append": ("_rope_append_kernel HAS_NORM",),
    "tree_attention": ("attend_kernel",),
}
SMALL = {"_add_rms_norm_kernel", "_rope_append_kernel"}
"""Those whose programs start the next kernel as soon as they have waited."""


@pytest.mark.slow
@pytest.mark.parametrize(("op", "name"), [(op, name) for op, names in KERNELS.items() for name in names])
def test_a_kernel_waits_before_it_reads_or_writes(op: str, name: str) -> None:
    """In the order of the compiled code; the next kernel may start after the last load."""
    ptx = compiled(op, name)
    (wait,) = (match.start() for match in re.finditer(r"griddepcontrol\.wait", ptx))
    (launches,) = (match.start() for match in re.finditer(r"griddepcontrol\.launch_dependents", ptx))
    touches = [match.start() for match in re.finditer(r"\b(ld|st|red|atom)\.global|cp\.async\.[bc]\w*\.shared", ptx)]
    loads = [match.start() for match in re.finditer(r"\bld\.global|cp\.async\.[bc]\w*\.shared", ptx)]
    assert wait < min(touches)
    assert launches > (wait if name.split()[0] in SMALL else max(loads))
