"""decode_linear against one output element at a time in fp64, written as sums of products."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import pytest
import stored
import torch
from budget import assert_within_twice
from hypothesis import given, settings
from hypothesis import strategies as st
from modes import DTYPES, of_the_cpu
from torch import Tensor
from transformers.activations import ACT2FN

from benchmarks.inspection import TARGETS
from medusa_kernels import add_rms_norm, decode_linear, reference
from medusa_kernels._registry import interpreted, served_by

Case = dict[str, Any]
ACTIVATIONS = {"silu": torch.nn.functional.silu, "gelu_tanh": ACT2FN["gelu_pytorch_tanh"]}
FORMS = ("one", "residual", "two", "three", "gate", "gate and residual")


def make(
    rows: int | tuple[int, ...],
    size: int,
    features: tuple[int, ...],
    *,
    biases: tuple[bool, ...] | None = None,
    gate: bool = False,
    residual: bool = False,
    int8: bool = False,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Case:
    """Random inputs; every weight is a slice of a larger matrix that is NaN elsewhere (int8: 127, with scales)."""
    shape = rows if isinstance(rows, tuple) else (rows,)

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes).to(device, dtype)

    weights = []
    for n in features:
        room = torch.full((n + 3, size + 16), 127 if int8 else torch.nan, device=device)
        room = room.to(torch.int8 if int8 else dtype)
        room[1 : n + 1, :size] = torch.randint(-128, 128, (n, size)) if int8 else random(n, size) / size**0.5
        weights.append(room[1 : n + 1, :size])
    return {
        "x": random(*shape, size),
        "weights": weights,
        "biases": None if biases is None else [random(n) if b else None for n, b in zip(features, biases, strict=True)],
        "gate": gate,
        "residual": random(*shape, sum(features)) if residual else None,
        "scales": [(torch.rand(n) + 0.5).to(device) / 64 / size**0.5 for n in features] if int8 else None,
        "activation": "silu",
        "factor": 1.0,
    }


def run(case: Case) -> Tensor:
    return decode_linear(**case)


def products(case: Case) -> list[Tensor]:
    """`(x W^T + b) factor` of each weight, with its part of the residual, as sums, in the case's dtype."""
    found = []
    for i, weight in enumerate(case["weights"]):
        if case["scales"] is not None:
            weight = weight * case["scales"][i][:, None]
        product = (case["x"][..., None, :] * weight).sum(-1)
        bias = None if case["biases"] is None else case["biases"][i]
        found.append((product if bias is None else product + bias) * case["factor"])
    return found if case["residual"] is None else with_residual(case, found)


def with_residual(case: Case, found: list[Tensor]) -> list[Tensor]:
    sizes = [len(weight) for weight in case["weights"]]
    return [one + part for one, part in zip(found, case["residual"].split(sizes, -1), strict=True)]


def exact(case: Case) -> Tensor:
    found = products(cast(case, torch.float64))
    return activated(case, found[0]) * found[1] if case["gate"] else torch.cat(found, -1)


def activated(case: Case, x: Tensor) -> Tensor:
    if case["activation"] == "silu":
        return x / (1 + torch.exp(-x))
    return x / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))


def plain(case: Case) -> Tensor:
    """The same in PyTorch's own layers, in the dtype of the case."""
    linear, activation = torch.nn.functional.linear, ACTIVATIONS[case["activation"]]
    weights = case["weights"]
    if case["scales"] is not None:
        weights = [(w * scale[:, None]).to(case["x"].dtype) for w, scale in zip(weights, case["scales"], strict=True)]
    given_biases = case["biases"] or [None] * len(weights)
    found = [linear(case["x"], w, b) * case["factor"] for w, b in zip(weights, given_biases, strict=True)]
    if case["residual"] is not None:
        found = with_residual(case, found)
    return activation(found[0]) * found[1] if case["gate"] else torch.cat(found, -1)


