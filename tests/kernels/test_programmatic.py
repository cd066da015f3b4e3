"""Programmatic launches: what a launch asks for, and that a kernel reads and writes nothing before it has waited."""

from __future__ import annotations

import re

import pytest
from test_configurations import launches

from benchmarks import inspection
from benchmarks.inspection import TARGETS
from benchmarks.kernel_forms import forms
from medusa_kernels._registry import interpreted

pytestmark = pytest.mark.skipif(interpreted(), reason="the interpreter has no programmatic launches")


@pytest.mark.parametrize("pdl", [True, False])
def test_kernels_are_launched_programmatically_where_the_device_can(monkeypatch: pytest.MonkeyPatch, pdl: bool) -> None:
    """All but `draw_tokens`, which PyTorch's operations come before."""
    for name, options in launches(monkeypatch, pdl=pdl):
        asks = pdl and not name.endswith("._draw_tokens_kernel")
        assert options.get("launch_pdl", "left out") == (True if asks else "left out"), name
        assert options.get("PDL", asks) == asks, name


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
