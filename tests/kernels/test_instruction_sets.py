"""The C++ ops with every instruction set that this CPU has, against fp64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stored
import test_cache_rows
import test_decode_linear
import test_decoder_layers
import test_gumbel_noise
import test_heads_topk
import torch
from budget import assert_typical_error_within_twice, assert_within_twice
from modes import of_the_cpu
from torch import Tensor

from medusa_kernels import (
    _native,
    decode_linear,
    gumbel_noise,
    heads_topk,
    quantised,
    reference,
    served_by,
    tree_verify,
)

pytestmark = of_the_cpu
SETS = ("base", "avx2", "avx512", "avx512_vnni", "avx512_bf16")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=SETS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the C++ ops with one instruction set; skip if it was not compiled or the CPU lacks it."""
    library, name = _native.cpu_library(), str(request.param)
    assert library is not None, _native.why_missing("cpu")
    before = _native.instruction_set()
    if library.medusa_cpu_use(name.encode()) != 0:
        built = _native.build_info()["cpu"]["isas"]
        pytest.skip("this CPU lacks it" if name in built else f"not built: it was built for {', '.join(built)}")
    try:
        assert _native.instruction_set() == name
        yield name
    finally:
        assert library.medusa_cpu_use(before.encode()) == 0


def test_the_base_set_always_runs_and_unknown_ones_never() -> None:
    library, before = _native.cpu_library(), _native.instruction_set()
    assert library is not None
    assert library.medusa_cpu_use(b"avx1024") != 0
    assert _native.instruction_set() == before
    assert library.medusa_cpu_use(b"base") == 0
    assert library.medusa_cpu_use(before.encode()) == 0


def test_sets_are_those_of_the_source() -> None:
    """A set that is added needs a parameter here."""
    source = (Path(_native.__file__).parents[1] / "csrc" / "cpu" / "dispatch.cpp").read_text()
    assert {name for name in SETS if f"ops_{name}()" in source} == set(SETS)
    assert source.count("const Ops* ops_") == len(SETS)
    assert set(_native.build_info()["cpu"]["isas"]) <= set(SETS)


