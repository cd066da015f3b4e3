"""heads_topk against one head and one row at a time in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import stored
import torch
from budget import allowed
from hypothesis import given
from hypothesis import strategies as st
from modes import DTYPES, not_finite, of_the_cpu, reads_values
from torch import Tensor

from medusa_kernels import heads_topk, reference
from medusa_kernels._registry import served_by

Case = dict[str, Any]


def make(
    batch: int,
    heads: int,
    size: int,
    vocabulary: int,
    *,
    shared: bool = False,
    bias: bool = True,
    own_states: bool = False,
    blocks: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Case:
    of_blocks = (heads,) if blocks is None else (heads, blocks)
    tensors = {
        "hidden": torch.randn((batch, heads, size) if own_states else (batch, size)),
        "w1": torch.randn(*of_blocks, size, size) / size**0.5,
        "b1": torch.randn(*of_blocks, size) if bias else None,
        "w2": torch.randn((vocabulary, size) if shared else (heads, vocabulary, size)),
    }
    return {name: None if t is None else t.to(device, dtype) for name, t in tensors.items()}


def make_inputs(case: Case, rows: int, ids: int) -> Case:
    """A root of another size than the states, noise of so many rows and ids in a larger tensor, and a temperature."""
    hidden, (heads, *_, size) = case["hidden"], case["w1"].shape
    noise = torch.full((len(hidden), rows + 1, ids + 3), torch.nan, device=hidden.device)
    noise = noise[:, 1:, 2:-1].copy_(-torch.empty(len(hidden), rows, ids).exponential_().log())
    root, w_root = torch.randn(len(hidden), size + 3), torch.randn(heads, size, size + 3) / size**0.5
    return {"root": root.to(hidden), "w_root": w_root.to(hidden), "temperature": 0.7, "noise": noise}


def exact_logits(
    case: Case,
    scale: Tensor | None = None,
    *,
    root: Tensor | None = None,
    w_root: Tensor | None = None,
    temperature: float = 1.0,
    noise: Tensor | None = None,
    divisor: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Every head's x of every token in fp64, `[B, K, V']`, one head and one row at a time; noise is `[B, R, V']`."""

    def of_head(b: int, head: int) -> Tensor:
        state = (case["hidden"][b] if case["hidden"].dim() == 2 else case["hidden"][b, head]).double()
        size = len(state)
        if root is not None and w_root is not None:
            state = state + w_root[head].double() @ root[b].double()
        for block, weight in enumerate(case["w1"][head].double().view(-1, size, size)):
            inner = weight @ state
            if case["b1"] is not None:
                inner = inner + case["b1"][head].view(-1, size)[block].double()
            state = state + inner / (1 + torch.exp(-inner))
        logits = (case["w2"] if case["w2"].dim() == 2 else case["w2"][head]).double() @ state
        logits = logits if scale is None else logits * (scale if scale.dim() == 1 else scale[head]).double()
        logits = logits / divisor if softcap is None else softcap * torch.tanh(logits / divisor / softcap)
        return logits / temperature + (0 if noise is None else noise[b, head].double())

    heads = range(case["w1"].shape[0])
    return torch.stack([torch.stack([of_head(b, head) for head in heads]) for b in range(case["hidden"].shape[0])])


def plain_logits(case: Case, scale: Tensor | None = None, **options: Any) -> Tensor:
    """The same in plain PyTorch: matrix products in the dtype of the inputs, the rest in fp32."""
    hidden, w2 = case["hidden"], case["w2"].to(case["hidden"].dtype)
    state = hidden[:, None] if hidden.dim() == 2 else hidden
    if "root" in options:
        state = state + (options["w_root"] @ options["root"][:, None, :, None])[..., 0]
    for block, weight in enumerate(case["w1"].unbind(1) if case["w1"].dim() == 4 else [case["w1"]]):
        inner = (weight @ state[..., None])[..., 0]
        if case["b1"] is not None:
            inner = inner + (case["b1"][:, block] if case["w1"].dim() == 4 else case["b1"])
        state = state + torch.nn.functional.silu(inner)
    logits = (w2 @ state[..., None])[..., 0].float()
    logits = logits if scale is None else logits * scale
    logits = reference.scaled_logits(logits, options.get("divisor", 1.0), options.get("softcap"))
    return logits / options.get("temperature", 1.0) + (
        options["noise"][:, : logits.shape[1]] if "noise" in options else 0
    )


