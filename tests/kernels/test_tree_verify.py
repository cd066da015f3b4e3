"""tree_verify against one node at a time in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import stored
import torch
from budget import assert_within_twice
from hypothesis import given
from hypothesis import strategies as st
from modes import DTYPES, NO_BF16, NOT_FINITE, not_finite, reads_values
from torch import Tensor

from medusa_kernels import reference, tree_verify
from medusa_kernels._registry import served_by
from medusa_kernels._triton import tree_verify as kernels
from medusa_kernels.quantised import dequantised

Case = dict[str, Any]
Statistics = tuple[Tensor, Tensor, Tensor]


def make(
    batch: int,
    nodes: int,
    size: int,
    vocabulary: int,
    *,
    parents: str = "shared",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Case:
    """Random inputs with random earlier parents: one tree, one per row, or (None) a chain."""
    trees = [[-1] + [int(torch.randint(0, i, ())) for i in range(1, nodes)] for _ in range(batch)]
    return {
        "hidden": torch.randn(batch, nodes, size).to(device, dtype),
        "weight": torch.randn(vocabulary, size).to(device, dtype),
        "candidates": torch.randint(0, vocabulary, (batch, nodes), device=device),
        "parents": {
            "chain": None,
            "shared": torch.tensor(trees[0], dtype=torch.int32, device=device),
            "own": torch.tensor(trees, dtype=torch.int32, device=device),
        }[parents],
    }


def gumbel(*shape: int) -> Tensor:
    return -torch.log(torch.empty(shape).exponential_().clamp(min=1e-20))


def shaped(case: Case, logits: Tensor) -> Tensor:
    """Divided and capped logits as transformers computes them, in the dtype of the logits."""
    logits = logits / case.get("divisor", 1.0)
    return logits if (cap := case.get("softcap")) is None else torch.tanh(logits / cap) * cap


def exact_logits(case: Case, temperature: float) -> Tensor:
    """Logits of every node in fp64, one node at a time, divided by the temperature."""
    hidden, weight = case["hidden"].cpu().double(), case["weight"].cpu().double()
    logits = shaped(case, torch.stack([torch.stack([weight @ node for node in row]) for row in hidden]))
    return logits / temperature if temperature > 0 else logits


def plain_logits(case: Case, temperature: float) -> Tensor:
    """Logits as PyTorch computes them in the dtype of the inputs, widened for the softmax."""
    logits = shaped(case, case["hidden"] @ case["weight"].to(case["hidden"].dtype).T).float().cpu()
    return logits / temperature if temperature > 0 else logits


def statistics(case: Case, logits: Tensor) -> Statistics:
    """Log-sum-exp, entropy and child log-probabilities by their definitions, node by node."""
    batch, nodes = logits.shape[:2]
    logsumexp, entropy, child = (logits.new_zeros(batch, nodes) for _ in range(3))
    for b in range(batch):
        for i in range(nodes):
            peak = logits[b, i].max()
            logsumexp[b, i] = peak + (logits[b, i] - peak).exp().sum().log()
            p = (logits[b, i] - logsumexp[b, i]).exp()
            entropy[b, i] = -(p * (logits[b, i] - logsumexp[b, i])).sum()
    for b in range(batch):
        for i in range(nodes):
            of_row = case["parents"]
            parent = i - 1 if of_row is None else int(of_row[i] if of_row.dim() == 1 else of_row[b, i])
            if parent >= 0:
                child[b, i] = logits[b, parent, case["candidates"][b, i]] - logsumexp[b, parent]
    return logsumexp, entropy, child


def largest_dot_product(case: Case, temperature: float) -> float:
    """The largest sum of absolute products of a logit."""
    return (case["hidden"].abs() @ case["weight"].abs().T).max().item() / (temperature or 1) / case.get("divisor", 1.0)


def check(
    case: Case, temperature: float, noise: Tensor | None, device: str, largest: float | None = None, **weights: Any
) -> None:
    """Check results of the op, whose weight may be stored in another way, against those of the case's weight."""
    noise_there = None if noise is None else noise.to(device)
    got = tree_verify(**(case | weights), temperature=temperature, noise=noise_there)
    dtype = case["hidden"].dtype
    exact, plain = exact_logits(case, temperature), plain_logits(case, temperature)
    largest = exact.abs().max().item() if largest is None else largest
    # Statistics are made of logits and of the logarithm of a sum of up to V, which has an error of its own: the sum's
    # rounding, which after the logarithm is one of 1. Both in fp32, whatever the logits are rounded to.
    of_sum = (1 + math.log(exact.shape[-1])) * torch.finfo(torch.float32).eps / torch.finfo(dtype).eps
    made = () if weights.get("want_stats") is False else (statistics(case, plain), statistics(case, exact))
    for mine, in_precision, wanted in zip(got[1:], *made, strict=True) if made else ():
        assert mine.dtype == torch.float32
        assert_within_twice(mine, in_precision.to(dtype).to(device), wanted, largest + of_sum)
    assert got[0].dtype == torch.int64
    scored = exact if noise is None else exact + noise.double().cpu()
    # Another token may be chosen only if the errors of both logits together can exchange them.
    error = max(2 * (plain - exact).abs().max().item(), torch.finfo(dtype).eps * largest)
    taken = scored.gather(-1, got[0].cpu()[..., None])[..., 0]
    assert (taken >= scored.max(-1).values - 2 * error).all()