def largest(case: Case) -> float:
    """The largest sum of absolute terms of an element; gated twice the product of two, each of which is rounded."""
    magnitudes = products(cast(case, torch.float64, absolute=True))
    total = 2 * magnitudes[0] * magnitudes[1] if case["gate"] else torch.cat(magnitudes, -1)
    return total.max().item()


def cast(case: Case, dtype: torch.dtype, *, absolute: bool = False) -> Case:
    def of(value: Any) -> Any:
        if isinstance(value, list):
            return [of(item) for item in value]
        if not isinstance(value, Tensor):
            return value
        return value.to(dtype).abs() if absolute else value.to(dtype)

    return {name: of(value) for name, value in case.items()}


def check(case: Case) -> None:
    """Check a result against fp64; in fp32, plain PyTorch's error depends only on the order of additions."""
    got = run(case)
    assert got.dtype == case["x"].dtype
    assert got.is_contiguous()
    assert_within_twice(got, plain(case), exact(case), largest(case) if got.dtype == torch.float32 else None)


def make_form(form: str, rows: int, size: int, features: tuple[int, int, int], **options: Any) -> Case:
    residual = form in ("residual", "two", "gate and residual")
    if form.startswith("gate"):
        return make(rows, size, features[:1] * 2, gate=True, residual=residual, **options)
    count = {"one": 1, "residual": 1, "two": 2, "three": 3}[form]
    return make(rows, size, features[:count], residual=residual, **options)


@given(data=st.data())
@settings(max_examples=15 if interpreted() else 40)
def test_matches_sums_of_products(device: str, data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**16), label="seed"))
    gate = data.draw(st.booleans(), label="gate")
    count = 2 if gate else data.draw(st.integers(1, 3), label="count")
    own = data.draw(st.lists(st.integers(1, 150), min_size=count, max_size=count), label="features")
    biases = st.none() | st.lists(st.booleans(), min_size=count, max_size=count).map(tuple)
    case = make(
        data.draw(st.sampled_from([1, 2, 5, 16, 17, 64, 65]), label="rows"),
        data.draw(st.sampled_from([1, 3, 32, 50, 257]), label="size"),
        tuple(own[:1] * 2 if gate else own),
        biases=data.draw(biases, label="biases"),
        gate=gate,
        residual=data.draw(st.booleans(), label="residual"),
        device=device,
    )
    check(case)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 256), (17, 256), (64, 256), (65, 256), (257, 256), (40, 40), (40, 272)])
@pytest.mark.parametrize("form", FORMS)
def test_matches_fp64_for_all_rows_and_dtypes(device: str, form: str, rows: int, size: int, dtype: torch.dtype) -> None:
    """Columns in whole steps and not; the last tile of every weight is partial, or all of it."""
    check(make_form(form, rows, size, (140, 65, 1), dtype=dtype, device=device))


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [1, 40, 257])
@pytest.mark.parametrize("form", FORMS)
def test_int8_weights_have_a_scale_for_each_row(device: str, form: str, size: int, dtype: torch.dtype) -> None:
    for rows in (7, 64, 65):
        check(make_form(form, rows, size, (65, 33, 1), int8=True, dtype=dtype, device=device))
    check(make(5, size, (20, 20), biases=(True, False), gate=form == "gate", int8=True, dtype=dtype, device=device))


# The columns of a group of 4-bit codes, and the dtype of scales.
STORED = {
    "int4-128": ("int4", 128, torch.float32),
    "int4-32-zeros": ("zeros", 32, torch.float16),
    "int4-16-zeros": ("zeros", 16, torch.float32),
    "int4-row": ("int4", 384, torch.bfloat16),
    "nf4-64": ("nf4", 64, torch.float32),
    "fp4-96": ("fp4", 96, torch.float16),
    "fp8": ("fp8", 0, torch.float32),
}


