"""tree_attention against loops over nodes and keys in fp64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from budget import assert_typical_error_within_twice, assert_within_twice
from hypothesis import given, settings
from hypothesis import strategies as st
from modes import DTYPES, reads_values
from torch import Tensor

from medusa_kernels import ancestor_words, reference, served_by, tree_attention
from medusa_kernels._registry import interpreted

Case = dict[str, Any]


def random_sets(nodes: int, batch: int | None = None, density: float = 0.4) -> Tensor:
    """Random sets of earlier nodes that include the node itself: bool [N, N] or [B, N, N]."""
    size = (nodes, nodes) if batch is None else (batch, nodes, nodes)
    return (torch.rand(size) < density).tril(-1) | torch.eye(nodes, dtype=torch.bool)


def words_by_hand(sets: Tensor) -> Tensor:
    """Pack sets with Python integers; the top bit of a word is its sign."""
    nodes = sets.shape[-1]
    flat = sets.reshape(-1, nodes).tolist()
    rows = []
    for members in flat:
        whole = sum(1 << j for j, member in enumerate(members) if member)
        words = [(whole >> (64 * w)) & (2**64 - 1) for w in range(-(-nodes // 64))]
        rows.append([word - 2**64 if word >= 2**63 else word for word in words])
    return torch.tensor(rows, dtype=torch.int64).view(*sets.shape[:-1], -1)


def make(
    nodes: int,
    lens: list[int],
    *,
    heads: int = 2,
    kv_heads: int = 1,
    dim: int = 8,
    spare: int = 5,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    own_trees: bool = False,
    density: float = 0.4,
) -> Case:
    """Random inputs: the cache is a strided view of a block, and NaN from row cache_lens + N on."""
    batch, rows = len(lens), max(lens) + nodes + spare
    block = torch.randn(2, batch, kv_heads, rows, dim)
    for b, length in enumerate(lens):
        block[:, b, :, length + nodes :] = math.nan
    block = block.to(device, dtype)
    sets = random_sets(nodes, batch if own_trees else None, density)
    return {
        "q": torch.randn(batch, nodes, heads, dim).to(device, dtype),
        "k_cache": block[0],
        "v_cache": block[1],
        "cache_lens": torch.tensor(lens, dtype=torch.int32, device=device),
        "ancestors": words_by_hand(sets).to(device),
        "sets": sets,
    }


def run(case: Case, **options: Any) -> Tensor:
    """Call the op with uninitialised memory set to NaN: that of the result and of the op's own buffers."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(3).isnan().all()
        return tree_attention(*(case[n] for n in ("q", "k_cache", "v_cache", "cache_lens", "ancestors")), **options)
    finally:
        torch.use_deterministic_algorithms(False)


def visible_keys(case: Case, b: int, i: int, window: int | None) -> list[int]:
    """The cache rows that node i of row b sees, one by one."""
    length = int(case["cache_lens"][b])
    sets = case["sets"] if case["sets"].dim() == 2 else case["sets"][b]
    depths = (sets.sum(-1) - 1).tolist()
    positions = {row: row for row in range(length)}
    positions |= {length + j: length + depths[j] for j, member in enumerate(sets[i].tolist()) if member}
    own = positions[length + i]
    return [row for row, position in positions.items() if window is None or own - position < window]