@given(data=st.data())
def test_matches_one_node_at_a_time(device: str, data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**16), label="seed"))
    batch = data.draw(st.integers(1, 3), label="batch")
    nodes = data.draw(st.integers(1, 7), label="nodes")
    vocabulary = data.draw(st.sampled_from([1, 3, 50, 64, 128]), label="vocabulary")
    parents = data.draw(st.sampled_from(["chain", "shared", "own"]), label="parents")
    temperature = data.draw(st.just(0.0) | st.floats(0.2, 3), label="temperature")
    case = make(batch, nodes, data.draw(st.sampled_from([1, 7, 16])), vocabulary, parents=parents, device=device)
    noise = gumbel(batch, nodes, vocabulary) if temperature else None
    check(case, temperature, noise, device, largest_dot_product(case, temperature))


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("batch", "nodes", "vocabulary"),
    [(1, 1, 1000), (2, 3, 320), (1, 65, 333), (1, 64, 640), (2, 100, 201), (1, 3, 3001)],
)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_matches_fp64_in_every_dtype(
    device: str, dtype: torch.dtype, batch: int, nodes: int, vocabulary: int, temperature: float
) -> None:
    case = make(batch, nodes, 80, vocabulary, parents="own", dtype=dtype, device=device)
    # In fp32 the rounding of the dot products themselves counts; in 16 bits that of the logits is larger.
    largest = largest_dot_product(case, temperature) if dtype == torch.float32 else None
    noise = gumbel(batch, nodes, vocabulary).to(device) if temperature else None
    check(case, temperature, noise, device, largest)
    first, second = (tree_verify(**case, temperature=temperature, noise=noise) for _ in "ab")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


