"""A KV cache in 8 bits: what is appended, and attention to it against fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from budget import assert_within_twice
from modes import DTYPES, NO_BF16

from medusa_kernels import ancestor_words, cache_rows, decoder_layers, reference, rope_append, tree_attention
from medusa_kernels.cache_rows import dequantised_rows, quantised_rows


def test_a_row_holds_the_nearest_numbers_and_their_scale() -> None:
    """One number is half way between two codes, whose even one it gets."""
    rows = quantised_rows(torch.tensor([[63.5, -0.6, 1.25, 31.4], [0.0] * 4]))
    assert rows[:, :4].tolist() == [[127, -1, 2, 63], [0] * 4]
    assert dequantised_rows(rows, torch.float32).tolist() == [[63.5, -0.5, 1.0, 31.5], [0.0] * 4]
    for bad in (math.nan, math.inf):
        rows = quantised_rows(torch.tensor([[1.0, bad, 1.0, 0.0]]))
        assert not dequantised_rows(rows, torch.float32).isfinite().any()


def filled(*sizes: int) -> torch.Tensor:
    return quantised_rows(torch.randn(sizes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "rotated"), [(24, 24), (64, 64), (64, 48)])
def test_appended_rows_are_those_of_a_wide_cache_in_8_bits(
    device: str, dtype: torch.dtype, dim: int, rotated: int
) -> None:
    """Every other row keeps its bytes, and slots name the sequences. The row of a NaN has NaN for a scale."""
    nodes, lens = 5, [7, 3]
    q, k, v = (torch.randn(2, nodes, heads, dim).to(device, dtype) for heads in (4, 2, 2))
    cos, sin = torch.randn(2, 16, rotated).to(device, dtype)
    k[1, 2] = 0
    k[0, 3, 1, 0] = math.nan
    cache = filled(2, 3, 2, 14, dim).to(device)
    wide = torch.zeros(2, 3, 2, 14, dim, dtype=dtype, device=device)
    rest = [torch.tensor(numbers, dtype=torch.int32, device=device) for numbers in (lens, [0, 1, 1, 2, 3])]
    slots = torch.tensor([2, 0], dtype=torch.int32, device=device)
    expected, plain_q = cache.clone(), rope_append(q, k, v, cos, sin, *wide, *rest, slots=slots)
    for slot, length in zip([2, 0], lens, strict=True):
        rows = slice(length, length + nodes)
        expected[:, slot, :, rows] = quantised_rows(wide[:, slot, :, rows])
    assert torch.equal(rope_append(q, k, v, cos, sin, *cache, *rest, slots=slots), plain_q)
    lost = dequantised_rows(expected, torch.float32).isnan().any(-1)
    assert lost.sum() == 1
    assert torch.equal(dequantised_rows(cache, torch.float32).isnan().any(-1), lost)
    assert torch.equal(cache[~lost], expected[~lost])


FORMS: dict[str, dict[str, Any]] = {
    "tree": {}, "window": {"window": 20}, "softcap": {"softcap": 3.0}, "negative": {"scale": -0.2}, "plain": {},
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_attention_reads_rows_in_8_bits(device: str, dtype: torch.dtype, form: str) -> None:
    """Rows past the tree have NaN for a scale. 300 keys are so many that they are divided. Scales differ by row."""
    nodes, dim, lens = 1 if form == "plain" else 9, 24, [300, 5]
    cache = torch.randn(2, 3, 2, 320, dim) * torch.rand(2, 3, 2, 320, 1).exp2() * 2
    cache = quantised_rows(cache)
    for slot, length in ((2, 300), (0, 5)):
        cache[:, slot, :, length + nodes :] = -1
    q = torch.randn(2, nodes, 4, dim).to(device, dtype)
    words = ancestor_words((torch.rand(nodes, nodes) < 0.4).tril(-1) | torch.eye(nodes, dtype=torch.bool)).to(device)
    lengths, slots = (torch.tensor(n, dtype=torch.int32, device=device) for n in (lens, [2, 0]))
    got = tree_attention(q, *cache.to(device), lengths, words, slots=slots, **FORMS[form])
    exact = [dequantised_rows(part, torch.float64).to(device) for part in cache]
    expected = reference.tree_attention(q.double(), *exact, lengths, words, slots=slots, **FORMS[form])
    rounded = [dequantised_rows(part, torch.float32).to(device, dtype) for part in cache]
    plain = reference.tree_attention(q, *rounded, lengths, words, slots=slots, **FORMS[form])
    assert_within_twice(got, plain, expected.cpu())


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=NO_BF16)])
@pytest.mark.parametrize(("dim", "options"), [(16, {}), (80, {"windows": (0, 6)}), (24, {"softcap": 1.5})])
def test_layers_append_and_read_rows_in_8_bits(device: str, dtype: torch.dtype, dim: int, options: Any) -> None:
    from test_decoder_layers import make, plain, run, wide, written

    case = make(9, [70, 4], dim=dim, dtype=dtype, device=device, **options)
    case["kv"] = quantised_rows(case["kv"])
    (got, kv), (same, same_kv) = run(case), plain(case)
    exact, _ = run(wide(case), reference.decoder_layers)
    assert_within_twice(got, same, exact)
    rows = written(case)
    new, same_new = (cache.movedim((2, 4), (0, 1))[rows] for cache in (kv, same_kv))
    # A number at the edge between two codes may get either one.
    codes = (new - same_new)[..., : -cache_rows.SCALE_BYTES].abs()
    assert codes.max() <= (1 if dtype == torch.float32 else 6)
    assert (codes > 0).float().mean() < (1e-3 if dtype == torch.float32 else 0.2)
    values = (dequantised_rows(cache, torch.float32) for cache in (new, same_new))
    torch.testing.assert_close(*values, rtol=0.05, atol=0.05)
    kept, before = (cache.movedim((2, 4), (0, 1))[~rows] for cache in (kv, case["kv"]))
    assert torch.equal(kept, before)


def test_caches_that_do_not_fit_are_refused() -> None:
    def call(cache: torch.Tensor) -> torch.Tensor:
        lens, words = torch.zeros(1, dtype=torch.int32), torch.ones(1, 1, dtype=torch.int64)
        return tree_attention(torch.zeros(1, 1, 2, 8), cache, cache, lens, words)

    with pytest.raises(ValueError, match=r"k_cache: expected shape \[1, 2, 4, 12\], got \[1, 2, 4, 8\]"):
        call(torch.zeros(1, 2, 4, 8, dtype=torch.int8))
    with pytest.raises(ValueError, match="k_cache: expected rows of adjacent bytes"):
        call(torch.zeros(1, 2, 4, 13, dtype=torch.int8)[..., :12])
    case_kv = torch.zeros(1, 2, 1, 2, 4, 8, dtype=torch.int8)
    with pytest.raises(ValueError, match="cos: expected an even number of columns up to the head size 4, got 8"):
        decoder_layers(
            torch.zeros(1, 1, 16), [], [0], case_kv, torch.zeros(4, 8), torch.zeros(4, 8),
            torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), torch.ones(1, 1, dtype=torch.int64),
            windows=[0], eps=1e-5, scale=1.0,
        )  # fmt: skip