def brute_force(case: Case, dtype: torch.dtype, **options: Any) -> Tensor:
    """Attention of each node and head separately, in one precision throughout."""
    q, keys, values = (case[name].cpu().to(dtype) for name in ("q", "k_cache", "v_cache"))
    batch, nodes, heads, dim = q.shape
    groups = heads // keys.shape[1]
    scale, cap = options.get("scale"), options.get("softcap")
    out = torch.empty_like(q)
    for b in range(batch):
        for i in range(nodes):
            rows = visible_keys(case, b, i, options.get("window"))
            for h in range(heads):
                scores = keys[b, h // groups, rows] @ q[b, i, h] * (1 / math.sqrt(dim) if scale is None else scale)
                if cap is not None:
                    scores = cap * torch.tanh(scores / cap)
                out[b, i, h] = torch.softmax(scores, 0) @ values[b, h // groups, rows]
    return out


@settings(max_examples=15 if interpreted() else 40)
@given(data=st.data())
def test_matches_loops_over_nodes(device: str, data: st.DataObject) -> None:
    kv_heads = data.draw(st.integers(1, 2), label="kv_heads")
    options = {
        "window": data.draw(st.none() | st.integers(1, 12), label="window"),
        "softcap": data.draw(st.none() | st.floats(0.5, 20), label="softcap"),
        "scale": data.draw(st.none() | st.floats(0.1, 2), label="scale"),
    }
    torch.manual_seed(data.draw(st.integers(0, 2**16), label="seed"))
    case = make(
        data.draw(st.integers(1, 9), label="nodes"),
        data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3), label="lens"),
        kv_heads=kv_heads,
        heads=kv_heads * data.draw(st.integers(1, 3), label="groups"),
        own_trees=data.draw(st.booleans(), label="own_trees"),
        spare=data.draw(st.integers(0, 3), label="spare"),
        device=device,
    )
    exact = brute_force(case, torch.float64, **options)
    assert_typical_error_within_twice(run(case, **options), brute_force(case, torch.float32, **options), exact)


@given(data=st.data())
def test_reference_in_fp64_is_exact(data: st.DataObject) -> None:
    options = {
        "window": data.draw(st.none() | st.integers(1, 9), label="window"),
        "softcap": data.draw(st.none() | st.floats(0.5, 9), label="softcap"),
    }
    torch.manual_seed(data.draw(st.integers(0, 2**16), label="seed"))
    lens = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=3), label="lens")
    case = make(data.draw(st.integers(1, 7)), lens, heads=4, kv_heads=2, dtype=torch.float64, own_trees=True)
    got = reference.tree_attention(*list(case.values())[:5], **options)
    torch.testing.assert_close(got, brute_force(case, torch.float64, **options), rtol=1e-12, atol=1e-12)


def plain_and_exact(case: Case, window: int | None = None) -> tuple[Tensor, Tensor, float]:
    """Eager PyTorch in the dtype of the inputs, and in fp64; for trees shared by rows of one length.

    The third result is the value of which one rounding is allowed. In fp32 the rounding of a score is also that of a
    probability, and it depends on the order of the sum over D: hence the sum of the absolute products.
    """
    nodes, length = case["q"].shape[1], int(case["cache_lens"][0])
    mask = torch.full((nodes, length + nodes), -math.inf)
    for i in range(nodes):
        mask[i, visible_keys(case, 0, i, window)] = 0
    tensors = [case[name] for name in ("q", "k_cache", "v_cache")]
    plain = masked_softmax(*tensors, mask.to(tensors[0]))[0]
    exact, products = masked_softmax(*(t.cpu().double() for t in tensors), mask)
    return plain, exact, exact.abs().max().item() * (products if plain.dtype == torch.float32 else 1)


