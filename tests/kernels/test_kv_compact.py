"""kv_compact against a copy: every row is read from the old cache before any is written."""

from __future__ import annotations

from typing import Any

import modes
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from medusa_kernels import kv_compact, reference

DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.float64]


def make_cache(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """A cache of random bytes: every bit pattern must survive, NaN payloads included."""
    size = torch.empty(0, dtype=dtype).element_size()
    return torch.randint(0, 256, (*shape[:-1], shape[-1] * size), dtype=torch.uint8).view(dtype).to(device)


def int32(values: Any, device: str = "cpu") -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def by_copy(kv: Tensor, lens: list[int], paths: list[list[int]], accepted: list[int]) -> Tensor:
    old = kv.view(torch.uint8).cpu().clone()
    new = old.clone()
    for b, (length, path, accept) in enumerate(zip(lens, paths, accepted, strict=True)):
        for i in range(accept + 1):
            new[:, :, b, :, length + i] = old[:, :, b, :, length + path[i]]
    return new


def check(kv: Tensor, lens: list[int], paths: list[list[int]], accepted: list[int]) -> None:
    wanted = by_copy(kv, lens, paths, accepted)
    again = kv.clone()
    arguments = (int32(lens, kv.device.type), int32(paths, kv.device.type), int32(accepted, kv.device.type))
    assert kv_compact(kv, *arguments) is None
    assert torch.equal(kv.view(torch.uint8).cpu(), wanted)
    reference.kv_compact(again, *arguments)
    assert torch.equal(again.view(torch.uint8).cpu(), wanted)


@given(data=st.data())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_path_matches_a_copy(device: str, dtype: torch.dtype, data: st.DataObject) -> None:
    """Ascending paths, so sources overlap targets; after the accepted steps the path holds arbitrary values."""
    torch.manual_seed(data.draw(st.integers(0, 2**16), label="seed"))
    batch = data.draw(st.integers(1, 3), label="batch")
    steps = data.draw(st.integers(1, 5), label="steps")
    lens, paths, accepted = [], [], []
    for _ in range(batch):
        ascending = sorted(data.draw(st.sets(st.integers(0, 8), min_size=steps, max_size=steps)))
        accept = data.draw(st.integers(-1, steps - 1))
        padding = data.draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=steps, max_size=steps))
        lens.append(data.draw(st.integers(0, 4)))
        paths.append(ascending[: accept + 1] + padding[accept + 1 :])
        accepted.append(accept)
    dim = data.draw(st.integers(1, 5), label="dim")
    kv = make_cache((2, 2, batch, data.draw(st.integers(1, 2)), 13, dim), dtype, device)
    check(kv, lens, paths, accepted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [80, 128])
def test_row_sizes_of_real_models(device: str, dtype: torch.dtype, dim: int) -> None:
    kv = make_cache((3, 2, 2, 2, 40, dim), dtype, device)
    check(kv, [5, 0], [[0, 1, 4, 17, 34], [0, 3, 7, 20, 39]], [4, 3])


def test_example_by_hand(device: str) -> None:
    """Row r holds r. Prefix 2, path 0, 2, 3: rows 2, 4, 5 become rows 2, 3, 4, where 4 is both source and target."""
    kv = torch.arange(8.0, device=device).view(1, 1, 1, 1, 8, 1).repeat(1, 2, 1, 1, 1, 1)
    kv_compact(kv, int32([2], device), int32([[0, 2, 3]], device), int32([2], device))
    assert kv[0, 0].flatten().tolist() == [0, 1, 2, 4, 5, 5, 6, 7]
    assert kv[0, 1].flatten().tolist() == [0, 1, 2, 4, 5, 5, 6, 7]


def test_nothing_accepted_moves_nothing(device: str) -> None:
    """-1 leaves a row unchanged even if its length and path are invalid, as in a finished row."""
    kv = make_cache((1, 2, 2, 1, 6, 3), device=device)
    check(kv, [100, 1], [[9, 9], [0, 3]], [-1, 1])