SHAPED: list[Case] = [{"divisor": 7.0}, {"softcap": 3.0}, {"divisor": 0.5, "softcap": 20.0}]
"""Divisors and caps of logits that are about 9 before."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("form", "nodes", "temperature"), [("", 5, 0.0), ("", 65, 0.7), ("zeros 16", 1, 0.7)])
@pytest.mark.parametrize("options", SHAPED, ids=str)
@pytest.mark.parametrize("want_stats", [False, True])
def test_divided_and_capped_logits_match_fp64(
    device: str, dtype: torch.dtype, form: str, nodes: int, temperature: float, options: Case, want_stats: bool
) -> None:
    case = make(1, nodes, 80, 333, parents="own", dtype=dtype, device=device) | options
    case["weight"], given = quantised(form, 333, 80, device) if form else (case["weight"], {})
    noise = gumbel(1, nodes, 333) if temperature else None
    largest = largest_dot_product(case | {"hidden": case["hidden"].to(case["weight"].dtype)}, temperature)
    check(case, temperature, noise, device, largest if dtype == torch.float32 else None, want_stats=want_stats, **given)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nodes", [1, 5])
def test_logits_that_reach_the_cap_are_equal(device: str, dtype: torch.dtype, nodes: int) -> None:
    """Without the cap the last is the largest."""
    weight = torch.linspace(-9, 9, 700, dtype=dtype, device=device)[:, None] * 30
    hidden = torch.ones(1, nodes, 1, dtype=dtype, device=device)
    candidates = torch.zeros(1, nodes, dtype=torch.int64, device=device)
    capped = torch.tanh(weight[:, 0] / 2) * 2
    assert capped.max() == capped[-1] == capped[-200] == 2
    for want_stats in (False, True):
        found = tree_verify(hidden, weight, candidates, softcap=2.0, want_stats=want_stats)[0]
        assert found.tolist() == [[int((capped == 2).nonzero()[0])] * nodes]


def test_a_capped_nan_is_none_of_the_numbers(device: str) -> None:
    case = make(1, 2, 8, 20, device=device)
    case["hidden"][0, 1] = torch.nan
    assert tree_verify(**case, softcap=2.0)[1].isnan().tolist() == [[False, True]]


@pytest.mark.parametrize("gap", [0.0, 6.0, 14.0, 40.0])
def test_entropy_of_flat_and_of_nearly_certain_distributions(device: str, gap: float) -> None:
    """One logit of `gap` among 20,000 of zero, in closed form."""
    vocabulary = 20_000
    weight = torch.zeros(vocabulary, 8, device=device)
    weight[12_345] = gap / 8
    hidden, candidates = torch.ones(1, 2, 8, device=device), torch.full((1, 2), 12_345, device=device)
    token, logsumexp, entropy, child = tree_verify(hidden, weight, candidates)
    rest = (vocabulary - 1) * math.exp(-gap)
    assert token.tolist() == ([[12_345] * 2] if gap else [[0, 0]])
    expected = torch.tensor([gap + math.log1p(rest), math.log1p(rest) + gap * rest / (1 + rest)], dtype=torch.float64)
    assert (logsumexp.cpu() - expected[0]).abs().max() <= 2**-23 * expected[0]
    # PyTorch subtracts the log-sum-exp from each logit, the kernel does not.
    largest = 1.0 if served_by("tree_verify", device).name == "triton" else gap
    assert (entropy.cpu() - expected[1]).abs().max() <= 1e-6 * max(largest, 1.0, expected[1].item())
    assert child[0, 0] == 0
    assert abs(child[0, 1].item() + math.log1p(rest)) <= 2**-23 * expected[0]


def test_strided_views_are_read_in_place(device: str) -> None:
    """Every tensor is part of a larger one, which is NaN (or out of range) elsewhere."""
    case = make(2, 5, 24, 90, parents="own", device=device)
    for name, tensor in case.items():
        filling = torch.nan if tensor.is_floating_point() else 1000
        room = torch.full([n + 8 for n in tensor.shape], filling, dtype=tensor.dtype, device=device)
        case[name] = room[tuple(slice(3, 3 + n) for n in tensor.shape)].copy_(tensor)
    check(case, 0.0, None, device)


def test_zeros_of_both_signs_are_equal(device: str) -> None:
    """A product of -2^-28 becomes -0 in fp16, which does not lose to the 0 after it."""
    weight = torch.tensor([[-(2**-14)], [0.0], [2**-14]], dtype=torch.float16, device=device)
    hidden = torch.full((1, 1, 1), 2**-14, dtype=torch.float16, device=device)
    assert tree_verify(hidden, weight, torch.zeros(1, 1).long().to(device))[0].tolist() == [[0]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("vocabulary", "nodes"), [(100, 1), (256, 5)])
def test_ties_go_to_the_lowest_id(device: str, dtype: torch.dtype, vocabulary: int, nodes: int) -> None:
    """Equal rows of the weight make exact ties, within a block of 64 ids and across blocks."""
    weight = torch.zeros(vocabulary, 4, dtype=dtype, device=device)
    weight[[17, 18, 63, vocabulary - 1]] = 1
    hidden = torch.ones(1, nodes, 4, dtype=dtype, device=device)
    candidates = torch.zeros(1, nodes, dtype=torch.int64, device=device)
    assert tree_verify(hidden, weight, candidates, want_stats=False)[0].tolist() == [[17] * nodes]
    assert tree_verify(-hidden, weight, candidates, want_stats=False)[0].tolist() == [[0] * nodes]


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("options", [{}, {"divisor": 7.0}, {"softcap": 30.0}], ids=str)
def test_greedy_is_the_argmax_of_the_model(device: str, dtype: torch.dtype, options: Case) -> None:
    """As in transformers: logits from one linear in the model's dtype, divided or capped in it, the argmax in fp32."""
    case = make(2, 16, 64, 4096, dtype=dtype, device=device) | options
    logits = shaped(case, torch.nn.functional.linear(case["hidden"], case["weight"]))
    assert torch.equal(tree_verify(**case, want_stats=False)[0], logits.float().argmax(-1))