def all_logprobs(logits: Tensor) -> Tensor:
    return logits - logits.exp().sum(-1, keepdim=True).log()


def largest_dot_product(case: Case) -> float:
    """The largest sum of absolute products of a logit, for shared or own projections without a scale."""
    magnitudes = {name: None if t is None else t.abs() for name, t in case.items()}
    hidden = magnitudes["hidden"] if case["hidden"].dim() == 3 else magnitudes["hidden"][:, None]
    inner = (magnitudes["w1"] @ hidden[..., None])[..., 0]
    state = hidden + (inner if case["b1"] is None else inner + magnitudes["b1"])
    return (magnitudes["w2"] @ state[..., None]).max().item()


def check(
    got: tuple[Tensor, Tensor],
    case: Case,
    k: int,
    scale: Tensor | None = None,
    largest: float | None = None,
    **options: Any,
) -> None:
    """Check the log-probabilities of the tokens, their order, and that no other token is better beyond rounding."""
    logprobs, tokens = got
    dtype = case["hidden"].dtype
    logits = exact_logits(case, scale, **options)
    exact, plain = all_logprobs(logits), all_logprobs(plain_logits(case, scale, **options)).to(dtype)
    assert logprobs.dtype == torch.float32
    assert tokens.dtype == torch.int64
    assert logprobs.shape == tokens.shape == (*exact.shape[:2], k)
    limit = allowed(plain, exact, logits.abs().max().item() if largest is None else largest)
    assert (logprobs - exact.gather(-1, tokens)).abs().max() <= limit
    assert (logprobs.diff(dim=-1) <= 0).all()
    assert all(len(set(row)) == k for row in tokens.view(-1, k).tolist())
    # Two tokens may swap only if both errors together can exchange them.
    assert (exact.gather(-1, tokens).amin(-1) >= exact.topk(k).values[..., -1] - 2 * limit).all()


@given(data=st.data())
def test_matches_one_head_at_a_time(device: str, data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**16), label="seed"))
    vocabulary = data.draw(st.integers(1, 40), label="vocabulary")
    case = make(
        data.draw(st.integers(1, 3), label="batch"),
        data.draw(st.integers(1, 4), label="heads"),
        data.draw(st.sampled_from([1, 7, 16]), label="size"),
        vocabulary,
        shared=data.draw(st.booleans(), label="shared"),
        bias=data.draw(st.booleans(), label="bias"),
        own_states=data.draw(st.booleans(), label="own_states"),
        device=device,
    )
    k = data.draw(st.integers(1, min(32, vocabulary)), label="k")
    check(heads_topk(*case.values(), k), case, k, largest=largest_dot_product(case))


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("batch", "heads", "vocabulary", "shared", "k"),
    [(3, 5, 333, False, 32), (3, 5, 333, True, 32), (1, 1, 3001, False, 32), (10, 2, 600, True, 3),
     (70, 1, 300, False, 1)],
)  # fmt: skip
def test_matches_fp64_in_every_dtype(
    device: str, dtype: torch.dtype, batch: int, heads: int, vocabulary: int, shared: bool, k: int
) -> None:
    """Also more rows and words than a program takes; twice the same bits."""
    case = make(batch, heads, 80, vocabulary, shared=shared, dtype=dtype, device=device)
    got, again = heads_topk(*case.values(), k), heads_topk(*case.values(), k)
    check(got, case, k)
    assert torch.equal(got[0], again[0])
    assert torch.equal(got[1], again[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_quantised_projection_matches_fp64(device: str, dtype: torch.dtype, stored: torch.dtype, shared: bool) -> None:
    case = make(2, 3, 16, 50, shared=shared, dtype=dtype, device=device)
    case["w2"] = (case["w2"].float() * 30).round().clamp(-127, 127).to(stored)
    scale = torch.rand(case["w2"].shape[:-1], device=device) / 30
    check(heads_topk(*case.values(), 5, w2_scale=scale), case, 5, scale)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "group"), [("zeros", 128), ("int4", 32), ("nf4", 64), ("fp4", 64), ("int4", 16)])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("batch", [2, 40])
