"""gumbel_noise against Philox in Python's integers, logarithms in fp64, and Gumbel's distribution."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from medusa_kernels import gumbel_noise, reference
from medusa_kernels._registry import interpreted

HIGHEST = 2**32 - 1
PI = 0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0
# Random123's tests/kat_vectors, "philox4x32 10": four words of counter, two of key, four of result.
KNOWN = [
    ((0,) * 6, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((HIGHEST,) * 6, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (PI, (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


def philox(c0: int, c1: int, c2: int, c3: int, k0: int, k1: int) -> tuple[int, ...]:
    """Philox4x32-10 as in figure 2 of Salmon et al. 2011."""
    for _ in range(10):
        high, low = divmod(0xD2511F53 * c0, 2**32)
        other_high, other_low = divmod(0xCD9E8D57 * c2, 2**32)
        c0, c1, c2, c3 = other_high ^ c1 ^ k0, other_low, high ^ c3 ^ k1, low
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0, c1, c2, c3


def bits(seed: int, place: int, vocabulary: int) -> list[int]:
    """The random bits of each token."""
    key = seed % 2**32, (seed >> 32) % 2**32
    words = [word for block in range(-(-vocabulary // 4)) for word in philox(block, place, 0, 0, *key)]
    return words[:vocabulary]


def check(found: Tensor, seed: int, place: int) -> None:
    """Compare one row with fp64: of v, the fp32 number between 0 and 1, only 1 - v is rounded once more."""
    x = np.array(bits(seed, place, len(found)), dtype=np.uint32)
    v = np.minimum(x.astype(np.float32) * np.float32(2**-32) + np.float32(2**-33), np.float32(1 - 2**-24))
    exact = -np.log(-np.log1p(-v.astype(np.float64)))
    # 1 - v has the resolution of 2^-24, or 2^-25 of rounding, relative to the inner logarithm; that and both
    # logarithms have two units in the last place each.
    inner = np.where(v < 1 / 16, 0, 2**-25 / np.maximum(-np.log1p(-v.astype(np.float64)), 1 / 16)) + 2**-22
    assert (np.abs(found.cpu().double().numpy() - exact) <= inner + 2**-22 * np.abs(exact)).all()


def make(
    seeds: list[int], first: list[int], rows: int, vocabulary: int, device: str, dtype: torch.dtype = torch.int32
) -> Tensor:
    places = torch.tensor(first, dtype=dtype, device=device)
    return gumbel_noise(torch.tensor(seeds, device=device), places, rows, vocabulary)


@pytest.mark.parametrize(("words", "wanted"), KNOWN, ids=["zeros", "ones", "pi"])
def test_philox_gives_the_known_answers(words: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    assert philox(*words) == wanted
    tensors = [torch.tensor([word]) for word in words]
    assert [word.item() for word in reference.philox(tensors[:4], tensors[4:])] == list(wanted)


@given(data=st.data())
@settings(max_examples=15 if interpreted() else 40)
def test_matches_fp64(device: str, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 3), label="batch")
    seeds = data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=size, max_size=size), label="seeds")
    first = data.draw(st.lists(st.integers(0, 2**31 - 9), min_size=size, max_size=size), label="first")
    rows = data.draw(st.integers(1, 4), label="rows")
    vocabulary = data.draw(st.sampled_from([1, 2, 3, 4, 5, 17, 63, 100, 1025]), label="vocabulary")
    found = make(seeds, first, rows, vocabulary, device, data.draw(st.sampled_from([torch.int32, torch.int64])))
    assert found.dtype == torch.float32
    assert found.is_contiguous()
    assert found.shape == (size, rows, vocabulary)
    for row, seed, place in zip(found, seeds, first, strict=True):
        for r in range(rows):
            check(row[r], seed, place + r)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("vocabulary", [32_000, 32_003])
def test_vocabularies_of_models(device: str, vocabulary: int) -> None:
    found = make([7, -7], [0, 1000], 2, vocabulary, device)
    check(found[0, 1], 7, 1)
    check(found[1, 0], -7, 1000)


EXTREMES = {
    # seed, place, token, found among billions; the bits; v is 2^-33, and 1 - 2^-24 as the bits round to 2^32
    "smallest": ((553, 35, 14798), 0, 33 * math.log(2)),
    "largest": ((1, 26, 138), 2**32 - 99, -math.log(24 * math.log(2))),
}


@pytest.mark.parametrize(("where", "x", "wanted"), EXTREMES.values(), ids=EXTREMES.keys())
def test_the_smallest_and_the_largest_bits(device: str, where: tuple[int, int, int], x: int, wanted: float) -> None:
    seed, place, token = where
    assert philox(token // 4, place, 0, 0, seed, 0)[token % 4] == x
    found = make([seed], [place], 1, token + 1, device)[0, 0, token].item()
    assert found == pytest.approx(wanted, rel=2**-22)


def test_a_number_depends_on_nothing_but_seed_place_and_token(device: str) -> None:
    """The same bits in any batch, with other rows and other vocabularies."""
    whole = make([3, 9, 2**40], [5, 0, 77], 6, 1003, device)
    for b, (seed, place) in enumerate([(3, 5), (9, 0), (2**40, 77)]):
        for vocabulary in (1, 2, 3, 4, 31, 64, 65, 1002, 1003):
            assert torch.equal(make([seed], [place], 1, vocabulary, device)[0, 0], whole[b, 0, :vocabulary])
        assert torch.equal(make([8, seed], [1, place + 2], 3, 500, device)[1], whole[b, 2:5, :500])


def test_seeds_and_places_may_be_strided(device: str) -> None:
    seeds, first = torch.arange(6, device=device), torch.arange(6, dtype=torch.int32, device=device)
    assert torch.equal(gumbel_noise(seeds[::2], first[1::2], 2, 9), make([0, 2, 4], [1, 3, 5], 2, 9, device))


def uniform(noise: Tensor) -> Tensor:
    """The distribution function of each number, which is uniform if the distribution is Gumbel's."""
    return (-(-noise.double()).exp()).exp()