def in_stored_weights(case: Case, name: str) -> tuple[Case, Case]:
    """Replace a case's weights by random ones in 4 or 8 bits, slices of larger matrices; also with them in fp64."""
    kind, group, scale_dtype = STORED[name]
    made = []
    for dense in case["weights"]:
        found = stored.make(kind, dense.shape, group).on(dense.device, scale_dtype)
        (n, width), dtype = found.weight.shape, found.weight.dtype
        room = torch.full((n + 3, width + 16), 0x7F, dtype=torch.uint8, device=dense.device).view(dtype)  # NaN in fp8
        room[1 : n + 1, :width] = found.weight
        made.append(found._replace(weight=room[1 : n + 1, :width]))
    weights, scales, zeros, codes = zip(*made, strict=True)
    options = {"scales": list(scales), "zeros": list(zeros) if kind == "zeros" else None, "codes": codes[0]}
    wide = case | {"weights": [one.dequantised() for one in made]}
    return case | {"weights": list(weights)} | options, wide


def check_stored(kind: str, case: Case, parts: int = 1) -> None:
    case, wide = in_stored_weights(case, kind)
    got = decode_linear(**case, parts=parts)
    rounded = cast(wide, case["x"].dtype)
    if parts > 1:
        got, rounded = got.sum(0), cast(rounded, torch.float32)
    wide = cast(wide, torch.float64)
    assert_within_twice(got, plain(rounded), exact(wide), largest(wide) if got.dtype == torch.float32 else None)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", STORED)
def test_weights_in_4_and_8_bits_are_those_of_the_oracle(device: str, kind: str, dtype: torch.dtype) -> None:
    """Rows of weights in partial tiles; every bias, gate, residual and part once with every kind of weight."""
    check_stored(kind, make(64, 384, (140, 33), biases=(True, False), dtype=dtype, device=device))
    check_stored(kind, make(17, 384, (70, 70), biases=(True, True), gate=True, dtype=dtype, device=device))
    check_stored(kind, make(1, 384, (65,), residual=True, dtype=dtype, device=device))
    check_stored(kind, make(16, 384, (140, 33, 70), biases=(True, False, True), dtype=dtype, device=device), parts=2)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(("size", "parts"), [(256, 2), (272, 3), (11, 5)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_parts_add_up_to_the_product(device: str, size: int, parts: int, dtype: torch.dtype) -> None:
    """Each is fp32 and not rounded: their sum is as exact as fp32; with few columns some parts have none."""
    for rows, features, int8 in (
        (1, (70,), False),
        (17, (70, 33), False),
        (64, (140, 70, 33), False),
        (3, (20,), True),
    ):
        case = make(rows, size, features, biases=(True, False, True)[: len(features)], int8=int8, device=device)
        case = {name: value if name == "scales" else _cast_floats(value, dtype) for name, value in case.items()}
        got = decode_linear(case["x"], case["weights"], case["biases"], scales=case["scales"], parts=parts)
        assert got.dtype == torch.float32
        assert got.shape == (parts, rows, sum(features))
        wide = cast(case, torch.float32)
        assert_within_twice(got.sum(0), plain(wide), exact(case), largest(case))


def _cast_floats(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list):
        return [_cast_floats(item, dtype) for item in value]
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


@of_the_cpu
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_row_depends_neither_on_rows_beside_it_nor_on_threads(form: str, dtype: torch.dtype, int8: bool) -> None:
    assert served_by("decode_linear", "cpu").name == "cpp"
    case = make_form(form, 64, 200, (140, 70, 33), int8=int8, dtype=dtype)
    wanted, threads = run(case), torch.get_num_threads()
    try:
        for count in (1, 5):
            torch.set_num_threads(count)
            assert torch.equal(run(case), wanted)
            for first, end in [(0, rows) for rows in range(1, 64)] + [(row, row + 1) for row in range(64)] + [(7, 20)]:
                part = {name: None if case[name] is None else case[name][first:end] for name in ("x", "residual")}
                assert torch.equal(run(case | part), wanted[first:end])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("present", [(True, True, True), (False, True, False)])
def test_biases_are_added(device: str, present: tuple[bool, ...], dtype: torch.dtype) -> None:
    check(make(3, 128, (70, 33, 20), biases=present, dtype=dtype, device=device))
    check(make(3, 128, (70, 70), biases=present[:2], gate=True, dtype=dtype, device=device))
    check(make(3, 128, (70,), biases=present[:1], residual=True, dtype=dtype, device=device))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [3, 257])
def test_gate_by_gelu(device: str, rows: int, dtype: torch.dtype) -> None:
    """As transformers' Gemma2MLP; 257 rows are PyTorch's on every device. Gates far from zero are closed or open."""
    options = {"gate": True, "dtype": dtype, "device": device}
    gelu = {"activation": "gelu_tanh"}
    check(make(rows, 72, (70, 70), biases=(True, True), residual=True, **options) | gelu)
    check(make(rows, 72, (33, 33), int8=True, **options) | gelu)
    check_stored("int4-32-zeros", make(rows, 384, (33, 33), **options) | gelu)
    gates = torch.tensor([[-1e4], [-20.0], [20.0], [1e4]]).to(device, dtype)
    got = decode_linear(torch.ones(rows, 1).to(device, dtype), [gates, torch.ones_like(gates)], gate=True, **gelu)
    torch.testing.assert_close(got, gates.T.relu().expand(rows, -1), rtol=0, atol=1e-34)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [3, 257])