def test_4_bit_projections_match_fp64(
    device: str, dtype: torch.dtype, kind: str, group: int, shared: bool, gather: bool, batch: int
) -> None:
    """With all inputs; the scales of rows that are left out are NaN."""
    case = make(batch, 2, 256, 90, shared=shared, dtype=dtype, device=device)
    given_w2 = stored.make(kind, (90, 256) if shared else (2, 90, 256), group).on(device, torch.float16, 4)
    w2, scale, zero, codes = given_w2
    inputs, ids = make_inputs(case, 3, 90), None
    case["w2"] = given_w2.dequantised()
    options = inputs | {"w2_scale": scale, "w2_zero": zero, "codes": codes, "gather": gather}
    if gather:
        ids = torch.randperm(90, device=device)[:70]
        scale[..., torch.ones(90, device=device).index_fill(0, ids, 0).bool(), :] = torch.nan
        case["w2"], inputs["noise"] = case["w2"][..., ids, :], inputs["noise"][..., ids]
    logprobs, tokens = heads_topk(**(case | {"w2": w2}), k=6, token_map=ids, **options)
    rows = tokens if ids is None else (tokens[..., None] == ids).int().argmax(-1)
    check((logprobs, rows), case, 6, **inputs)


def make_8_bit(size: int, stored: torch.dtype, device: str) -> tuple[Case, Tensor]:
    """A case in bf16 whose residual blocks add nothing, so that Triton's interpreter computes it right, and scales."""
    case = make(3, 2, size, 90, bias=False, dtype=torch.bfloat16, device=device)
    case["w1"].zero_()
    case["w2"] = (case["w2"].float() * 30).round().clamp(-127, 127).to(stored)
    return case, torch.rand(2, 90, device=device) / 30


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("factor", [2.0**-13, 2.0**11])
def test_bf16_states_of_any_size_and_8_bit_weights(device: str, stored: torch.dtype, factor: float) -> None:
    """They are multiplied in fp16, whose smallest normal number is 2^-14 and whose largest 65504."""
    case, scale = make_8_bit(128, stored, device)
    case["hidden"] *= factor
    scale /= factor
    check(heads_topk(*case.values(), 5, w2_scale=scale), case, 5, scale)


@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("far", [65536.0, -1e30])
def test_bf16_states_beyond_float16_are_clamped(device: str, stored: torch.dtype, far: float) -> None:
    if served_by("heads_topk", device).name != "triton":
        pytest.skip("other implementations do not convert them to float16")
    case, scale = make_8_bit(16, stored, device)
    case["hidden"][1, 3] = far
    got = heads_topk(*case.values(), 5, w2_scale=scale / 65504)
    # The clamped states are those of float16 exactly, so the result is as exact as in float32.
    case = {name: None if t is None else t.float() for name, t in case.items()}
    case["hidden"].clamp_(-65504, 65504)
    check(got, case, 5, scale / 65504)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in Triton's interpreter