@pytest.mark.parametrize("steps", [6, 9, 257])
def test_long_paths_move_in_chunks(device: str, steps: int) -> None:
    """More rows than one chunk of a kernel moves; every accepted length of the shorter paths."""
    lengths = range(-1, steps) if steps <= 9 else (-1, 0, 7, 8, 9, steps // 2, steps - 2, steps - 1)
    for accept in lengths:
        paths = [sorted(torch.randperm(steps + extra)[:steps].tolist()) for extra in (0, 1, 30)]
        kv = make_cache((1, 2, 3, 2, steps + 35, 8), torch.float16, device)
        check(kv, [0, 3, 5], paths, [accept, steps - 1, min(accept + 1, steps - 1)])


def test_neighbouring_sequences_of_a_larger_cache(device: str) -> None:
    whole = make_cache((3, 2, 6, 2, 12, 16), device=device)
    before = whole.clone()
    lens, paths, accepted = [2, 5], [[0, 2, 5], [1, 3, 6]], [2, 1]
    kv_compact(whole[:, :, 3:5], int32(lens, device), int32(paths, device), int32(accepted, device))
    expected = by_copy(before[:, :, 3:5], lens, paths, accepted)
    before.view(torch.uint8)[:, :, 3:5] = expected.to(device)
    assert torch.equal(whole.view(torch.uint8), before.view(torch.uint8))


def test_slots_name_the_sequence_of_each_row(device: str) -> None:
    """Out of order, with one between that nobody names and one whose row has ended; the others keep every byte."""
    kv = make_cache((3, 2, 5, 2, 12, 16), device=device)
    again, wanted = kv.clone(), kv.clone()
    lens, paths, accepted, slots = [2, 9, 5], [[0, 2, 5], [1, 2, 3], [1, 3, 6]], [2, -1, 1], [4, 1, 0]
    wanted.view(torch.uint8)[:, :, slots] = by_copy(kv[:, :, slots], lens, paths, accepted).to(device)
    arguments = int32(lens, device), int32(paths, device), int32(accepted, device)
    for op, cache in ((kv_compact, kv), (reference.kv_compact, again)):
        op(cache, *arguments, slots=int32(slots, device))
        assert torch.equal(cache.view(torch.uint8), wanted.view(torch.uint8))


def test_strided_index_tensors(device: str) -> None:
    kv = make_cache((1, 2, 2, 1, 9, 3), device=device)
    wanted = by_copy(kv, [1, 2], [[0, 3], [1, 4]], [1, 1])
    path = int32([[0, 1], [3, 4]], device).T
    kv_compact(kv, int32([1, 0, 2, 0], device)[::2], path, int32([1, 1], device))
    assert torch.equal(kv.view(torch.uint8).cpu(), wanted)


BAD = {
    "kv-axes": ({"kv": torch.zeros(2, 2, 1, 9, 4)}, "kv: expected shape"),
    "kv-strides": ({"kv": torch.zeros(1, 2, 2, 1, 9, 8)[..., ::2]}, "kv: expected a contiguous tensor"),
    "kv-sequences": ({"kv": torch.zeros(1, 2, 4, 1, 9, 4)[:, :, ::2]}, "kv: expected a contiguous tensor"),
    "cache_lens-high": ({"cache_lens": int32([0, 7])}, r"cache_lens: .*9 cache rows, got 7 \+ 2 in batch row 1"),
    "cache_lens-low": ({"cache_lens": int32([-1, 0])}, "cache_lens: .* in batch row 0"),
    "path-shape": ({"path": int32([[0, 1]])}, "path: expected shape"),
    "path-falls": ({"path": int32([[0, 2], [3, 1]])}, r"path: expected strictly ascending.* got \[3, 1\]"),
    "path-low": ({"path": int32([[-1, 2], [0, 1]])}, "path: expected strictly ascending"),
    "slots-high": ({"slots": int32([0, 2])}, "slots: expected 0 to 1, got 2 in batch row 1"),
    "slots-low": ({"slots": int32([-1, 0])}, "slots: expected 0 to 1, got -1 in batch row 0"),
    "accept_lens-shape": ({"accept_lens": int32([[0, 0]])}, "accept_lens: expected shape"),
    "accept_lens-high": ({"accept_lens": int32([0, 2])}, "accept_lens: expected -1 to 1 .*got 2 in batch row 1"),
    "accept_lens-low": ({"accept_lens": int32([-2, 0])}, "accept_lens: expected -1 to 1 .*got -2 in batch row 0"),
}

BAD_VALUES = [name for name in BAD if name.split("-")[1] in ("high", "low", "falls", "repeats")]


@pytest.mark.parametrize("with_library", [True, False])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(*case, id=name, marks=modes.reads_values if name in BAD_VALUES else ())
        for name, case in BAD.items()
    ],
)
def test_bad_arguments_are_refused(
    change: dict[str, Any], message: str, with_library: bool, request: pytest.FixtureRequest
) -> None:
    if not with_library:
        request.getfixturevalue("no_library")
    good: dict[str, Any] = {
        "kv": make_cache((1, 2, 2, 1, 9, 4)),
        "cache_lens": int32([0, 5]),
        "path": int32([[0, 2], [0, 2]]),
        "accept_lens": int32([1, 1]),
    }
    before = good["kv"].clone()
    with pytest.raises(ValueError, match=message):
        kv_compact(**(good | change))
    assert torch.equal(good["kv"].view(torch.uint8), before.view(torch.uint8))


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation without the C++ library; the implementation is chosen again for it."""
    from medusa_kernels import _native, _registry

    monkeypatch.setattr(_native, "cpu_library", lambda: None)
    monkeypatch.setattr(_native, "why_missing", lambda kind: f"no {kind} library here")
    monkeypatch.setattr(_registry, "_chosen", {})


@pytest.mark.parametrize(("batch", "steps"), [(1, 1), (3, 4)])
def test_passes_opcheck(device: str, batch: int, steps: int) -> None:
    kv = torch.randn(2, 2, batch, 2, 16, 8, device=device)
    path = torch.arange(0, 2 * steps, 2, dtype=torch.int32, device=device).repeat(batch, 1)
    arguments = (kv, int32([4] * batch, device), path, int32([steps - 1] * batch, device))
    torch.library.opcheck(torch.ops.medusa_kernels.kv_compact.default, arguments)
    slots = {"slots": torch.arange(batch, dtype=torch.int32, device=device).flip(0)}
    torch.library.opcheck(torch.ops.medusa_kernels.kv_compact.default, arguments, slots)