def masked_softmax(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> tuple[Tensor, float]:
    groups = q.shape[2] // keys.shape[1]
    keys, values = (t[:, :, : mask.shape[1]].repeat_interleave(groups, 1) for t in (keys, values))
    q, keys, root = q.transpose(1, 2), keys.transpose(2, 3), math.sqrt(q.shape[3])
    products = (q.abs() @ keys.abs()).max().item() / root
    return ((q @ keys / root + mask).softmax(-1) @ values).transpose(1, 2), products


# One word holds 64 nodes: after 63 it fills and overflows.
SHAPES = [
    (1, 127, (7, 1), 128),
    (1, 1000, (4, 1), 80),
    (2, 1, (8, 2), 80),
    (3, 128, (7, 7), 96),
    (3, 0, (4, 1), 256),
    (63, 127, (4, 1), 64),
    (65, 1, (4, 1), 128),
    (256, 127, (2, 2), 64),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("nodes", "length", "heads", "dim"), SHAPES)
def test_error_is_at_most_twice_that_of_pytorch(
    device: str, nodes: int, length: int, heads: tuple[int, int], dim: int, dtype: torch.dtype
) -> None:
    case = make(nodes, [length], heads=heads[0], kv_heads=heads[1], dim=dim, dtype=dtype, device=device)
    for window in (None, 70):
        assert_within_twice(run(case, window=window), *plain_and_exact(case, window))


@pytest.mark.parametrize("density", [0.0, 1.0], ids=["empty", "full"])
@pytest.mark.parametrize("nodes", [2, 64, 65])
def test_trees_with_no_edges_and_with_all_edges(device: str, nodes: int, density: float) -> None:
    """A full tree is a chain: its last node sees everything, and half of it with a window of half the nodes."""
    case = make(nodes, [20], heads=4, dim=64, dtype=torch.float16, device=device, density=density)
    for window in (None, nodes // 2):
        assert_within_twice(run(case, window=window), *plain_and_exact(case, window))


def cut_finely(
    monkeypatch: pytest.MonkeyPatch, *, rows: int = 64, overlap: bool = False, splits: int | None = None
) -> None:
    """Make the kernels, if they are used, take small tiles and split the keys into one part per block, or a number."""
    kernels = pytest.importorskip("medusa_kernels._triton.tree_attention")
    config = kernels.Config(rows, 16, 4, 2, 1, 16, overlap)
    monkeypatch.setattr(kernels, "configuration", lambda *_, **__: config)
    monkeypatch.setattr(kernels, "_splits", lambda *given: splits or max(1, given[-1] // 16))


@pytest.mark.parametrize(("nodes", "window"), [(1, None), (5, 3), (70, None), (70, 50)])
def test_keys_split_into_many_small_parts(
    device: str, monkeypatch: pytest.MonkeyPatch, nodes: int, window: int | None
) -> None:
    """Most parts are empty, others hold one ragged block, or nothing that some node sees."""
    cut_finely(monkeypatch)
    case = make(nodes, [0, 33, 100], heads=2, dim=16, spare=200, own_trees=True, device=device)
    plain, exact = (brute_force(case, dtype, window=window) for dtype in (torch.float32, torch.float64))
    assert_typical_error_within_twice(run(case, window=window), plain, exact)


class Launches:
    """Takes the place of a kernel, which it launches and counts."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.count = kernel, 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        self.count += 1
        return self.kernel[grid]


@pytest.fixture
def merges(device: str, monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Counts the launches of the second kernel."""
    if served_by("tree_attention", device).name != "triton":
        pytest.skip("the kernels run on a GPU or in Triton's interpreter")
    kernels = pytest.importorskip("medusa_kernels._triton.tree_attention")
    found = Launches(kernels.merge_kernel)
    monkeypatch.setattr(kernels, "merge_kernel", found)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("nodes", "window"), [(1, None), (5, 50), (20, 3)])
def test_shares_are_merged(
    device: str, monkeypatch: pytest.MonkeyPatch, merges: Launches, nodes: int, window: int | None, dtype: torch.dtype
) -> None:
    """Up to three tiles of rows, batch rows with one share of keys and with several.

    The default scale of 20 dimensions, times log2(e), is one number if rounded once and another if rounded twice.
    """
    cut_finely(monkeypatch, rows=16, splits=5)
    case = make(nodes, [0, 10, 70], heads=4, kv_heads=2, dim=20, dtype=dtype, device=device)
    found = run(case, window=window)
    assert merges.count == 1
    plain, exact = (brute_force(case, kind, window=window) for kind in (dtype, torch.float64))
    assert_typical_error_within_twice(found, plain, exact)


def test_a_chunk_of_shares_is_not_the_limit(device: str, monkeypatch: pytest.MonkeyPatch, merges: Launches) -> None:
    """More shares than the merge loads largest scores of at once, whose largest scores rise and fall."""
    cut_finely(monkeypatch, splits=20)
    case = make(3, [330], dim=16, device=device)
    case["k_cache"][:, :, :330] *= torch.linspace(1, 9, 330).sin()[:, None].to(device) * 4
    assert_within_twice(run(case), *plain_and_exact(case))
    assert merges.count == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{"window": 30}, {"window": 3}, {"scale": -0.4}, {"softcap": 2.0, "window": 50}])
def test_overlapped_products_give_the_same_bits(
    device: str, monkeypatch: pytest.MonkeyPatch, merges: Launches, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Shares of no, one and more whole blocks; a head size that is padded."""
    for nodes, splits in ((5, 1), (5, 3), (1, 3)):
        case = make(nodes, [0, 16, 95], heads=4, kv_heads=2, dim=24, dtype=dtype, device=device)
        results = []
        for overlap in (False, True):
            cut_finely(monkeypatch, overlap=overlap, splits=splits)
            results.append(run(case, **options))
        assert not results[0].isnan().any()
        assert torch.equal(*results)


@pytest.mark.skipif(interpreted(), reason="nothing is compiled in Triton's interpreter")
def test_inductor_compiles_the_op() -> None:
    case = make(3, [4], device="cpu")
    torch.testing.assert_close(torch.compile(run)(case), run(case))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 3.0},
        {"softcap": 1.0, "window": 6},
        {"softcap": 1e4},
        {"softcap": 2.0, "scale": -0.4},
        {"scale": 0.0},
    ],
)
def test_softcap_matches_loops(device: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """Also of scores far below the cap, of which 1 - 2 / (exp(2x) + 1) would lose the digits."""
    case = make(9, [70], heads=4, kv_heads=2, dim=64, dtype=dtype, device=device)
    plain, exact = (brute_force(case, kind, **options) for kind in (dtype, torch.float64))
    assert_typical_error_within_twice(run(case, **options), plain, exact)


def test_a_tree_changed_in_place_takes_effect(device: str) -> None:
    """The CPU path caches the last tree's mask, and must notice a change in place or of any other argument."""
    case = make(4, [600], device=device)
    run(case)
    for sets, window in ((torch.eye(4, dtype=torch.bool), None), (torch.ones(4, 4).tril().bool(), None)):
        case["sets"] = sets
        case["ancestors"].copy_(words_by_hand(sets))
        assert_within_twice(run(case, window=window), *plain_and_exact(case, window))
    for window in (5, 2, None):
        assert_within_twice(run(case, window=window), *plain_and_exact(case, window))
    case["cache_lens"].fill_(3)
    assert_within_twice(run(case), *plain_and_exact(case))
    longer = make(4, [1100], device=device) | {"sets": case["sets"], "ancestors": case["ancestors"]}
    assert_within_twice(run(longer), *plain_and_exact(longer))


def test_another_tree_of_the_same_size_takes_effect(device: str) -> None:
    one, other = make(6, [9], device=device), make(6, [9], device=device)
    other["sets"] = torch.eye(6, dtype=torch.bool)
    other["ancestors"] = words_by_hand(other["sets"]).to(device)
    for case in (one, other, one):
        assert_within_twice(run(case), *plain_and_exact(case))


def test_strided_queries_and_block_views(device: str) -> None:
    case = make(3, [4], heads=4, kv_heads=2, device=device)
    expected = run(case)
    fused = torch.randn(1, 3, 9, 8, device=device)
    fused[:, :, 2:6] = case["q"]
    block = torch.randn(2, 2, 1, 2, *case["k_cache"].shape[2:], device=device)
    block[1, 0], block[1, 1] = case["k_cache"], case["v_cache"]
    got = run(case | {"q": fused[:, :, 2:6], "k_cache": block[1, 0], "v_cache": block[1, 1]})
    assert got.is_contiguous()
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_caches_of_any_strides(device: str) -> None:
    """Rows before heads, as in some caches, and values with strided components."""
    case = make(5, [40, 7], heads=4, kv_heads=2, dim=16, device=device)
    expected = run(case)
    keys = case["k_cache"].transpose(1, 2).contiguous().transpose(1, 2)
    apart = torch.full((*case["v_cache"].shape[:3], 33), math.nan, device=device)
    apart[..., 1::2] = case["v_cache"]
    got = run(case | {"k_cache": keys, "v_cache": apart[..., 1::2]})
    torch.testing.assert_close(got, expected)  # the CPU's own kernel adds up in another order


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("nodes", "lens", "slots"),
    [(1, [0, 70, 10], [4, 0, 2]), (20, [0, 70, 10], [4, 0, 2]), (20, [40, 40, 40], [3, 1, 4]), (1, [40, 40], [1, 2])],
    ids=str,
)
def test_slots_name_the_sequence_of_each_row(
    device: str, monkeypatch: pytest.MonkeyPatch, nodes: int, lens: list[int], slots: list[int], dtype: torch.dtype
) -> None:
    """Against the same sequences next to each other, also in several shares; the other sequences are NaN."""
    case = make(nodes, lens, heads=4, kv_heads=2, dim=16, dtype=dtype, device=device)
    expected = run(case)
    apart = {name: case[name].new_full((6, *case[name].shape[1:]), math.nan) for name in ("k_cache", "v_cache")}
    for name, cache in apart.items():
        cache[slots] = case[name]
    own = torch.tensor(slots, dtype=torch.int32, device=device)
    torch.testing.assert_close(run(case | apart, slots=own), expected)  # the CPU adds up single rows in another order
    arguments = [(case | apart)[name] for name in ("q", "k_cache", "v_cache", "cache_lens", "ancestors")]
    torch.testing.assert_close(
        reference.tree_attention(*arguments, slots=own), reference.tree_attention(*list(case.values())[:5])
    )
    if served_by("tree_attention", device).name == "triton":
        cut_finely(monkeypatch, rows=16, splits=5)
        assert torch.equal(run(case | apart, slots=own), run(case))


@given(st.integers(1, 200), st.integers(0, 2**16))
def test_bit_words_hold_the_sets_of_ancestors(nodes: int, seed: int) -> None:
    torch.manual_seed(seed)
    sets = torch.rand(2, nodes, nodes) < 0.5
    assert torch.equal(ancestor_words(sets), words_by_hand(sets))
    assert torch.equal(reference.visible_nodes(words_by_hand(sets), nodes), sets)


BAD = {
    "q-axes": ({"q": torch.zeros(2, 3, 4)}, "q: expected shape"),
    "q-nodes": ({"q": torch.zeros(2, 257, 4, 8)}, "q: expected 1 to 256 nodes, got 257"),
    "q-heads": ({"q": torch.zeros(2, 3, 3, 8)}, "q: expected a multiple of 2 heads, got 3"),
    "v_cache-rows": ({"v_cache": torch.zeros(2, 2, 8, 8)}, "v_cache: expected shape"),
    "cache_lens-shape": ({"cache_lens": torch.zeros(3, dtype=torch.int32)}, "cache_lens: expected shape"),
    "slots-dtype": ({"slots": torch.zeros(2, dtype=torch.int64)}, "slots: expected dtype int32"),
    "ancestors-words": ({"ancestors": torch.ones(3, 2, dtype=torch.int64)}, "ancestors: expected shape"),
    "window": ({"window": 0}, "window: expected None or at least 1, got 0"),
    "softcap": ({"softcap": -1.0}, "softcap: expected None or more than 0"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "q": torch.zeros(2, 3, 4, 8),
        "k_cache": torch.zeros(2, 2, 9, 8),
        "v_cache": torch.zeros(2, 2, 9, 8),
        "cache_lens": torch.zeros(2, dtype=torch.int32),
        "ancestors": torch.ones(3, 1, dtype=torch.int64),
    }
    with pytest.raises(ValueError, match=message):
        tree_attention(**(good | change))


@reads_values
@pytest.mark.parametrize(("length", "softcap"), [(-1, None), (7, 3.0)])
def test_lengths_beyond_the_cache_are_refused(length: int, softcap: float | None) -> None:
    case = make(3, [1, 1], spare=5)
    case["cache_lens"][1] = length
    with pytest.raises(ValueError, match=f"cache_lens: expected 0 to 6 .* got {length} in batch row 1"):
        run(case, softcap=softcap)


@reads_values
@pytest.mark.parametrize("slot", [-1, 2])
def test_slots_outside_the_cache_are_refused(slot: int) -> None:
    with pytest.raises(ValueError, match=f"slots: expected 0 to 1, got {slot} in batch row 1"):
        run(make(3, [1, 1]), slots=torch.tensor([0, slot], dtype=torch.int32))


@pytest.mark.parametrize(
    ("nodes", "lens", "options"),
    [(5, [0, 4], {"window": 3}), (65, [4, 4], {"softcap": 2.0, "scale": 0.3})],
)
def test_passes_opcheck(device: str, nodes: int, lens: list[int], options: dict[str, Any]) -> None:
    case = make(nodes, lens, heads=4, kv_heads=2, device=device)
    slots = torch.arange(len(lens), dtype=torch.int32, device=device)
    for more in ({}, {"slots": slots}):
        arguments = options | more
        torch.library.opcheck(torch.ops.medusa_kernels.tree_attention.default, tuple(case.values())[:5], arguments)