@pytest.mark.parametrize("stored", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("kind", ["ones", "-inf"])
def test_bf16_states_that_are_not_finite_are_noticed(device: str, stored: torch.dtype, kind: str) -> None:
    """With 8-bit weights, too: no infinity or NaN becomes a large number."""
    case, scale = make_8_bit(16, stored, device)
    clean = heads_topk(*case.values(), 5, w2_scale=scale)
    case["hidden"][1, 3] = not_finite(kind, torch.bfloat16)
    logprobs, tokens = heads_topk(*case.values(), 5, w2_scale=scale)
    assert not logprobs[1].isfinite().any()
    assert ((tokens >= 0) & (tokens < 90)).all()
    assert torch.equal(logprobs[::2], clean[0][::2])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("stored", [None, torch.int8, torch.float8_e4m3fn], ids=str)
def test_gather_reads_only_the_rows_in_the_map(device: str, shared: bool, stored: torch.dtype | None) -> None:
    """The rows left out are NaN (in the scales where the weights have none)."""
    case = make(2, 3, 16, 40, shared=shared, device=device)
    ids = torch.randperm(40, device=device)[:33]
    unread = torch.ones(40, dtype=torch.bool, device=device).index_fill(0, ids, False)
    scale = None
    if stored is None:
        case["w2"][..., unread, :] = torch.nan
    else:
        case["w2"] = (case["w2"] * 30).round().clamp(-127, 127).to(stored)
        scale = torch.rand(case["w2"].shape[:-1], device=device) / 30
        scale[..., unread] = torch.nan
    logprobs, tokens = heads_topk(*case.values(), 7, w2_scale=scale, token_map=ids, gather=True)
    row_of = {token: row for row, token in enumerate(ids.tolist())}
    rows = torch.tensor([[[row_of[token] for token in head] for head in b] for b in tokens.tolist()], device=device)
    of_rows = case | {"w2": (case["w2"].float()[..., ids, :])}
    check((logprobs, rows), of_rows, 7, None if scale is None else scale[..., ids])


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.parametrize("form", ["plain", "int8", "trimmed", "gathered"])
@pytest.mark.parametrize("shared", [False, True])
def test_root_temperature_and_noise_match_fp64(
    device: str, dtype: torch.dtype, blocks: int, form: str, shared: bool
) -> None:
    case = make(3, 2, 24, 90, shared=shared, own_states=blocks == 2, blocks=blocks, dtype=dtype, device=device)
    inputs, scale, ids = make_inputs(case, 4, 120 if form == "trimmed" else 90), None, None
    if form == "int8":
        case["w2"] = (case["w2"].float() * 30).round().clamp(-127, 127).to(torch.int8)
        scale = torch.rand(case["w2"].shape[:-1], device=device) / 30
    if form in ("trimmed", "gathered"):
        ids = torch.randperm(inputs["noise"].shape[-1], device=device)[: 90 if form == "trimmed" else 70]
    got = heads_topk(*case.values(), 6, w2_scale=scale, token_map=ids, gather=form == "gathered", **inputs)
    if ids is not None:
        rows = (got[1][..., None] == ids).int().argmax(-1)
        assert torch.equal(ids[rows], got[1])
        got = got[0], rows
        inputs["noise"] = inputs["noise"][..., ids]
        case["w2"] = case["w2"][..., ids, :] if form == "gathered" else case["w2"]
    check(got, case, 6, scale, **inputs)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in Triton's interpreter
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{"softcap": 3.0}, {"divisor": 0.5, "softcap": 20.0}], ids=str)
def test_divided_and_capped_logits_match_fp64(device: str, dtype: torch.dtype, options: dict[str, float]) -> None:
    """Of a map's rows of a shared projection, with noise and a temperature. A NaN stays one."""
    case = make(3, 2, 24, 90, shared=True, dtype=dtype, device=device)
    inputs, ids = make_inputs(case, 3, 90) | options, torch.randperm(90, device=device)[:70]
    logprobs, tokens = heads_topk(*case.values(), 6, token_map=ids, gather=True, **inputs)
    of_rows, noise = case | {"w2": case["w2"][ids]}, inputs["noise"][..., ids]
    check((logprobs, (tokens[..., None] == ids).int().argmax(-1)), of_rows, 6, **(inputs | {"noise": noise}))
    case["hidden"][1] = torch.nan
    wrong = heads_topk(*case.values(), 6, token_map=ids, gather=True, **inputs)[0].isnan()
    assert wrong.all(-1).all(-1).tolist() == [False, True, False]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("form", ["plain", "trimmed", "gathered"])
def test_noise_of_row_head_and_id(device: str, shared: bool, form: str) -> None:
    """Logits of zero leave the noise alone: the k largest of its row j for head j, at the ids in the map."""
    case = make(5, 3, 16, 700, shared=shared, device=device)
    case["w2"].zero_()
    noise = torch.randn(5, 4, 700 if form != "trimmed" else 800, device=device)
    ids = torch.randperm(noise.shape[-1], device=device)[: {"plain": 0, "trimmed": 700, "gathered": 400}[form]]
    options = {} if form == "plain" else {"token_map": ids, "gather": form == "gathered"}
    logprobs, tokens = heads_topk(*case.values(), 9, noise=noise, temperature=3.0, **options)
    x = noise[:, :3].double()
    if form != "plain":
        x = torch.full_like(x, -torch.inf).index_copy(-1, ids, x[..., ids])
    best = x.log_softmax(-1).topk(9)
    assert torch.equal(tokens, best.indices)
    torch.testing.assert_close(logprobs.double(), best.values, rtol=1e-6, atol=1e-6)