@NO_BF16
def test_logits_are_rounded_before_the_argmax(device: str) -> None:
    """256 and 256.5 are one number in bfloat16, so the first token wins."""
    hidden, weight = torch.tensor([[[256.0, 1.0]]]), torch.tensor([[1.0, 0.0], [1.0, 0.5]])
    hidden, weight = (tensor.to(device, torch.bfloat16) for tensor in (hidden, weight))
    candidates = torch.zeros(1, 1, dtype=torch.int64, device=device)
    assert tree_verify(hidden, weight, candidates, want_stats=False)[0].tolist() == [[0]]


def test_noise_is_added_after_the_temperature(device: str) -> None:
    """Logits 0 and 2 at temperature 2 are 0 and 1: noise of 1.5 on the first overturns them, 0.5 does not."""
    weight = torch.tensor([[0.0], [2.0]], device=device)
    hidden, candidates = torch.ones(1, 2, 1, device=device), torch.zeros(1, 2, dtype=torch.int64, device=device)
    noise = torch.tensor([[[1.5, 0.0], [0.5, 0.0]]], device=device)
    assert tree_verify(hidden, weight, candidates, temperature=2.0, noise=noise)[0].tolist() == [[0, 1]]
    assert tree_verify(hidden, weight, candidates, temperature=0.0, noise=noise)[0].tolist() == [[1, 1]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("want_stats", [False, True])
@pytest.mark.parametrize("vocabulary", [5, 1003])
def test_nodes_take_their_rows_of_the_noise(
    device: str, vocabulary: int, want_stats: bool, own: bool, dtype: torch.dtype
) -> None:
    """Whole numbers, so that sums are exact in any order and many are equal: the lowest id is taken."""
    batch, nodes, rows = 2, 9, 4
    case = make(batch, nodes, 6, vocabulary, dtype=dtype, device=device)
    for name in ("hidden", "weight"):
        case[name] = torch.randint(-3, 4, case[name].shape).to(device, dtype)
    noise = torch.randint(-9, 10, (batch, rows, vocabulary)).float()
    taken = torch.randint(0, rows, (batch, nodes) if own else (nodes,), dtype=torch.int32)
    found = tree_verify(
        **case, temperature=0.5, noise=noise.to(device), noise_rows=taken.to(device), want_stats=want_stats
    )[0]
    for b in range(batch):
        for i in range(nodes):
            scores = exact_logits(case, 0.5)[b, i] + noise[b, int(taken[b, i] if own else taken[i])]
            assert found[b, i] == scores.tolist().index(scores.max())


def test_each_of_many_nodes_takes_its_own_noise(device: str) -> None:
    """With logits of zero the token is the noise's argmax; more nodes than a CPU multiplies at once."""
    noise = torch.randn(2, 100, 50, device=device)
    hidden, weight = torch.zeros(2, 100, 16, device=device), torch.randn(50, 16, device=device)
    candidates = torch.zeros(2, 100, dtype=torch.int64, device=device)
    found = tree_verify(hidden, weight, candidates, temperature=1.0, noise=noise, want_stats=False)
    assert torch.equal(found[0], noise.argmax(-1))


def test_a_row_outside_of_the_noise_counts_as_zeros(device: str) -> None:
    if served_by("tree_verify", device).name != "triton":
        pytest.skip("only kernels do not read indices on the host")
    case = make(1, 3, 8, 20, device=device)
    noise, rows = gumbel(1, 2, 20).to(device), torch.tensor([-1, 2, 2**31 - 1], dtype=torch.int32, device=device)
    assert torch.equal(tree_verify(**case, temperature=2.0, noise=noise, noise_rows=rows)[0], tree_verify(**case)[0])


def test_tokens_are_the_same_without_statistics(device: str) -> None:
    case = make(2, 5, 16, 50, device=device)
    full, bare = tree_verify(**case), tree_verify(**case, want_stats=False)
    assert torch.equal(full[0], bare[0])
    assert [(t.shape, t.dtype) for t in bare[1:]] == [((0,), torch.float32)] * 3


@pytest.mark.parametrize("most", [90, 1000, 10**9])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_likeliest_of_parts_of_the_vocabulary(
    device: str, dtype: torch.dtype, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Integers, whose logits are exact: equal ones are in one part and in several, and the lowest is the token."""
    seen, plain = [], torch.nn.functional.linear
    monkeypatch.setattr(kernels, "MOST_LOGITS", most)
    monkeypatch.setattr(kernels, "linear", lambda *given: seen.append(plain(*given)) or seen[-1])
    hidden = torch.randint(-2, 3, (3, 30, 4), device=device)
    weight = torch.randint(-2, 3, (101, 4), device=device)
    logits = torch.tensor(
        [[[sum(map(int.__mul__, h, w)) for w in weight.tolist()] for h in b] for b in hidden.tolist()]
    )
    wanted = [[row.index(max(row)) for row in b] for b in logits.tolist()]
    assert kernels.likeliest(hidden.to(dtype), weight.to(dtype)).tolist() == wanted
    seen.clear()
    wanted = [[row.index(max(row)) for row in b] for b in logits.clamp(-1, 1).tolist()]
    assert kernels.likeliest(hidden.to(dtype), weight.to(dtype), softcap=0.01).tolist() == wanted
    # A part has at least one row of the weight.
    assert all(part.numel() <= max(most, 90) for part in seen)
    assert sum(part.shape[-1] for part in seen) == 101


@pytest.mark.parametrize("kind", NOT_FINITE)
def test_the_likeliest_of_parts_is_in_the_vocabulary(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "MOST_LOGITS", 60)
    hidden, weight = torch.randn(1, 3, 16), torch.randn(100, 16)
    for rows in (slice(1), slice(50, None), slice(None)):
        spoilt = weight.clone()
        spoilt[rows] = not_finite(kind, torch.float32)
        tokens = kernels.likeliest(hidden, spoilt)
        assert ((tokens >= 0) & (tokens < 100)).all()
        assert kind != "nan" or (tokens == range(100)[rows][0]).all()


def test_pytorch_multiplies_only_for_many_16_bit_nodes_without_noise(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if served_by("tree_verify", device).name != "triton":
        pytest.skip("tests which kernels the Triton implementation launches")
    calls, plain = [], kernels.likeliest
    monkeypatch.setattr(kernels, "likeliest", lambda *given: calls.append(given) or plain(*given))
    monkeypatch.setattr(kernels, "PRODUCT_ROWS", 6)
    case, few = make(2, 3, 16, 50, dtype=torch.float16, device=device), make(1, 5, 16, 50, device=device)
    got = tree_verify(**case, want_stats=False)
    assert len(calls) == 1
    assert [(t.shape, t.dtype) for t in got[1:]] == [((0,), torch.float32)] * 3
    logits = exact_logits(case, 0.0)
    taken = logits.gather(-1, got[0].cpu()[..., None])[..., 0]
    assert (taken >= logits.amax(-1) - 2 * torch.finfo(torch.float16).eps * logits.abs().max()).all()
    tree_verify(**case)
    tree_verify(**case, want_stats=False, temperature=1.0, noise=gumbel(2, 3, 50).to(device))
    tree_verify(**(case | {name: case[name].float() for name in ("hidden", "weight")}), want_stats=False)
    tree_verify(**(few | {name: few[name].half() for name in ("hidden", "weight")}), want_stats=False)
    assert len(calls) == 1


@pytest.mark.parametrize("parents", ["chain", "shared", "own"])
@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_reference_in_fp64_is_exact(parents: str, temperature: float) -> None:
    case = make(2, 6, 16, 50, parents=parents, dtype=torch.float64)
    noise = gumbel(2, 6, 50)
    got = reference.tree_verify(**case, temperature=temperature, noise=noise)
    exact = exact_logits(case, temperature)
    assert torch.equal(got[0], (exact + noise if temperature else exact).argmax(-1))
    for mine, wanted in zip(got[1:], statistics(case, exact), strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)


def test_results_never_require_a_gradient() -> None:
    case = make(1, 2, 4, 9)
    case["weight"] = torch.nn.Parameter(case["weight"])
    assert not any(t.requires_grad for t in tree_verify(**case))


def test_an_index_out_of_range_gives_nan(device: str) -> None:
    """If values cannot be refused (see `test_bad_values_are_refused`), nothing outside the tensors is read."""
    if served_by("tree_verify", device).name != "triton":
        pytest.skip("only kernels do not read indices on the host")
    case = make(1, 4, 8, 20, parents="shared", device=device)
    case["candidates"] = torch.tensor([[99, -1, 20, 3]], device=device)
    case["parents"] = torch.tensor([-1, 0, 1, 4], dtype=torch.int32, device=device)
    assert [math.isnan(x) for x in tree_verify(**case)[3][0].tolist()] == [False, True, True, True]


def quantised(form: str, vocabulary: int, size: int, device: str, factor: float = 1.0) -> tuple[Tensor, Case]:
    """Return a random weight in fp64, times a factor, and the arguments that give it to the op.

    Its form is a kind of `stored.KINDS`, and the columns of a group.
    """
    kind, *group = form.split()
    scale = torch.float16 if group else torch.float32
    found = stored.make(kind, (vocabulary, size), int(*group)).on(device, scale, factor * size**0.5)
    given = dict(zip(("weight", "weight_scale", "weight_zero", "codes"), found, strict=True))
    return found.dequantised(), given


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", ["zeros 128", "int4 32", "nf4 64", "fp4 64", "int4 16", "int8", "fp8"])
@pytest.mark.parametrize("nodes", [5, 65])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_quantised_weights_match_fp64(
    device: str, dtype: torch.dtype, form: str, nodes: int, temperature: float
) -> None:
    """States in bf16 may be as large as in fp32, also with weights of 8 bits."""
    case = make(1, nodes, 256, 333, parents="own", dtype=dtype, device=device)
    factor = 2.0**20 if form in ("int8", "fp8") and dtype != torch.float16 else 1.0
    case["hidden"] *= factor
    case["weight"], given = quantised(form, 333, 256, device, 1 / factor)
    largest = largest_dot_product(case | {"hidden": case["hidden"].double()}, temperature)
    noise = gumbel(1, nodes, 333) if temperature else None
    largest = largest if dtype == torch.float32 else None
    for want_stats in (False, True):
        check(case, temperature, noise, device, largest, want_stats=want_stats, **given)


@NO_BF16
@pytest.mark.parametrize("form", ["int4 128", "nf4 64"])
def test_a_token_does_not_depend_on_the_nodes_next_to_it(device: str, form: str) -> None:
    """Every logit is zero but for the rounding of the sum, so another order of the sum gives another token."""
    if served_by("tree_verify", device).name != "triton":
        pytest.skip("PyTorch's products depend on their shapes")
    case = make(1, 65, 512, 200, dtype=torch.bfloat16, device=device)
    _, given = quantised(form, 200, 512, device)
    case["hidden"][..., 256:] = -case["hidden"][..., :256]
    for name in ("weight", "weight_scale"):
        first, second = given[name].chunk(2, -1)
        second.copy_(first)
    together = tree_verify(**(case | given), want_stats=False)[0]
    assert len(together.unique()) > 20
    for nodes in (slice(0, 3), slice(40, 65)):
        part = {name: case[name][:, nodes] for name in ("hidden", "candidates")} | given
        assert torch.equal(tree_verify(**part, want_stats=False)[0], together[:, nodes])


def test_the_likeliest_of_parts_of_a_quantised_vocabulary(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers, whose logits are exact. No more numbers of the weight than logits are in memory at once."""
    monkeypatch.setattr(kernels, "MOST_LOGITS", 1000)
    seen, plain = [], kernels.dequantised
    monkeypatch.setattr(kernels, "dequantised", lambda *given: seen.append(plain(*given)) or seen[-1])
    weight, given = quantised("zeros 32", 101, 64, device)
    scale = torch.randint(1, 3, given["weight_scale"].shape, device=device).half()
    exact = dequantised(given["weight"], scale, given["weight_zero"], wide=torch.float64)
    hidden = torch.randint(-2, 3, (3, 9, 64), device=device)
    tokens = kernels.likeliest(hidden.float(), given["weight"], scale, given["weight_zero"])
    assert torch.equal(tokens, (hidden.double() @ exact.T).argmax(-1))
    assert len(seen) == 7
    assert all(part.numel() <= 1000 for part in seen)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of NumPy, in Triton's interpreter
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["nan", "ones", "-inf"])
@pytest.mark.parametrize("vocabulary", [100, 320])
def test_ids_stay_in_the_vocabulary(device: str, dtype: torch.dtype, kind: str, vocabulary: int) -> None:
    """Even if inputs are not finite: embeddings are looked up with the id before the host can notice."""
    case = make(1, 3, 16, vocabulary, dtype=dtype, device=device)
    bad = not_finite(kind, dtype).to(device)
    whole = case["weight"].clone()
    for rows in (slice(1), slice(vocabulary // 2, None), slice(None)):
        case["weight"] = whole.clone()
        case["weight"][rows] = bad
        token, logsumexp = tree_verify(**case)[:2]
        assert ((token >= 0) & (token < vocabulary)).all()
        assert kind != "nan" or (token == range(vocabulary)[rows][0]).all()  # the largest, as in PyTorch
        # Sampling and typical acceptance detect it in the log-sum-exp.
        assert not logsumexp.isfinite().any() or kind.endswith("inf")
        assert torch.equal(tree_verify(**case, want_stats=False)[0], token)
    clean = tree_verify(**(case | {"weight": whole}))[:2]
    case["hidden"][0, 1] = bad
    token, logsumexp = tree_verify(**(case | {"weight": whole}))[:2]
    assert 0 <= token[0, 1] < vocabulary
    assert not logsumexp[0, 1].isfinite()
    for got, wanted in zip((token, logsumexp), clean, strict=True):
        assert torch.equal(got[:, [0, 2]], wanted[:, [0, 2]])


BAD = {
    "hidden-axes": ({"hidden": torch.zeros(3, 4)}, "hidden: expected shape"),
    "hidden-dtype": ({"hidden": torch.zeros(2, 3, 4).double()}, "hidden: expected dtype"),
    "weight-rows": ({"weight": torch.zeros(0, 4)}, "weight: expected at least 1 row, got 0"),
    "weight-size": ({"weight": torch.zeros(9, 5)}, "weight: expected shape"),
    "candidates-shape": ({"candidates": torch.zeros(3, dtype=torch.int64)}, "candidates: expected shape"),
    "candidates-dtype": ({"candidates": torch.zeros(2, 3, dtype=torch.int32)}, "candidates: expected dtype int64"),
    "scale-alone": (
        {"weight_scale": torch.ones(9)},
        "weight: expected dtype int8 or float8_e4m3fn or uint8, got float32",
    ),
    "scale-shape": (
        {"weight": torch.zeros(9, 4).to(torch.int8), "weight_scale": torch.ones(8)},
        "weight_scale: expected shape",
    ),
    "parents-shape": ({"parents": torch.zeros(4, dtype=torch.int32)}, "parents: expected shape"),
    "temperature": ({"temperature": -0.5}, "temperature: expected 0 or more, got -0.5"),
    "divisor": ({"divisor": 0.0}, "divisor: expected more than 0, got 0.0"),
    "softcap": ({"softcap": 0.0}, "softcap: expected None or more than 0, got 0.0"),
    "noise-missing": ({"temperature": 1.0}, "noise: expected Gumbel noise"),
    "noise-shape": ({"noise": torch.zeros(2, 3, 8)}, "noise: expected shape"),
    "noise-rows-vocabulary": (
        {"noise": torch.zeros(2, 5, 8), "noise_rows": torch.zeros(3).int()},
        r"noise: expected shape \[2, R, 9\], got \[2, 5, 8\]",
    ),
    "noise_rows-shape": ({"noise_rows": torch.zeros(4).int()}, r"noise_rows: expected shape \[3\], got \[4\]"),
    "noise_rows-dtype": ({"noise_rows": torch.zeros(2, 3).long()}, "noise_rows: expected dtype int32, got int64"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = make(2, 3, 4, 9)
    with pytest.raises(ValueError, match=message):
        tree_verify(**(good | change))


BAD_VALUES = {
    "candidates-high": ({"candidates": torch.full((2, 3), 9)}, "candidates: expected values from 0 to 8, got 9 to 9"),
    "candidates-low": ({"candidates": torch.full((2, 3), -1)}, "candidates: expected values from 0 to 8"),
    "parents-high": ({"parents": torch.full((3,), 3, dtype=torch.int32)}, "parents: expected values from -1 to 2"),
}


@reads_values
@pytest.mark.parametrize(("change", "message"), BAD_VALUES.values(), ids=BAD_VALUES.keys())
def test_bad_values_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tree_verify(**(make(2, 3, 4, 9) | change))


@reads_values
@pytest.mark.parametrize("want_stats", [False, True])
@pytest.mark.parametrize("row", [-1, 4])
def test_rows_outside_of_the_noise_are_refused(row: int, want_stats: bool) -> None:
    rows = torch.tensor([0, row, 3], dtype=torch.int32)
    options: dict[str, Any] = {"temperature": 1.0, "noise": torch.zeros(2, 4, 9), "want_stats": want_stats}
    with pytest.raises(
        ValueError, match=f"noise_rows: expected values from 0 to 3, got {min(0, row)} to {max(3, row)}"
    ):
        tree_verify(**make(2, 3, 4, 9), **options, noise_rows=rows)


@pytest.mark.parametrize("parents", ["chain", "shared", "own"])
@pytest.mark.parametrize(("temperature", "want_stats"), [(0.0, True), (0.0, False), (0.7, True)])
def test_passes_opcheck(device: str, parents: str, temperature: float, want_stats: bool) -> None:
    case = make(2, 3, 16, 20, parents=parents, device=device)
    options: dict[str, Any] = {"temperature": temperature, "want_stats": want_stats}
    if temperature:
        options["noise"] = gumbel(2, 5, 20).to(device)
        options["noise_rows"] = torch.tensor([0, 4, 1], dtype=torch.int32, device=device)
    torch.library.opcheck(torch.ops.medusa_kernels.tree_verify.default, tuple(case.values()), options)