@pytest.mark.usefixtures("isa", "poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("form", test_decode_linear.FORMS)
def test_set_serves_decode_linear(form: str, int8: bool, dtype: torch.dtype) -> None:
    assert served_by("decode_linear", "cpu").name == "cpp"
    for rows in (1, 7, 130):
        for size in (5, 64, 193):
            test_decode_linear.check(
                test_decode_linear.make_form(form, rows, size, (70, 33, 1), int8=int8, dtype=dtype)
            )


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_of_decode_linear_stands_alone(dtype: torch.dtype, int8: bool) -> None:
    case = test_decode_linear.make_form("three", 130, 200, (140, 70, 33), int8=int8, dtype=dtype)
    wanted = test_decode_linear.run(case)
    for rows in (*range(1, 64), 65, 127):
        part = decode_linear(case["x"][130 - rows :], case["weights"], scales=case["scales"])
        assert torch.equal(part, wanted[130 - rows :])


@pytest.mark.usefixtures("isa", "poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", stored.KINDS)
def test_set_reads_stored_weights_and_each_row_alone(kind: str, dtype: torch.dtype) -> None:
    """Groups within a step, across steps and of several; more rows than a tile has, which are widened once.

    In the longest rows there are more groups than tables are made for at once.
    """
    sizes = (16, 16), (144, 16), (96, 32), (288, 96), (144, 48), (192, 64), (256, 128), (208, 0)
    for size, group in (*sizes, (1104, 16), (2656, 32), (2592, 96)):
        x = torch.randn(130 if size == 144 else 9, size).to(dtype)
        weights = [stored.make(kind, (rows, size), group) for rows in (70, 5)]
        options: dict[str, Any] = {"scales": [w.scale for w in weights], "codes": weights[0].codes}
        if kind == "zeros":
            options["zeros"] = [w.zero for w in weights]
        got = decode_linear(x, [w.weight for w in weights], **options)
        wide = torch.cat([w.dequantised() for w in weights])
        largest = (x.double().abs() @ wide.abs().T).max().item() if dtype == torch.float32 else None
        # bfloat16 numbers may be rounded before they are multiplied, as PyTorch's are here.
        assert_within_twice(got, torch.nn.functional.linear(x, wide.to(dtype)), x.double() @ wide.T, largest)
        for rows in (*range(1, 9), len(x) - 1):
            assert torch.equal(decode_linear(x[-rows:], [w.weight for w in weights], **options), got[-rows:])


@pytest.mark.usefixtures("isa", "poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_set_rounds_activations_beside_dynamic_weights(dtype: torch.dtype) -> None:
    """The activations here are multiples of their scales, so rounding them loses nothing, and integers are exact."""
    for group, rows, size in (
        (0, 1, 1), (0, 9, 16), (0, 130, 48), (0, 40, 200), (0, 300, 70),
        (32, 1, 32), (96, 9, 1248), (32, 130, 1312), (64, 300, 128),
    ):  # fmt: skip
        lowest = torch.full((rows, 1), -128.0)
        if group:
            lowest = -torch.randint(0, 256, (rows, 1)).float()
            lowest[0], lowest[-1] = 0, -255
        numbers = lowest + torch.randint(2, 254, (rows, size))
        numbers[:, :1], numbers[:, -1:] = lowest, lowest + 255
        step = 2.0 ** torch.randint(-9, 3, (rows, 1))
        if group:
            x = numbers * step
            weight, scale = quantised.pack(torch.randint(0, 16, (70, size))), torch.rand(70, size // group) + 0.5
        else:
            x = torch.where((numbers + 0.5).abs() == 127.5, (numbers + 0.5).sign() * 127.5, numbers) * step
            weight, scale = torch.randint(-128, 128, (70, size)).to(torch.int8), torch.rand(70) + 0.5
        options: dict[str, Any] = {"scales": [scale], "codes": "dynamic"}
        options["zeros"] = [quantised.row_sums(weight, scale)] if group else None
        got = decode_linear(x.to(dtype), [weight], **options)
        wide = numbers * step.double()
        of_weight = quantised.dequantised(weight, scale, wide=torch.float64)
        allowed = 2.0 ** (-21 if dtype == torch.float32 else -8) * (wide.abs() @ of_weight.abs().T)
        assert bool(((got - wide @ of_weight.T).abs() <= allowed).all())
        if rows <= 256:
            for few in (*range(1, 9), rows - 1):
                assert torch.equal(decode_linear(x[-few:].to(dtype), [weight], **options), got[-few:])
        if rows > 2:
            x[1, 3] = torch.inf
            assert decode_linear(x[:3], [weight], **options).isnan().all(1).tolist() == [False, True, False]


@pytest.mark.usefixtures("isa", "poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_set_reads_layers_whose_projections_are_stored_differently(dtype: torch.dtype) -> None:
    for group, kinds in (
        (16, {"qkv": "zeros", "o": "nf4", "gate": "fp8", "down": "int4"}),
        (32, {"qkv": "fp4", "o": "int8", "gate": "zeros"}),
    ):
        case = test_decoder_layers.make(
            7, [9, 70], dim=16, width=64, inner=96, biases=True, kinds=kinds, group=group, dtype=dtype
        )
        test_decoder_layers.check(case, within_twice=assert_typical_error_within_twice)


@pytest.mark.usefixtures("isa", "poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [2, 24, 80, 256])
@pytest.mark.parametrize("int8", [(), ("qkv", "o", "gate", "down")], ids=["floats", "int8"])
def test_set_serves_decoder_layers(int8: tuple[str, ...], dim: int, dtype: torch.dtype) -> None:
    case = test_decoder_layers.make(
        70, [100, 7], dim=dim, windows=(0, 70), norms="heads", biases=True, int8=int8, own_trees=True, dtype=dtype
    )
    test_decoder_layers.check(case, within_twice=assert_typical_error_within_twice)


@pytest.mark.usefixtures("isa", "poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_set_serves_layers_of_other_families(dtype: torch.dtype) -> None:
    options = test_decoder_layers.FAMILIES["all"]
    case = test_decoder_layers.make(9, [70, 7], dim=24, dtype=dtype, **options)
    test_decoder_layers.check(case, within_twice=assert_typical_error_within_twice)


@pytest.mark.usefixtures("isa", "poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", [None, torch.int8], ids=str)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("gather", [False, True])
def test_set_serves_heads_topk(gather: bool, shared: bool, stored: torch.dtype | None, dtype: torch.dtype) -> None:
    for size, k in ((7, 1), (64, 32), (150, 9)):
        case = test_heads_topk.make(70 if size == 7 else 3, 2, size, 333, shared=shared, own_states=shared, dtype=dtype)
        scale = None
        if stored is not None:
            case["w2"] = (case["w2"].float() * 30).round().clamp(-127, 127).to(stored)
            scale = torch.rand(case["w2"].shape[:-1]) / 30
        ids = torch.randperm(333)[:101] if gather else None
        inputs = test_heads_topk.make_inputs(case, 2, 333) if size == 64 else {}
        logprobs, tokens = heads_topk(*case.values(), k, w2_scale=scale, token_map=ids, gather=gather, **inputs)
        if ids is not None:
            assert torch.isin(tokens, ids).all()
            tokens = (tokens[..., None] == ids).int().argmax(-1)
            case["w2"], scale = case["w2"][..., ids, :], None if scale is None else scale[..., ids]
            inputs |= {"noise": inputs["noise"][..., ids]} if inputs else {}
        test_heads_topk.check((logprobs, tokens), case, k, scale, **inputs)


@pytest.mark.usefixtures("isa", "poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("kind", ["zeros", "nf4", "fp8"])
def test_set_reads_stored_projections_in_heads_topk(kind: str, shared: bool, dtype: torch.dtype) -> None:
    """Rows that a map gathers have the scales and zero points of their own."""
    case = test_heads_topk.make(3, 2, 96, 333, shared=shared, dtype=dtype)
    w2 = stored.make(kind, tuple(case["w2"].shape), 32)
    ids = torch.randperm(333)[:101]
    options = {"w2_scale": w2.scale, "w2_zero": w2.zero, "codes": w2.codes}
    states = [case[name] for name in ("hidden", "w1", "b1")]
    logprobs, tokens = heads_topk(*states, w2.weight, 9, token_map=ids, gather=True, **options)
    case["w2"] = w2.dequantised()
    test_heads_topk.check(heads_topk(*states, w2.weight, 9, **options), case, 9)
    case["w2"] = case["w2"][..., ids, :]
    test_heads_topk.check((logprobs, (tokens[..., None] == ids).int().argmax(-1)), case, 9)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_heads_topk_takes_the_first_of_equal_logits_and_nan_last(dtype: torch.dtype) -> None:
    """Logits of small whole numbers, exact in any order of additions: some equal, some NaN, most below."""
    for vocabulary in (33, 100, 1000):
        logits = torch.randint(0, 6, (vocabulary,)).float()
        w2 = torch.stack((logits, torch.zeros(vocabulary)), -1)
        places = torch.randperm(vocabulary)[: vocabulary // 4]
        w2[places] = torch.nan
        hidden, w1 = torch.tensor([[1.0, 0.0]]), torch.zeros(1, 2, 2)
        _, tokens = heads_topk(hidden.to(dtype), w1.to(dtype), None, w2[None].to(dtype), 20)
        logits[places] = -torch.inf
        assert tokens[0, 0].tolist() == logits.sort(descending=True, stable=True).indices[:20].tolist()


def verify(hidden: Tensor, weight: Tensor, **options: Any) -> Tensor:
    candidates = torch.zeros(hidden.shape[:2], dtype=torch.int64)
    return tree_verify(hidden, weight, candidates, want_stats=False, **options)[0]


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 130])
def test_set_serves_tree_verify(rows: int, dtype: torch.dtype) -> None:
    for size, vocabulary in ((3, 1), (64, 1000), (150, 2049)):
        hidden, weight = torch.randn(1, rows, size).to(dtype), torch.randn(vocabulary, size).to(dtype)
        tokens, logits = verify(hidden, weight), hidden.double() @ weight.double().T
        # Logits are rounded to the dtype: another token may be chosen within two roundings.
        error = 2 * torch.finfo(dtype).eps * (hidden.abs().double() @ weight.abs().double().T).max()
        assert (logits.gather(-1, tokens[..., None])[..., 0] >= logits.amax(-1) - error).all()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tree_verify_takes_the_first_of_equal_logits_and_nan(dtype: torch.dtype) -> None:
    for vocabulary in (2, 63, 512, 513, 3000):
        weight = torch.randint(-3, 4, (vocabulary, 8)).to(dtype)
        hidden = torch.randint(-3, 4, (2, 9, 8)).to(dtype)
        candidates = torch.zeros(2, 9, dtype=torch.int64)
        for options in ({}, {"divisor": 2.0, "softcap": 100.0}):
            found = verify(hidden, weight, **options)
            assert torch.equal(found, reference.tree_verify(hidden, weight, candidates, **options)[0])
        weight[torch.randperm(vocabulary)[:2], 3] = torch.nan
        assert torch.equal(verify(hidden, weight), reference.tree_verify(hidden, weight, candidates)[0])
        assert torch.equal(verify(hidden * torch.nan, weight), torch.zeros_like(candidates))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_set_reads_stored_weights_in_tree_verify(dtype: torch.dtype) -> None:
    """Whole numbers, exact in any order of additions, and many of them equal."""
    hidden = torch.randint(-3, 4, (2, 9, 32)).to(dtype)
    candidates = torch.zeros(2, 9, dtype=torch.int64)
    for kind in ("int4", "zeros", "fp8"):
        weight, scale, zero, codes = stored.make(kind, (1500, 32), 16)
        weight, scale = ((weight.float() * 64).round().to(weight.dtype) if kind == "fp8" else weight), scale.round() + 2
        options: dict[str, Any] = {"weight_scale": scale, "weight_zero": zero, "codes": codes}
        logits = hidden.double() @ stored.Stored(weight, scale, zero, codes).dequantised().T
        assert torch.equal(verify(hidden, weight, **options), logits.to(dtype).argmax(-1))
        columns = weight.T.contiguous().T
        assert torch.equal(tree_verify(hidden, columns, candidates, **options)[0], logits.to(dtype).argmax(-1))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_set_rounds_states_before_a_dynamic_lm_head(kind: str, dtype: torch.dtype) -> None:
    """Verification and heads see the logits of `decode_linear`, and those of the statistics are near them."""
    hidden, lm_head = torch.randn(2, 9, 96).to(dtype), stored.make(kind, (1500, 96), 32)
    weight, scale = lm_head.weight, lm_head.scale
    sums = quantised.row_sums(weight, scale) if kind == "int4" else None
    logits = decode_linear(hidden, [weight], scales=[scale], zeros=None if sums is None else [sums], codes="dynamic")
    candidates = torch.zeros(2, 9, dtype=torch.int64)
    given = {"weight_scale": scale, "weight_zero": sums, "codes": "dynamic"}
    assert torch.equal(verify(hidden, weight, **given), logits.argmax(-1))
    _, logsumexp, *_ = tree_verify(hidden, weight, candidates, **given)
    error = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(logsumexp, logits.float().logsumexp(-1), rtol=0, atol=error)
    w1 = torch.zeros(2, 96, 96, dtype=dtype)  # states are the hidden states
    logits, rows = logits[:, :1].float(), torch.randperm(1500)[:700]
    logprobs, _ = heads_topk(hidden[:, 0], w1, None, weight, 9, w2_scale=scale, w2_zero=sums, codes="dynamic")
    wanted = logits.log_softmax(-1).topk(9).values.expand_as(logprobs)
    torch.testing.assert_close(logprobs, wanted, rtol=0, atol=error)
    own, scales, zeros = (None if t is None else torch.stack((t, t.flip(0))) for t in (weight, scale, sums))
    options: dict[str, Any] = {"w2_scale": scales, "w2_zero": zeros, "codes": "dynamic", "gather": True}
    logprobs, _ = heads_topk(hidden[:, 0], w1, None, own, 9, token_map=rows, **options)
    of_heads = torch.cat((logits, logits.flip(-1)), 1)[..., rows]
    torch.testing.assert_close(logprobs, of_heads.log_softmax(-1).topk(9).values, rtol=0, atol=error)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_set_samples_in_tree_verify(dtype: torch.dtype) -> None:
    """Whole numbers, exact in any order of additions, and many of them equal."""
    for vocabulary in (1, 63, 512, 513, 3000):
        weight = torch.randint(-3, 4, (vocabulary, 8)).to(dtype)
        hidden = torch.randint(-3, 4, (2, 9, 8)).to(dtype)
        noise, candidates = torch.randint(-9, 10, (2, 9, vocabulary)).float(), torch.zeros(2, 9, dtype=torch.int64)
        found = tree_verify(hidden, weight, candidates, temperature=0.5, noise=noise, want_stats=False)[0]
        assert torch.equal(found, (2 * hidden.double() @ weight.double().T + noise).argmax(-1))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_node_of_tree_verify_samples_alone(dtype: torch.dtype) -> None:
    """Noise that leaves of the logits only how they were rounded, so that another order of a sum would show."""
    weight, hidden = torch.randn(3000, 150).to(dtype), torch.randn(1, 64, 150).to(dtype)
    noise, rows = -(hidden.float() @ weight.float().T).to(dtype).float(), torch.arange(64, dtype=torch.int32)
    candidates = torch.zeros(1, 64, dtype=torch.int64)

    def sampled(part: slice) -> Tensor:
        options = {"temperature": 1.0, "noise": noise, "want_stats": False}
        return tree_verify(hidden[:, part], weight, candidates[:, part], noise_rows=rows[part], **options)[0]

    whole = sampled(slice(None))
    for part in (slice(0, 1), slice(3, 9), slice(20, 64)):
        assert torch.equal(sampled(part), whole[:, part])


@pytest.mark.usefixtures("isa", "poisoned_memory")
def test_set_serves_gumbel_noise() -> None:
    """Whole vectors and parts of one, more than a thread's piece, places beyond 31 bits; with any number of threads."""
    assert served_by("gumbel_noise", "cpu").name == "cpp"
    seeds, first = torch.tensor([7, -7]), torch.tensor([0, 2**31 - 1])
    before = torch.get_num_threads()
    try:
        for vocabulary in (1, 3, 16, 33, 100, 9001):
            torch.set_num_threads(1)
            alone = gumbel_noise(seeds, first, 3, vocabulary)
            torch.set_num_threads(3)
            assert torch.equal(gumbel_noise(seeds, first, 3, vocabulary), alone)
            test_gumbel_noise.check(alone[0, 2], 7, 2)
            test_gumbel_noise.check(alone[1, 1], -7, 2**31)
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("isa")
def test_one_hot_rows_return_columns_bit_for_bit() -> None:
    test_decode_linear.test_a_one_hot_row_returns_a_column_bit_for_bit("cpu", torch.bfloat16)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_set_serves_a_cache_in_8_bits(dtype: torch.dtype) -> None:
    test_cache_rows.test_layers_append_and_read_rows_in_8_bits("cpu", dtype, 80, {"windows": (0, 6)})


def test_small_numbers_of_fp8_are_no_zeros_where_denormal_floats_are() -> None:
    codes = torch.arange(64, dtype=torch.uint8).view(torch.float8_e4m3fn)[None]  # 1 to 7 are below the least exponent
    try:
        torch.set_flush_denormal(True)
        got = decode_linear(torch.eye(64), [codes], scales=[torch.ones(1)])
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(got[:, 0], codes[0].float())
