"""draw_tokens against a walk over the tokens in fp64, transformers' processors, and distributions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from modes import DTYPES, not_finite
from torch import Tensor
from transformers.generation import logits_process as lp

from medusa_kernels import draw_tokens, reference
from medusa_kernels._registry import interpreted

ROUNDING = 1e-5
"""Share of the probability that fp32 sums of a few hundred tokens do not reach; far less than one token's, but at
edges."""
MANY = 24 if interpreted() else 90
"""Tokens of a test that needs a program for each of them, which is slow in the interpreter."""


def gumbel(*shape: int) -> Tensor:
    return -(-torch.rand(shape).clamp(1e-30).log()).log()


def walked(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, margin: float = 0.0
) -> set[int]:
    """The tokens kept: taken from the least likely up, in fp64; with a margin on what top-p and min-p may drop."""
    order = sorted(range(len(logits)), key=lambda token: (logits[token], token))
    if top_k:
        least = logits[order[-min(top_k, len(order))]]
        order = [token for token in order if logits[token] >= least]
    order = [token for token in order if logits[token] > -1e30]  # never drawn
    highest = logits[order[-1]]
    weights = {token: math.exp((logits[token] - highest) / temperature) for token in order}
    limit, total, kept = (1 - top_p + margin) * math.fsum(weights.values()), 0.0, set(order)
    for token in order[:-1]:
        total += weights[token]
        if top_p == 1 or total > limit:
            break
        kept.remove(token)
    return {token for token in kept if weights[token] >= min_p * (1 + margin)}


def kept(logits: Tensor, device: str, **options: Any) -> list[set[int]]:
    """The tokens that the op keeps of logits [B, V]: each wins at one node, by its noise, if it may be drawn."""
    batch, vocabulary = logits.shape
    nodes = logits.to(device)[:, None].expand(batch, vocabulary, vocabulary)
    noise = (1e6 * torch.eye(vocabulary)).expand(batch, -1, -1).to(device)
    tokens, _ = draw_tokens(nodes, noise, **options)
    return [{token for token, drawn in enumerate(row) if token == drawn} for row in tokens.tolist()]


def assert_kept(logits: Tensor, device: str, **options: Any) -> int:
    """Compare with the walk; tokens within rounding of an edge may go either way. Return how many there are."""
    all_options = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **options}
    between = 0
    for row, got in zip(logits, kept(logits, device, **options), strict=True):
        least, most = (walked(row.tolist(), *all_options.values(), margin) for margin in (ROUNDING, -ROUNDING))
        assert least <= got <= most
        between += len(most - least)
    return between


@given(data=st.data())
@settings(max_examples=10 if interpreted() else 40)
def test_keeps_what_a_walk_in_fp64_keeps(device: str, data: st.DataObject) -> None:
    vocabulary = data.draw(st.sampled_from([1, 2, 3, 17, MANY]), label="vocabulary")
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]), label="dtype")
    options = {
        "temperature": data.draw(st.sampled_from([0.1, 0.7, 1.0, 3.0]), label="temperature"),
        "top_k": data.draw(st.sampled_from([0, 1, 2, 20, 64, 1000]), label="top_k"),
        "top_p": data.draw(st.sampled_from([0.0, 1e-6, 0.31, 0.777, 0.95, 1.0]), label="top_p"),
        "min_p": data.draw(st.sampled_from([0.0, 0.013, 0.37, 1.0]), label="min_p"),
    }
    torch.manual_seed(data.draw(st.integers(0, 2**20), label="seed"))
    spread = data.draw(st.sampled_from([0.3, 3.0, 12.0]), label="spread")
    assert_kept((spread * torch.randn(2, vocabulary)).to(dtype), device, **options)


@pytest.mark.parametrize("top_p", [0.5, 0.99])
def test_almost_every_token_is_decided(device: str, top_p: float) -> None:
    """The margin of the comparison excuses next to nothing."""
    assert assert_kept(2 * torch.randn(4, MANY), device, top_p=top_p) <= 1


@pytest.mark.parametrize("top_p", [0.0, 0.26, 0.74, 0.9999])
def test_of_equal_logits_the_first_go(device: str, top_p: float) -> None:
    """All equal; two levels with the edge in the upper or the lower one; equal neighbours everywhere."""
    equal = torch.full((1, 32), 3.0)
    drop = min(math.floor((1 - top_p) * 32), 31)
    assert kept(equal, device, top_p=top_p) == [set(range(drop, 32))]
    levels = torch.tensor([[0.0, 1.0] * 16])
    assert_kept(levels, device, top_p=top_p)
    assert_kept((torch.randn(3, MANY) * 2).round(), device, top_p=top_p)
    assert kept(equal, device, top_k=5) == [set(range(32))]


def test_tokens_excluded_already_stay_so(device: str) -> None:
    logits = torch.randn(2, 28)
    logits[:, ::2], logits[1, 1::4] = -math.inf, torch.finfo(torch.float32).min
    odd = set(range(1, 28, 2))
    for options in ({"top_p": 0.9999}, {"top_k": 20}, {"top_k": 20, "top_p": 0.9}, {"min_p": 1e-4}):
        assert all(row <= odd for row in kept(logits, device, **options))
        assert_kept(logits, device, **options)
    only = torch.full((1, 30), -math.inf)
    only[0, 7] = -3.0
    assert kept(only, device, top_p=0.5, top_k=3) == [{7}]


CHAINS = {
    "top-p": ([lp.TopPLogitsWarper(0.83)], {"top_p": 0.83}),
    "all": (
        [
            lp.TemperatureLogitsWarper(0.7), lp.TopKLogitsWarper(50), lp.TopPLogitsWarper(0.91),
            lp.MinPLogitsWarper(0.02),
        ],
        {"temperature": 0.7, "top_k": 50, "top_p": 0.91, "min_p": 0.02},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [1000, 32_003])
def test_draws_what_transformers_processors_and_the_same_noise_draw(
    device: str, name: str, dtype: torch.dtype, vocabulary: int
) -> None:
    processors, options = CHAINS[name]
    logits, noise = (3 * torch.randn(2, 7, vocabulary)).to(dtype), gumbel(2, 3, vocabulary)
    rows = torch.tensor([0, 1, 1, 2, 2, 0, 1], dtype=torch.int32)
    scores = logits.float().flatten(0, 1)
    for processor in processors:
        scores = processor(None, scores)
    summed = scores.view_as(logits) + noise[:, rows.long()]
    tokens, best = draw_tokens(logits.to(device), noise.to(device), rows.to(device), **options)
    assert tokens.dtype == torch.int64
    assert tokens.tolist() == summed.argmax(-1).tolist()
    torch.testing.assert_close(best.cpu(), summed.amax(-1), rtol=2**-22, atol=2**-22)


@pytest.mark.skipif(not interpreted(), reason="tests the kernel's tiles in Triton's interpreter")
@pytest.mark.parametrize("vocabulary", [33_001])
def test_several_tiles(monkeypatch: pytest.MonkeyPatch, vocabulary: int) -> None:
    """As on a GPU: tiles of 16,384 tokens, and of 4,096 for other sizes; ties lie in several of them."""
    from medusa_kernels._triton import draw_tokens as module

    monkeypatch.setattr(module, "interpreted", lambda: False)
    logits, noise = 3 * torch.randn(1, 2, vocabulary), gumbel(1, 2, vocabulary)
    logits[0, 1] = logits[0, 1].round()
    for options in ({"top_k": 50, "top_p": 0.9}, {"top_p": 0.4, "min_p": 0.01}, {}):
        got = draw_tokens(logits, noise, **options)
        wanted = reference.draw_tokens(logits.double(), noise.double(), **options)
        assert got[0].tolist() == wanted[0].tolist()


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("shared", [True, False], ids=["rows of a tree", "rows of each text"])
def test_strides_and_rows_of_noise(device: str, shared: bool) -> None:
    whole = torch.full((3, 8, 101), math.nan)
    logits = whole[1:, 1:7, 3:93]
    logits.copy_(2 * torch.randn(2, 6, 90))
    noise = gumbel(2, 4, 90)
    rows = torch.randint(4, (6,) if shared else (2, 6), dtype=torch.int32)
    on_device = whole.to(device)[1:, 1:7, 3:93]
    tokens, best = draw_tokens(on_device, noise.to(device), rows.to(device), top_k=9, temperature=0.6)
    for b in range(2):
        for node in range(6):
            row = int(rows[node] if shared else rows[b, node])
            scores = logits[b, node].double() / 0.6
            scores[scores < scores.sort().values[-9]] = -math.inf
            summed = scores + noise[b, row].double()
            assert int(tokens[b, node]) == int(summed.argmax())
            assert float(best[b, node]) == pytest.approx(float(summed.max()), rel=1e-6)
    transposed = draw_tokens(logits.transpose(1, 2).contiguous().to(device).transpose(1, 2), noise.to(device),
                             rows.to(device), top_k=9, temperature=0.6)  # fmt: skip
    assert torch.equal(transposed[0], tokens)


@pytest.mark.skipif(not interpreted() and not torch.cuda.is_available(), reason="PyTorch refuses such indices")
def test_rows_out_of_range_read_nothing(device: str) -> None:
    if device == "cpu" and not interpreted():
        pytest.skip("PyTorch refuses such indices")
    logits, noise = torch.randn(1, 2, 20), torch.full((1, 2, 20), math.nan)
    rows = torch.tensor([-1, 2**31 - 1], dtype=torch.int32)
    tokens, _ = draw_tokens(logits.to(device), noise.to(device), rows.to(device))
    assert tokens.tolist() == logits.argmax(-1).tolist()


def test_the_lowest_id_wins_ties(device: str) -> None:
    logits, noise = torch.zeros(1, 1, 50), torch.zeros(1, 1, 50)
    assert draw_tokens(logits.to(device), noise.to(device))[0].item() == 0
    noise[0, 0, [40, 13]] = 5.0
    assert draw_tokens(logits.to(device), noise.to(device))[0].item() == 13
    assert draw_tokens(logits.to(device), noise.to(device), top_p=0.5)[0].item() == 40, "13 goes before"


@pytest.mark.parametrize("kind", ["ones", "inf", "-inf"])
def test_numbers_that_are_none_do_not_hang_or_reach_other_rows(device: str, kind: str) -> None:
    logits, noise = torch.randn(2, 3, 40), gumbel(2, 3, 40)
    options: dict[str, Any] = {"top_k": 9, "top_p": 0.8, "min_p": 0.01}
    clean = draw_tokens(logits.to(device), noise.to(device), **options)
    for places in ([5], range(40)):
        logits[1, 2, list(places)] = not_finite(kind, torch.float32)
        tokens, best = draw_tokens(logits.to(device), noise.to(device), **options)
        assert 0 <= int(tokens.min()) <= int(tokens.max()) < 40
        same = torch.ones(2, 3, dtype=torch.bool, device=tokens.device)
        same[1, 2] = False
        assert torch.equal(tokens[same], clean[0][same])
        assert torch.equal(best[same], clean[1][same])
    assert not math.isfinite(float(best[1, 2]))


BAD = {
    "logits-axes": ({"logits": torch.zeros(2, 9)}, "logits: expected shape"),
    "logits-dtype": ({"logits": torch.zeros(2, 3, 9).double()}, "logits: expected dtype float16 or"),
    "vocabulary": ({"logits": torch.zeros(2, 3, 0)}, "logits: expected 1 to 16777216 tokens, got 0"),
    "noise-shape": ({"noise": torch.zeros(2, 4, 9)}, r"noise: expected shape \[2, 3, 9\], got \[2, 4, 9\]"),
    "rows-shape": ({"noise_rows": torch.zeros(4).int()}, r"noise_rows: expected shape \[3\], got \[4\]"),
    "temperature-nan": ({"temperature": math.nan}, "temperature: expected more than 0, got nan"),
    "top-k": ({"top_k": -1}, "top_k: expected 0 or more, got -1"),
    "top-p": ({"top_p": 1.5}, "top_p: expected 0 to 1, got 1.5"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"logits": torch.zeros(2, 3, 9), "noise": torch.zeros(2, 3, 9)}
    with pytest.raises(ValueError, match=message):
        draw_tokens(**(good | change))


def test_passes_opcheck(device: str) -> None:
    rows = torch.tensor([0, 1, 1], dtype=torch.int32, device=device)
    torch.library.opcheck(
        torch.ops.medusa_kernels.draw_tokens.default,
        (torch.randn(2, 3, 17, device=device), gumbel(2, 2, 17).to(device), rows),
        {"temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1},
    )