@of_the_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shared", [False, True])
def test_a_row_stands_alone(dtype: torch.dtype, shared: bool) -> None:
    case = make(7, 3, 40, 500, shared=shared, own_states=shared, blocks=2, dtype=dtype)
    inputs = make_inputs(case, 3, 500)
    together = heads_topk(*case.values(), 8, **inputs)
    for row in range(7):
        own = {name: inputs[name][row : row + 1] for name in ("root", "noise")}
        alone = heads_topk(**(case | inputs | own | {"hidden": case["hidden"][row : row + 1]}), k=8)
        assert all(torch.equal(got[0], wanted[row]) for got, wanted in zip(alone, together, strict=True))


@pytest.mark.parametrize("vocabulary", [32, 500])
def test_tokens_with_equal_logits_are_each_taken_once(device: str, vocabulary: int) -> None:
    case = make(2, 2, 8, vocabulary, device=device)
    case["w2"][:] = case["w2"][:, :1]
    logprobs, tokens = heads_topk(*case.values(), 20)
    assert all(len(set(row)) == 20 for row in tokens.view(-1, 20).tolist())
    torch.testing.assert_close(logprobs, torch.full_like(logprobs, -math.log(vocabulary)), rtol=1e-6, atol=1e-6)


def test_strided_views_are_read_in_place(device: str) -> None:
    """Every tensor is part of a larger one, which is NaN elsewhere."""
    case = make(3, 2, 24, 90, device=device)
    for name, tensor in case.items():
        room = torch.full([n + 8 for n in tensor.shape], torch.nan, device=device)
        inside = room[tuple(slice(3, 3 + n) for n in tensor.shape)]
        case[name] = inside.copy_(tensor)
    check(heads_topk(*case.values(), 6), case, 6)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in Triton's interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["nan", "ones", "-inf"])
