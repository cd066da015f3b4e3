"""add_rms_norm against a residual addition followed by transformers' norms, mostly Llama's, and against fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from budget import assert_typical_error_within_twice, assert_within_twice
from hypothesis import given, settings
from hypothesis import strategies as st
from modes import DTYPES
from torch import Tensor
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from benchmarks.inspection import TARGETS
from medusa_kernels import add_rms_norm, reference
from medusa_kernels._registry import interpreted

Case = tuple[Tensor, Tensor | None, Tensor]
NORMS = {None: LlamaRMSNorm, 0.0: Olmo2RMSNorm, 1.0: Gemma2RMSNorm}
"""By offset of the weight."""


def make(
    *shape: int, delta: bool = True, dtype: torch.dtype = torch.float32, device: str = "cpu", scale: float = 1.0
) -> Case:
    x, other = torch.randn(2, *shape).to(device, dtype) * scale
    return x, other if delta else None, (1 + torch.randn(shape[-1]) / 4).to(device, dtype)


def of_transformers(total: Tensor, weight: Tensor, eps: float, offset: float | None = None) -> Tensor:
    layer = NORMS[offset](weight.shape[0], eps)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    return layer(total)


def exact(total: Tensor, weight: Tensor, eps: float, offset: float | None = None) -> Tensor:
    """`(o + w) * s / sqrt(mean(s^2) + eps)` in fp64."""
    wide = total.double()
    return (
        ((offset or 0) + weight.double()) * wide / (wide.square().sum(-1, keepdim=True) / wide.shape[-1] + eps).sqrt()
    )


def check(case: Case, eps: float = 1e-5) -> None:
    x, delta, weight = case
    total, normed = add_rms_norm(*case, eps)
    # The sum has a single rounding, so it must be exact.
    assert torch.equal(total, x if delta is None else x + delta)
    assert normed.dtype == x.dtype
    assert normed.is_contiguous()
    assert_within_twice(normed, of_transformers(total, weight, eps), exact(total, weight, eps))


@given(data=st.data())
@settings(max_examples=15 if interpreted() else 40)
def test_matches_fp64(device: str, data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**16), label="seed"))
    shape = data.draw(st.lists(st.integers(1, 3), max_size=2), label="leading")
    case = make(
        *shape,
        data.draw(st.sampled_from([1, 2, 3, 17, 64, 100, 1025]), label="size"),
        delta=data.draw(st.booleans(), label="delta"),
        scale=data.draw(st.sampled_from([1e-4, 1.0, 1e3]), label="scale"),
        device=device,
    )
    check(case, data.draw(st.sampled_from([1e-6, 1e-5]), label="eps"))


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize(("rows", "size"), [(1, 4096), (65, 100), (3, 8192), (2, 12345)])
def test_matches_fp64_for_all_rows_sizes_and_dtypes(
    device: str, rows: int, size: int, delta: bool, dtype: torch.dtype
) -> None:
    check(make(rows, size, delta=delta, dtype=dtype, device=device))


@pytest.mark.parametrize("dtype", [*DTYPES[1:]], ids=str)
def test_rounds_at_the_same_points_as_transformers(device: str, dtype: torch.dtype) -> None:
    """Nearly all 16-bit results are equal: one rounding less, or at another point, would change every third."""
    x, delta, weight = make(64, 1024, dtype=dtype, device=device)
    total, normed = add_rms_norm(x, delta, weight, 1e-5)
    same = (normed == of_transformers(total, weight, 1e-5)).double().mean().item()
    once = exact(total, weight, 1e-5).to(dtype)
    assert (normed == once).double().mean().item() < 0.9
    assert same > 0.999


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", NORMS)
@pytest.mark.parametrize("parts", [0, 3])
def test_delta_is_normed_and_weights_have_an_offset(
    device: str, parts: int, offset: float | None, dtype: torch.dtype
) -> None:
    """As after the attention of OLMo 2 and Gemma 2; each 16-bit result is rounded where transformers rounds it."""
    x, delta, weight = make(5, 1000, dtype=dtype, device=device)
    assert delta is not None
    delta_norm, rounded = weight.flip(0), delta
    if parts:
        delta = torch.randn(parts, *x.shape, device=device)
        rounded = reference.added(delta).to(dtype)
    norms: dict[str, Any] = {"delta_norm": delta_norm, "norm_offset": offset}
    total, normed = add_rms_norm(x, delta, weight, 1e-5, **norms)
    plain_total = x + of_transformers(rounded, delta_norm, 1e-5, offset)
    assert_within_twice(total, plain_total, x.double() + exact(rounded, delta_norm, 1e-5, offset))
    plain = of_transformers(total, weight, 1e-5, offset)
    assert_within_twice(normed, plain, exact(total, weight, 1e-5, offset))
    if dtype != torch.float32:
        assert (total == plain_total).double().mean() > 0.999
        assert (normed == plain).double().mean() > 0.999
    alone, same = add_rms_norm(x, delta, None, 1e-5, **norms)
    assert same is alone
    assert torch.equal(alone, total)


@pytest.mark.parametrize("delta", [False, True])
def test_leading_axes_and_strides_are_supported(device: str, delta: bool) -> None:
    """Inputs as slices of larger tensors, whose other numbers are NaN."""
    case = make(3, 4, 40, delta=delta, device=device)
    wanted = add_rms_norm(*case, 1e-5)

    def apart(tensor: Tensor, step: int) -> Tensor:
        room = torch.full((*tensor.shape[:-1], 2, tensor.shape[-1] * step + 3), torch.nan, device=device)
        room[..., 1, 1:-2:step] = tensor
        return room[..., 1, 1:-2:step]

    x, other, weight = case
    for step in (1, 2):
        spread = apart(x, step), None if other is None else apart(other, step), apart(weight, step)
        for mine, theirs in zip(add_rms_norm(*spread, 1e-5), wanted, strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.skipif(interpreted(), reason="nothing is compiled in Triton's interpreter")
def test_fp32_divides_and_takes_roots_correctly_rounded() -> None:
    inspection = pytest.importorskip("benchmarks.inspection")
    forms = pytest.importorskip("benchmarks.kernel_forms")
    spec = next(s for s in forms.forms("add_rms_norm", TARGETS["90"]) if "fp32" in s.name)
    ptx = inspection.compiled(spec, "90").asm["ptx"]
    assert "sqrt.rn.f32" in ptx
    assert "div.rn.f32" in ptx
    assert not any(approximate in ptx for approximate in ("div.full", "approx"))


@pytest.mark.parametrize("delta", [False, True])
def test_reference_in_fp64_is_exact(delta: bool) -> None:
    case = make(3, 24, delta=delta, dtype=torch.float64)
    total, normed = reference.add_rms_norm(*case, 1e-5)
    assert torch.equal(total, case[0] if case[1] is None else case[0] + case[1])
    torch.testing.assert_close(normed, exact(total, case[2], 1e-5), rtol=1e-12, atol=1e-12)
    if case[1] is not None:
        total, normed = reference.add_rms_norm(*case, 1e-5, delta_norm=case[2], norm_offset=1.0)
        wanted = case[0] + exact(case[1], case[2], 1e-5, 1.0)
        torch.testing.assert_close(total, wanted, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(normed, exact(wanted, case[2], 1e-5, 1.0), rtol=1e-12, atol=1e-12)


BAD = {
    "x-empty": ({"x": torch.zeros(2, 0)}, "x: expected shape"),
    "x-dtype": ({"x": torch.zeros(2, 4).double()}, "x: expected dtype"),
    "delta-shape": ({"delta": torch.zeros(4)}, r"delta: expected shape \[2, 4\], got \[4\]"),
    "parts-shape": ({"delta": torch.zeros(3, 1, 4)}, r"delta: expected shape \[S, 2, 4\], got \[3, 1, 4\]"),
    "parts-none": ({"delta": torch.zeros(0, 2, 4)}, "delta: expected at least one part, got 0"),
    "weight-shape": ({"weight": torch.zeros(5)}, r"weight: expected shape \[4\]"),
    "weight-dtype": ({"weight": torch.zeros(4).half()}, "weight: expected dtype"),
    "weight-none": ({"weight": None}, "weight: expected a tensor, as there is no delta, got None"),
    "norm-alone": ({"delta_norm": torch.zeros(4)}, "delta_norm: expected None, as there is no delta"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"x": torch.zeros(2, 4), "delta": None, "weight": torch.zeros(4), "eps": 1e-5}
    with pytest.raises(ValueError, match=message):
        add_rms_norm(**(good | change))


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("parts", [1, 5])
def test_parts_are_added_in_order_and_rounded_once(device: str, parts: int, dtype: torch.dtype) -> None:
    for shape in ((1, 4096), (3, 5, 100)):
        x, _, weight = make(*shape, dtype=dtype, device=device)
        delta = torch.randn(parts, *shape, device=device)
        total, normed = add_rms_norm(x, delta, weight, 1e-5)
        wide = x.double() + delta.double().sum(0)
        assert_within_twice(total, (x.float() + delta.sum(0)).to(dtype), wide)
        assert_typical_error_within_twice(normed, of_transformers(total, weight, 1e-5), exact(total, weight, 1e-5))
        # Of sums that fp32 holds exactly only the rounding to the dtype of x is left.
        whole = torch.randint(-99, 100, (parts, *shape), device=device).float()
        rounded = add_rms_norm(torch.ones_like(x), whole, weight, 1e-5)[0]
        assert torch.equal(rounded, (1 + whole.sum(0)).to(dtype))


@pytest.mark.parametrize("delta", [False, True])
def test_passes_opcheck(device: str, delta: bool) -> None:
    case = make(2, 3, 16, delta=delta, device=device)
    torch.library.opcheck(torch.ops.medusa_kernels.add_rms_norm.default, (*case, 1e-5))
    if delta:
        parts = torch.randn(2, *case[0].shape, device=device)
        torch.library.opcheck(torch.ops.medusa_kernels.add_rms_norm.default, (case[0], parts, case[2], 1e-5))
        norms = {"delta_norm": case[2], "norm_offset": 1.0}
        torch.library.opcheck(torch.ops.medusa_kernels.add_rms_norm.default, (*case[:2], None, 1e-5), norms)
        permuted = case[0].transpose(0, 1), parts.transpose(1, 2), case[2], 1e-5
        torch.library.opcheck(torch.ops.medusa_kernels.add_rms_norm.default, permuted)