def test_factor_of_products(device: str, rows: int, dtype: torch.dtype) -> None:
    """Granite's, before its decoder layer adds the residual; of products in parts each has it, and so has their sum."""
    options, factor = {"dtype": dtype, "device": device}, {"factor": 0.22}
    check(make(rows, 72, (70,), biases=(True,), residual=True, **options) | factor)
    check(make(rows, 72, (33, 20), biases=(True, False), int8=True, **options) | factor)
    for kind in ("int4-32-zeros", "fp8"):
        check_stored(kind, make(rows, 384, (33,), biases=(True,), residual=True, **options) | factor)
        check_stored(kind, make(rows, 384, (33, 20), biases=(True, False), **options) | factor, parts=2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 16, 32, 64])
@pytest.mark.parametrize(
    ("features", "size", "gate"),
    [
        ((4096, 4096, 4096), 4096, False),
        ((4096, 1024, 1024), 4096, False),
        ((4096,), 11008, False),
        ((11008, 11008), 4096, True),
        ((14336, 14336), 4096, True),
        ((28672,), 1024, False),
    ],
)
def test_shapes_of_llama(features: tuple[int, ...], size: int, gate: bool, rows: int, dtype: torch.dtype) -> None:
    """Every shape class that has a configuration of its own."""
    case = make(rows, size, features, gate=gate, residual=len(features) == 1, dtype=dtype)
    case = {name: _to_gpu(value) for name, value in case.items()}
    wide = cast(case, torch.float64)
    products = [wide["x"] @ weight.T for weight in wide["weights"]]
    expected = products[0] / (1 + torch.exp(-products[0])) * products[1] if gate else torch.cat(products, -1)
    if case["residual"] is not None:
        expected = expected + wide["residual"]
    got = run(case)
    assert_within_twice(got, plain(case), expected)
    assert torch.equal(got, run(case))