@pytest.mark.parametrize(("vocabulary", "k"), [(3, 3), (320, 7)])
def test_ids_stay_in_the_vocabulary(device: str, dtype: torch.dtype, kind: str, vocabulary: int, k: int) -> None:
    """Even if inputs are not finite: embeddings are looked up with the ids before the host can notice."""
    case = make(2, 2, 16, vocabulary, dtype=dtype, device=device)
    bad, whole = not_finite(kind, dtype).to(device), case["w2"].clone()
    clean = heads_topk(*case.values(), k)
    for rows in (slice(1), slice(vocabulary // 2, None), slice(None)):
        case["w2"] = whole.clone()
        case["w2"][:, rows] = bad
        tokens = heads_topk(*case.values(), k)[1]
        assert ((tokens >= 0) & (tokens < vocabulary)).all()
        assert all(len(set(row)) == k for row in tokens.view(-1, k).tolist())
    ids = torch.randperm(vocabulary, device=device) + 1000
    assert torch.isin(heads_topk(*case.values(), k, token_map=ids)[1], ids).all()
    case["w2"] = whole
    case["hidden"][1] = bad
    logprobs, tokens = heads_topk(*case.values(), k)
    assert ((tokens >= 0) & (tokens < vocabulary)).all()
    assert torch.equal(tokens[0], clean[1][0])
    assert torch.equal(logprobs[0], clean[0][0])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("own_states", [False, True])
@pytest.mark.parametrize("form", ["plain", "trimmed", "gathered"])
def test_reference_in_fp64_is_exact(shared: bool, own_states: bool, form: str) -> None:
    case = make(2, 3, 16, 20, shared=shared, own_states=own_states, blocks=2, dtype=torch.float64)
    scale, inputs = torch.rand(case["w2"].shape[:-1]), make_inputs(case, 5, 20)
    ids = None if form == "plain" else torch.randperm(20)[: 20 if form == "trimmed" else 9]
    gather = form == "gathered"
    logprobs, tokens = reference.heads_topk(*case.values(), 6, w2_scale=scale, token_map=ids, gather=gather, **inputs)
    if ids is not None:
        inputs["noise"] = inputs["noise"][..., ids]
    if gather:
        case["w2"], scale = case["w2"][..., ids, :], scale[..., ids]
    best = all_logprobs(exact_logits(case, scale, **inputs)).topk(6)
    assert torch.equal(tokens, best.indices if ids is None else ids[best.indices])
    torch.testing.assert_close(logprobs, best.values, rtol=1e-12, atol=1e-12)


@reads_values
@pytest.mark.parametrize("bad", [-1, 9])
def test_rows_to_gather_outside_are_refused(bad: int) -> None:
    ids = torch.tensor([0, bad, 2])
    with pytest.raises(ValueError, match="token_map: expected rows 0 to 8 of w2, got"):
        heads_topk(*make(2, 3, 4, 9).values(), 2, token_map=ids, gather=True)
    with pytest.raises(ValueError, match="token_map: expected rows 0 to 8 of noise, got"):
        heads_topk(*make(2, 3, 4, 3).values(), 2, token_map=ids, noise=torch.zeros(2, 3, 9))


BAD = {
    "hidden-size": ({"hidden": torch.zeros(2, 5)}, "hidden: expected shape"),
    "hidden-dtype": ({"hidden": torch.zeros(2, 4).double()}, "hidden: expected dtype"),
    "w1-square": ({"w1": torch.zeros(3, 5, 4)}, "w1: expected shape"),
    "w2-heads": ({"w2": torch.zeros(2, 9, 4)}, "w2: expected shape"),
    "k-vocabulary": ({"k": 10}, "k: expected 1 to 9, got 10"),
    "k-most": ({"k": 33, "w2": torch.zeros(40, 4)}, "k: expected 1 to 32, got 33"),
    "w2_scale-missing": ({"w2": torch.zeros(9, 4, dtype=torch.int8)}, "w2_scale: expected scales for weights"),
    "token_map-shape": ({"token_map": torch.zeros(8, dtype=torch.int64)}, "token_map: expected shape"),
    "gather-map": ({"gather": True}, "token_map: expected the rows to gather, got None"),
    "gather-k": ({"gather": True, "token_map": torch.tensor([3]), "k": 2}, "k: expected 1 to 1, got 2"),
    "root-shape": ({"root": torch.zeros(1, 4), "w_root": torch.zeros(3, 4, 4)}, "root: expected shape"),
    "w_root-missing": ({"root": torch.zeros(2, 4)}, "w_root: expected the weights of root, got None"),
    "temperature-nan": ({"temperature": math.nan}, "temperature: expected a finite number above 0, got nan"),
    "divisor": ({"divisor": 0.0}, "divisor: expected a finite number above 0, got 0.0"),
    "softcap": ({"softcap": 0.0}, "softcap: expected None or more than 0, got 0.0"),
    "noise-rows": ({"noise": torch.zeros(2, 2, 9)}, "noise: expected a row for each of 3 heads, got 2"),
    "token_map-dtype": ({"token_map": torch.zeros(9, dtype=torch.int32)}, "token_map: expected dtype int64"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = make(2, 3, 4, 9) | {"k": 2}
    with pytest.raises(ValueError, match=message):
        heads_topk(**(good | change))


@pytest.mark.parametrize(
    ("shared", "bias", "extra"),
    [
        (True, True, ("token_map", "gather")),
        (False, False, ("w2_scale",)),
        (False, True, ("token_map", "root", "w_root", "temperature", "noise")),
    ],
)
def test_passes_opcheck(device: str, shared: bool, bias: bool, extra: tuple[str, ...]) -> None:
    case = make(2, 3, 16, 20, shared=shared, bias=bias, own_states=shared, device=device)
    options = {
        "token_map": torch.arange(20, device=device),
        "gather": True,
        "w2_scale": torch.rand(3, 20, device=device),
        **make_inputs(case, 4, 20),
    }
    torch.library.opcheck(
        torch.ops.medusa_kernels.heads_topk.default, (*case.values(), 4), {name: options[name] for name in extra}
    )