def test_follows_the_gumbel_distribution(device: str) -> None:
    """Kolmogorov and Smirnov's distance, below which are 99.9 per cent of all samples; and mean and variance."""
    found = make([1, 2], [0, 500], 5, 20_001, device).cpu().double()
    ordered = uniform(found).flatten().sort().values
    count = ordered.numel()
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    assert max((steps[1:] - ordered).max(), (ordered - steps[:-1]).max()) < 1.95 / math.sqrt(count)
    assert abs(found.mean().item() - np.euler_gamma) < 4 * math.pi / math.sqrt(6 * count)
    # The fourth central moment is 27/5 squares of the variance.
    assert abs(found.var().item() / (math.pi**2 / 6) - 1) < 4 * math.sqrt(4.4 / count)


BAD = {
    "seeds-dtype": ({"seeds": torch.zeros(2).int()}, "seeds: expected dtype int64, got int32"),
    "first-shape": ({"first": torch.zeros(3).int()}, r"first: expected shape \[2\], got \[3\]"),
    "rows": ({"rows": 0}, "rows: expected at least 1, got 0"),
    "vocabulary": ({"vocabulary": 0}, "vocabulary: expected 1 to 2147483647, got 0"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"seeds": torch.zeros(2).long(), "first": torch.zeros(2).int(), "rows": 1, "vocabulary": 5}
    with pytest.raises(ValueError, match=message):
        gumbel_noise(**(good | change))


def test_passes_opcheck(device: str) -> None:
    first = torch.tensor([4, 2], dtype=torch.int32, device=device)
    torch.library.opcheck(
        torch.ops.medusa_kernels.gumbel_noise.default, (torch.tensor([1, 2], device=device), first, 3, 17)
    )