def _to_gpu(value: Any) -> Any:
    if isinstance(value, list):
        return [_to_gpu(item) for item in value]
    return value.to("cuda") if isinstance(value, Tensor) else value


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 64])
def test_programmatic_launches_are_bit_equal(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Two layers of kernels that each read the previous one's output, replayed from a CUDA graph."""
    layers = []
    for _ in range(2):
        shapes = ((512, (512, 256, 256)), (512, (1408, 1408)), (1408, (512,)))
        weights = [make(1, size, features, dtype=torch.bfloat16)["weights"] for size, features in shapes]
        norm = torch.rand(512, dtype=torch.bfloat16)
        layers.append(_to_gpu([norm, *weights]))
    inputs = torch.randn(2, rows, 512, dtype=torch.bfloat16, device="cuda")
    x = inputs[0].clone()

    def forward() -> Tensor:
        h = x
        for norm, qkv, gated, down in layers:
            h, normed = add_rms_norm(h, None, norm, 1e-5)
            attended = decode_linear(normed, qkv)[:, :512]
            h, normed = add_rms_norm(h, attended, norm, 1e-5)
            h = decode_linear(decode_linear(normed, gated, gate=True), down, residual=h)
        return h

    wanted = []
    monkeypatch.setattr("medusa_kernels._triton.launch.PROGRAMMATIC_LAUNCH", False)
    for given_x in inputs:
        x.copy_(given_x)
        wanted.append(forward())
    monkeypatch.setattr("medusa_kernels._triton.launch.PROGRAMMATIC_LAUNCH", True)
    assert torch.equal(forward(), wanted[1])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = forward()
    # The inputs alternate, so that results left over from the previous replay are wrong.
    for turn in range(100):
        x.copy_(inputs[turn % 2])
        graph.replay()
        assert torch.equal(got, wanted[turn % 2])


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("gate", [False, True])
def test_configurations_hold_all_rows_and_fit(arch: str, dtype: torch.dtype, gate: bool) -> None:
    module = pytest.importorskip("medusa_kernels._triton.decode_linear")
    device = TARGETS[arch]
    room = {"80": 163, "90": 227, "100": 227}.get(arch, 99) * 1024
    stored = [(0, 0), (8, 0), (4, 128), (4, 96), (4, 4096)]
    for rows, (bits, group) in itertools.product((1, 16, 17, 32, 33, 64), stored):
        for features in (64, 4096, 6144, 12288, 22016, 128256):
            for parts in (1,) if gate else (1, 2, 4):
                config = module.configuration(
                    device, dtype, rows, features, 4096, gate, parts=parts, bits=bits, group=group
                )
                # A step holds a tile of x and one of each weight, with columns of one group.
                weights = config.block_n * (1 + gate) * (bits / 8 or dtype.itemsize)
                step = (config.block_m * dtype.itemsize + weights) * config.block_k
                assert step * config.num_stages <= room
                assert group % config.block_k == 0
                assert config.num_stages >= 2
                assert rows <= config.block_m <= 64


@pytest.mark.skipif(interpreted(), reason="nothing is compiled in Triton's interpreter")
def test_fp32_sums_stay_compensated() -> None:
    """Every product begins at zero, and neither compiler folds the three further operations of each sum away."""
    inspection = pytest.importorskip("benchmarks.inspection")
    forms = pytest.importorskip("benchmarks.kernel_forms")
    specs = forms.forms("decode_linear", TARGETS["90"])
    spec = next(s for s in specs if "fp32" in s.name and "gate" not in s.name)
    kernel = inspection.compiled(spec, "90")
    (start,) = re.findall(r"tt\.dot %\w+, %\w+, (%\w+) ", kernel.asm["ttir"])
    assert f"{start} = arith.constant dense<0.0" in kernel.asm["ttir"]
    text = inspection.disassembled(kernel)
    columns, sums = spec.constants["BLOCK_K"], len(re.findall(r"\bFFMA\b", text)) // spec.constants["BLOCK_K"]
    assert columns == 16
    # Of each sum: the correction, the sum, and the two differences that make the next correction.
    assert sums > 0
    assert len(re.findall(r"\bFADD\b", text)) >= 4 * sums


@pytest.mark.parametrize("form", FORMS)
def test_leading_axes_and_strides_are_supported(device: str, form: str) -> None:
    """x and the residual as slices of larger tensors, whose other numbers are NaN."""
    case = make_form(form, 12, 48, (30, 20, 10), device=device)
    wanted = run(case)
    for name in ("x", "residual"):
        if case[name] is not None:
            tensor = case[name].view(3, 4, -1)
            apart = torch.full((3, 6, 2, tensor.shape[2] + 5), torch.nan, device=device)
            apart[:, 1:5, 0, 2:-3] = tensor
            case[name] = apart[:, 1:5, 0, 2:-3]
    assert torch.equal(run(case), wanted.view(3, 4, -1))
    case["x"] = case["x"].mT.contiguous().mT
    assert torch.equal(run(case), wanted.view(3, 4, -1))


def test_one_row_and_empty_inputs(device: str) -> None:
    case = make((7,), 1, (), device=device)
    case["weights"] = [torch.ones(4, 1, device=device)]
    single = decode_linear(torch.full((1,), 2.0, device=device), case["weights"])
    assert single.tolist() == [2.0, 2.0, 2.0, 2.0]
    none = decode_linear(torch.ones(0, 3, 1, device=device), [case["weights"][0]] * 3)
    assert none.shape == (0, 3, 12)


@pytest.mark.parametrize("form", FORMS)
def test_reference_in_fp64_is_exact(form: str) -> None:
    case = make_form(form, 3, 24, (9, 5, 2), dtype=torch.float64)
    if case["residual"] is None:
        case["biases"] = [torch.randn(w.shape[0], dtype=torch.float64) for w in case["weights"]]
    for options in ({}, {"activation": "gelu_tanh"} if case["gate"] else {"factor": 0.22}):
        got = reference.decode_linear(**(case | options))
        torch.testing.assert_close(got, exact(case | options), rtol=1e-12, atol=1e-12)


W = torch.zeros(5, 4)
BAD = {
    "x-dtype": ({"x": torch.zeros(2, 4).double()}, "x: expected dtype"),
    "x-columns": ({"x": torch.zeros(2, 0)}, r"x: expected shape \[\.\.\., K\] with K of at least 1, got \[2, 0\]"),
    "weights-many": ({"weights": [W] * 4}, "weights: expected 1 to 3 matrices, got 4"),
    "weights-size": ({"weights": [W, torch.zeros(5, 3)]}, r"weights\[1\]: expected shape \[N, 4\], got \[5, 3\]"),
    "weights-columns": ({"weights": [torch.zeros(4, 5).T]}, r"weights\[0\]: expected a row's elements adjacent"),
    "biases-count": ({"biases": [None, None]}, "biases: expected 1, one per weight, got 2"),
    "gate-shape": ({"gate": True, "weights": [W, torch.zeros(6, 4)]}, r"weights\[1\]: expected shape \[5, 4\]"),
    "residual-shape": ({"residual": torch.zeros(3, 5)}, r"residual: expected shape \[2, 5\]"),
    "parts-many": ({"parts": 5}, "parts: expected 1 to the 4 columns of x, got 5"),
    "activation": ({"activation": "relu"}, "activation: expected silu or gelu_tanh, got relu"),
    "factor-gate": ({"factor": 0.5, "gate": True, "weights": [W, W]}, "factor: expected 1 with gate, got 0.5"),
    "parts-gate": ({"parts": 2, "gate": True, "weights": [W, W]}, "parts: expected 1 with gate or residual, got 2"),
}


I8, SCALE = torch.zeros(5, 4, dtype=torch.int8), torch.ones(5)
BAD |= {
    "dynamic-columns": (
        {
            "x": torch.zeros(1, 2**17),
            "weights": [torch.zeros(1, 2**17).char()],
            "scales": [SCALE[:1]],
            "codes": "dynamic",
        },
        r"weights\[0\]: expected at most 131071 columns beside rounded activations, got 131072",
    ),
    "int8-without-scales": ({"weights": [I8]}, r"weights\[0\]: expected dtype float32 like x, got int8"),
    "scales-count": ({"weights": [I8], "scales": [SCALE] * 2}, "scales: expected 1, one per weight, got 2"),
    "scales-mixed": ({"weights": [I8, W], "scales": [SCALE, SCALE]}, r"weights\[1\]: expected dtype int8"),
    "dynamic-fp8": (
        {"weights": [I8.to(torch.float8_e4m3fn)], "scales": [SCALE], "codes": "dynamic"},
        "codes: expected dynamic only for int8 or int4 weights with scales, got it for torch.float8_e4m3fn",
    ),
    "dynamic-int4-without-sums": (
        {
            "x": torch.zeros(2, 32),
            "weights": [torch.zeros(5, 16, dtype=torch.uint8)],
            "scales": [torch.ones(5, 1)],
            "codes": "dynamic",
        },
        r"zeros\[0\]: expected the sums of the rows \(quantised.row_sums\), got None",
    ),
    "weights-device": ({"weights": [W.to("meta")]}, r"weights\[0\]: expected on cpu like x, got meta"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"x": torch.zeros(2, 4), "weights": [W]}
    with pytest.raises(ValueError, match=message):
        decode_linear(**(good | change))


@pytest.mark.parametrize("form", FORMS)
def test_passes_opcheck(device: str, form: str) -> None:
    case = make_form(form, 3, 16, (20, 6, 5), device=device)
    # opcheck compares clones of the inputs, for which NaN would never be equal.
    weights = [weight.contiguous() for weight in case["weights"]]
    biases = [None, *(weight[:, 0].contiguous() for weight in weights[1:])]
    options = {name: case[name] for name in ("gate", "residual")}
    forms = [(given_biases, options) for given_biases in (None, biases)]
    if form == "three":
        forms.append((biases, {"parts": 2}))
    for given_biases, given_options in forms:
        torch.library.opcheck(
            torch.ops.medusa_kernels.decode_linear.default, (case["x"], weights, given_biases), given_options
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_one_hot_row_returns_a_column_bit_for_bit(device: str, dtype: torch.dtype) -> None:
    weight = torch.randn(48, 64).to(device, dtype)
    for rows in (3, 64):
        parts = torch.eye(64).to(device, dtype).split(rows)
        assert torch.equal(torch.cat([decode_linear(x, [weight]) for x in parts]), weight.T)


def test_gates_far_below_zero_are_closed(device: str) -> None:
    """For a gate below -88, exp(-x) is beyond fp32."""
    gates = torch.tensor([-20.0, -88.0, -90.0, -200.0, -1e4], dtype=torch.float64)
    weights = [gates[:, None].float().to(device), torch.ones(5, 1, device=device)]
    got = decode_linear(torch.ones(1, 1, device=device), weights, gate=True)
    torch.testing.assert_close(got[0].cpu().double(), gates / (1 + torch.exp(-gates)), rtol=1e-4, atol=1e-34)


def test_gates_by_gelu_are_those_of_pytorch(device: str) -> None:
    """Tiny and large ones, and what is no number."""
    sizes = torch.logspace(-30, 12, 400)
    gates = torch.cat((-sizes[sizes < 1e4], torch.zeros(1), sizes, torch.tensor([math.inf, math.nan])))
    weights = [gates[:, None].to(device), torch.ones(len(gates), 1, device=device)]
    got = decode_linear(torch.ones(1, 1, device=device), weights, gate=True, activation="gelu_tanh")[0].cpu().double()
    exact = torch.nn.functional.gelu(gates.double(), approximate="tanh")
    torch.testing.assert_close(got, exact, rtol=1e-6, atol=1e-9, equal_nan=True)
    near = gates.abs() < 1
    torch.testing.assert_close(got[near], exact[near], rtol=1e-6, atol=0)
