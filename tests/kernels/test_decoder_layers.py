"""decoder_layers against the reference in fp64, and against the ops that it is made of, served by PyTorch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import stored
import torch
from budget import assert_typical_error_within_twice, assert_within_twice
from hypothesis import given, settings
from hypothesis import strategies as st
from modes import NO_BF16, of_the_cpu, reads_values
from torch import Tensor

from medusa_kernels import LayerWeights, Projection, ancestor_words, decoder_layers, packed, reference, served_by
from medusa_kernels.decode_linear import with_linear

Case = dict[str, Any]
DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=NO_BF16)]


FAMILIES: dict[str, dict[str, Any]] = {
    "olmo": {"norms": "whole", "before": False, "after": True, "norm_offset": 0.0},
    "gemma": {
        "norms": "heads", "after": True, "norm_offset": 1.0, "activation": "gelu_tanh", "softcap": 1.5,
        "windows": (6, 0), "tables": (1, 0),
    },
    "granite": {"biases": True, "factor": 0.3},
    "narrow tables": {"rotated": 12, "tables": (0, 1), "own_tables": True},
    "all": {
        "norms": "whole", "after": True, "norm_offset": 1.0, "activation": "gelu_tanh", "softcap": 1.5,
        "windows": (0, 6), "rotated": 10, "tables": (1, 0), "factor": 0.3, "biases": True, "states": (2, 1),
    },
}  # fmt: skip
"""What `make` makes of layers other than Llama's; "narrow tables" as Phi-4-mini and SmolLM3 have them."""


class PlainOps:
    """The ops in PyTorch, matrix products in the dtype of the activations."""

    add_rms_norm = staticmethod(reference.add_rms_norm)
    decode_linear = staticmethod(with_linear)
    rope_append = staticmethod(reference.rope_append)
    tree_attention = staticmethod(reference.tree_attention)


def make(
    nodes: int,
    lens: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    width: int = 40,
    inner: int = 52,
    windows: tuple[int, ...] = (0, 0),
    norms: str = "",
    before: bool = True,
    after: bool = False,
    biases: bool = False,
    rotated: int = 0,
    tables: tuple[int, ...] | None = None,
    int8: tuple[str, ...] = (),
    kinds: dict[str, str] | None = None,
    group: int = 0,
    own_tables: bool = False,
    own_trees: bool = False,
    spare: int = 5,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    **options: Any,
) -> Case:
    """Random inputs; the cache is NaN from row cache_lens on, so that only rows that were written are numbers.

    `norms` are those of q and k: of "heads", of "whole" projections, or "". Other norms are `before` attention and MLP,
    and `after` them. `rotated` numbers of each head are rotated, 0 for all. Of the projections, those in `int8` (of
    "qkv", "o", "gate" and "down") are int8 with scales, and those in `kinds` are of that kind of `stored`. `options`
    are arguments of the op.
    """
    batch, rows, layers = len(lens), max(lens) + nodes + spare, len(windows)
    # One sequence's trees: each node's parent is an earlier node.
    trees = []
    for _ in range(batch if own_trees else 1):
        visible, depths = torch.eye(nodes, dtype=torch.bool), torch.zeros(nodes, dtype=torch.int32)
        for node in range(1, nodes):
            parent = int(torch.randint(node, ()))
            visible[node] |= visible[parent]
            depths[node] = depths[parent] + 1
        trees.append((visible, depths))
    visible, depths = (torch.stack(parts) if own_trees else parts[0] for parts in zip(*trees, strict=True))

    def random(*sizes: int) -> Tensor:
        return torch.randn(sizes).to(device, dtype)

    def projection(name: str, n: int, k: int) -> Projection:
        bias = random(n) / 4 if biases else None
        if kinds and name in kinds:
            weight, *rest = stored.make(kinds[name], (n, k), group)
            return Projection(weight, bias, *rest)
        if name not in int8:
            return Projection(random(n, k) / k**0.5, bias)
        weight = torch.randint(-127, 128, (n, k), dtype=torch.int8).to(device)
        return Projection(weight, bias, (torch.rand(n) + 0.5).to(device) / 64 / k**0.5)

    def layer() -> LayerWeights:
        shapes = {
            "q": (heads * dim, width), "k": (kv_heads * dim, width), "v": (kv_heads * dim, width),
            "o": (width, heads * dim), "gate": (inner, width), "up": (inner, width), "down": (width, inner),
        }  # fmt: skip
        groups = {"q": "qkv", "k": "qkv", "v": "qkv", "up": "gate"}
        norm_sizes = {"heads": (dim, dim), "whole": (heads * dim, kv_heads * dim)}.get(norms, (0, 0))
        sizes = (width * before, width * before, *norm_sizes, width * after, width * after)
        input_norm, post_norm, *own = (1 + random(size) / 8 if size else None for size in sizes)
        projections = [projection(groups.get(name, name), *shape) for name, shape in shapes.items()]
        return LayerWeights(input_norm, post_norm, projections, *own)

    weights, forms = packed([layer() for _ in windows], 1 + random(width) / 8)
    kv = torch.randn(layers, 2, batch, kv_heads, rows, dim)
    for b, length in enumerate(lens):
        kv[:, :, b, :, length:] = torch.nan
    several = () if tables is None else (max(tables) + 1,)
    angles = torch.rand(*several, *(batch,) * own_tables, rows, (rotated or dim) // 2) * 6
    angles = torch.cat((angles, angles), -1)
    return {
        "hidden": random(batch, nodes, width),
        "weights": weights,
        "forms": forms,
        "kv": kv.to(device, dtype),
        "cos": angles.cos().to(device, dtype),
        "sin": angles.sin().to(device, dtype),
        "cache_lens": torch.tensor(lens, dtype=torch.int32, device=device),
        "depths": depths.to(device),
        "ancestors": ancestor_words(visible).to(device),
        "windows": list(windows),
        "eps": 1e-5,
        "scale": dim**-0.5,
        "tables": tables,
    } | options


def run(case: Case, op: Any = decoder_layers) -> tuple[Tensor, Tensor]:
    """Return the hidden states and the cache after a call on a copy of it."""
    kv = case["kv"].clone()
    return op(**(case | {"kv": kv})), kv


def plain(case: Case) -> tuple[Tensor, Tensor]:
    return run(case, lambda **arguments: reference.layers_by(PlainOps, **arguments))


def wide(case: Case) -> Case:
    """The case in fp64; int8 weights stay as they are, and their scales become fp64 too."""

    def of(value: Any) -> Any:
        if isinstance(value, list):
            return [of(item) for item in value]
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    return {name: of(value) for name, value in case.items()}


def written(case: Case) -> Tensor:
    """Bool `[B, S]`: the cache rows that the op writes."""
    row = torch.arange(case["kv"].shape[4], device=case["kv"].device)
    start = case["cache_lens"][:, None]
    return (row >= start) & (row < start + case["hidden"].shape[1])


def of_rows(kv: Tensor, rows: Tensor) -> Tensor:
    """The cache rows named by bool `[B, S]`, of every layer and head."""
    return kv.movedim((2, 4), (0, 1))[rows]


def check(*cases: Case, within_twice: Any = assert_within_twice) -> None:
    """Check the hidden states, the appended rows, and that the bits of all others are as they were.

    The numbers of all cases, which have the same shapes, are compared as one result.
    """
    results = []
    for case in cases:
        (got, kv), (same, same_kv) = run(case), plain(case)
        exact, exact_kv = run(wide(case), reference.decoder_layers)
        assert got.dtype == case["hidden"].dtype
        assert got.is_contiguous()
        rows = written(case)
        results.append((got, same, exact, *(of_rows(cache, rows) for cache in (kv, same_kv, exact_kv))))
        bits = torch.int32 if kv.dtype == torch.float32 else torch.int16
        assert torch.equal(of_rows(kv.view(bits), ~rows), of_rows(case["kv"].view(bits), ~rows))
    together = [torch.stack(parts) for parts in zip(*results, strict=True)]
    within_twice(*together[:3])
    within_twice(*together[3:])


@pytest.mark.parametrize("nodes", [40, 129])  # in one call of the library, and by the other ops
def test_neighbouring_sequences_of_a_larger_cache(nodes: int) -> None:
    case = make(nodes, [4, 7])
    alone, alone_kv = run(case)
    whole = torch.randn(2, 2, 5, *case["kv"].shape[3:])
    whole[:, :, 1:3] = case["kv"]
    before = whole.clone()
    assert torch.equal(decoder_layers(**(case | {"kv": whole[:, :, 1:3]})), alone)
    before[:, :, 1:3] = alone_kv
    torch.testing.assert_close(whole, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("nodes", [9, 129])
def test_slots_name_the_sequence_of_each_row(device: str, nodes: int) -> None:
    """Out of order in a larger cache, of which the other sequences keep their numbers."""
    case, slots = make(nodes, [4, 0, 7], dim=64, device=device), [3, 0, 2]
    alone, alone_kv = run(case)
    whole = torch.randn(2, 2, 5, *case["kv"].shape[3:]).to(device)
    whole[:, :, slots] = case["kv"]
    before = whole.clone()
    own = torch.tensor(slots, dtype=torch.int32, device=device)
    assert torch.equal(decoder_layers(**(case | {"kv": whole, "slots": own})), alone)
    before[:, :, slots] = alone_kv
    torch.testing.assert_close(whole, before, rtol=0, atol=0, equal_nan=True)


def test_reference_agrees_with_a_layer_written_out() -> None:
    """One layer without norms of heads, biases and windows: a chain of nodes is causal attention."""
    case = make(5, [0], heads=2, kv_heads=1, dim=4, windows=(0,), dtype=torch.float64)
    case["ancestors"] = ancestor_words(torch.ones(5, 5, dtype=torch.bool).tril())
    case["depths"] = torch.arange(5, dtype=torch.int32)
    x, cos, sin = case["hidden"][0], case["cos"][:5], case["sin"][:5]
    norm, post, q, k, v, o, gate, up, down, last = case["weights"]

    def normed(x: Tensor, weight: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, 1e-5)

    def rotated(heads: Tensor) -> Tensor:
        first, second = heads[..., :2], heads[..., 2:]
        return heads * cos + torch.cat((-second, first), -1) * sin

    inner = normed(x, norm)
    queries = rotated((inner @ q.T).view(5, 2, 4).transpose(0, 1))
    keys, values = rotated(inner @ k.T), inner @ v.T
    attended = torch.nn.functional.scaled_dot_product_attention(
        queries, keys.expand(2, -1, -1), values.expand(2, -1, -1), is_causal=True, scale=case["scale"]
    )
    x = x + attended.transpose(0, 1).reshape(5, 8) @ o.T
    inner = normed(x, post)
    x = x + (torch.nn.functional.silu(inner @ gate.T) * (inner @ up.T)) @ down.T
    got, kv = run(case | {"states": [1]}, reference.decoder_layers)
    torch.testing.assert_close(got[:, 0], torch.stack((normed(x, last), x)), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(kv[0, :, 0, 0, :5], torch.stack((keys, values)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norms", ["", "heads"])
def test_matches_fp64_on_every_device(device: str, norms: str, dtype: torch.dtype) -> None:
    biases = bool(norms)
    check(make(9, [3, 70, 0], dim=64, width=128, inner=192, norms=norms, biases=biases, dtype=dtype, device=device))


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_other_families_match_fp64(device: str, family: str, dtype: torch.dtype) -> None:
    options: dict[str, Any] = {"dtype": dtype, "device": device} | FAMILIES[family]
    case = make(9, [3, 70, 0], dim=16, width=96, inner=128, **options)
    check(case, within_twice=assert_typical_error_within_twice)


def test_ancestors_beyond_the_last_node_are_ignored(device: str) -> None:
    case = make(9, [70], device=device)
    expected, _ = run(case)
    beyond = case | {"ancestors": case["ancestors"] | (-1 << 9)}
    assert torch.equal(run(beyond)[0], expected)


@NO_BF16
def test_norms_with_an_offset_are_rounded_once(device: str) -> None:
    """In bfloat16: an error of fp32 may decide where the exact product lies between two numbers."""
    case = make(9, [0], width=128, windows=(0,), norm_offset=1.0, dtype=torch.bfloat16, device=device)
    case["weights"] = [torch.zeros_like(weight) for weight in case["weights"][:-1]] + case["weights"][-1:]
    x = case["hidden"].double()
    normed = x / (x.square().mean(-1, keepdim=True) + case["eps"]).sqrt() * (1 + case["weights"][-1].double())
    assert (run(case)[0] != normed.to(torch.bfloat16)).sum() <= 2


@of_the_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=60)
@given(data=st.data())
def test_matches_fp64(dtype: torch.dtype, data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**16), label="seed"))
    kv_heads = data.draw(st.integers(1, 2), label="kv_heads")
    lens = data.draw(st.lists(st.sampled_from([0, 1, 9, 63, 64, 130]), min_size=1, max_size=3), label="lens")
    shape = dict(
        nodes=data.draw(st.integers(1, 20), label="nodes"),
        lens=lens,
        kv_heads=kv_heads,
        heads=kv_heads * data.draw(st.sampled_from([1, 2, 4]), label="groups"),
        dim=data.draw(st.sampled_from([2, 16, 24, 64, 80, 128, 256]), label="dim"),
        width=data.draw(st.sampled_from([7, 32, 50, 129]), label="width"),
        inner=data.draw(st.sampled_from([7, 33, 64, 100]), label="inner"),
        windows=data.draw(st.sampled_from([(0,), (0, 0), (1, 5), (0, 70)]), label="windows"),
        norms=data.draw(st.sampled_from(["", "heads"]), label="norms"),
        biases=data.draw(st.booleans(), label="biases"),
        int8=data.draw(st.sampled_from([(), ("qkv",), ("o", "gate"), ("qkv", "o", "gate", "down")]), label="int8"),
        own_tables=data.draw(st.booleans(), label="own_tables"),
        own_trees=data.draw(st.booleans(), label="own_trees"),
        spare=data.draw(st.integers(0, 3), label="spare"),
        dtype=dtype,
    )
    # The error of a few numbers is chance, in PyTorch's result too: a small shape is drawn several times.
    numbers = shape["nodes"] * len(lens) * min(shape["width"], 2 * len(shape["windows"]) * kv_heads * shape["dim"])
    cases = [make(**shape) for _ in range(math.ceil(1000 / numbers))]
    check(*cases, within_twice=assert_typical_error_within_twice)


@of_the_cpu
@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [2, 24, 80, 256])
def test_every_head_size(dim: int, dtype: torch.dtype) -> None:
    check(make(11, [100, 7], heads=4, kv_heads=1, dim=dim, dtype=dtype))


@of_the_cpu
@pytest.mark.parametrize(
    "change",
    [{"nodes": 129, "lens": [4, 9]}, {"nodes": 5, "lens": [4], "dtype": torch.float16}, {"nodes": 3, "lens": []}],
    ids=["more than 256 rows", "float16", "no rows"],
)
def test_what_is_not_served_by_the_library_is_right_too(change: dict[str, Any]) -> None:
    if not change["lens"]:
        case = make(change["nodes"], [2])
        empty = {name: case[name][:0] for name in ("hidden", "cache_lens")} | {"kv": case["kv"][:, :, :0]}
        got, _ = run(case | empty)
        assert got.shape == (0, 3, 40)
        return
    assert served_by("decoder_layers", "cpu").name == "cpp"
    check(make(**change))


@of_the_cpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("threads", [1, 3])
def test_repeated_calls_are_bit_equal(threads: int, dtype: torch.dtype) -> None:
    """Whatever the number of threads, and the rows beside a sequence."""
    case = make(8, [70, 5], norms="heads", biases=True, own_trees=True, own_tables=True, dtype=dtype)
    wanted, wanted_kv = run(case)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for _ in range(3):
            got, kv = run(case)
            assert torch.equal(got, wanted)
            assert torch.equal(kv.nan_to_num(), wanted_kv.nan_to_num())
        for b in range(2):
            alone = {name: case[name][b : b + 1] for name in ("hidden", "cos", "sin", "cache_lens", "depths")}
            alone |= {"kv": case["kv"][:, :, b : b + 1].contiguous(), "ancestors": case["ancestors"][b : b + 1]}
            assert torch.equal(run(case | alone)[0], wanted[b : b + 1])
    finally:
        torch.set_num_threads(before)


def strided(tensor: Tensor) -> Tensor:
    """The same numbers, every second of a larger tensor's along each axis."""
    larger = tensor.new_full([2 * size for size in tensor.shape], 99)
    view = larger[tuple(slice(None, None, 2) for _ in tensor.shape)]
    return view.copy_(tensor)


@pytest.mark.parametrize("own_trees", [False, True])
def test_strides_are_supported(device: str, own_trees: bool) -> None:
    case = make(6, [9, 3, 1], dim=16, own_trees=own_trees, device=device)
    apart = {name: strided(case[name]) for name in ("hidden", "cache_lens", "depths", "ancestors")}
    (wanted, _), (got, _) = run(case), run(case | apart)
    assert torch.equal(got, wanted)


@reads_values
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        (
            "cache_lens",
            [2, 8],
            "cache_lens: expected 0 to 7 so that 5 more rows fit 12 cache rows, got 8 in batch row 1",
        ),
        ("cache_lens", [-1, 2], "cache_lens: expected 0 to 7 .* got -1 in batch row 0"),
        (
            "depths",
            [0, 1, 1, -9, 2],
            "depths: expected positions .* within the 12 rows of cos and sin, got positions -7",
        ),
        ("slots", [0, 2], "slots: expected 0 to 1, got 2 in batch row 1"),
        ("slots", [-1, 0], "slots: expected 0 to 1, got -1 in batch row 0"),
        ("depths", [0, 1, 1, 2, 10], "depths: expected positions .* 12 rows of cos and sin, got positions 2 to 12"),
    ],
)
def test_rows_and_positions_outside_are_refused(name: str, value: list[int], message: str) -> None:
    case = make(5, [2, 2])
    case[name] = torch.tensor(value, dtype=torch.int32)
    kv = case["kv"].clone()
    with pytest.raises(ValueError, match=message):
        decoder_layers(**(case | {"kv": kv}))
    assert torch.equal(kv.view(torch.int32), case["kv"].view(torch.int32))


BAD = {
    "hidden-dtype": ({"hidden": torch.zeros(2, 5, 40).double()}, "hidden: expected dtype"),
    "kv-layers": ({"kv": torch.zeros(3, 2, 2, 2, 12, 16)}, r"kv: expected shape \[2, 2, 2, Hkv, S, 16\]"),
    "kv-strides": ({"kv": torch.zeros(2, 2, 2, 12, 2, 16).transpose(3, 4)}, "kv: expected a contiguous tensor"),
    "sin-rows": ({"sin": torch.zeros(11, 16)}, r"sin: expected shape \[12, 16\], got \[11, 16\]"),
    "lens-dtype": ({"cache_lens": torch.zeros(2).long()}, "cache_lens: expected dtype int32"),
    "depths-shape": ({"depths": torch.zeros(3, 5).int()}, r"depths: expected shape \[2, 5\]"),
    "ancestors-shape": ({"ancestors": torch.zeros(5, 2).long()}, r"ancestors: expected shape \[5, 1\]"),
    "windows": ({"windows": [0]}, "windows: expected 2, one per layer, got 1"),
    "window": ({"windows": [0, -1]}, r"windows: expected numbers of positions, or 0 for none, got \[0, -1\]"),
    "weights": ({"weights": [torch.zeros(40)]}, "weights: expected 19 tensors, as forms has, got 1"),
    "activation": ({"activation": "relu"}, "activation: expected silu or gelu_tanh, got relu"),
    "softcap": ({"softcap": 0.0}, "softcap: expected a positive number or None, got 0.0"),
    "cos-odd": ({"cos": torch.zeros(12, 5), "sin": torch.zeros(12, 5)}, "cos: expected an even number of columns"),
    "tables": (
        {"cos": torch.zeros(2, 12, 16), "sin": torch.zeros(2, 12, 16), "tables": [0, 2]},
        r"tables: expected 2 numbers below 2, one per layer, got \[0, 2\]",
    ),
    "states": ({"states": [1, 3]}, r"states: expected numbers of layers from 1 to 2, got \[1, 3\]"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decoder_layers(**(make(5, [2, 2]) | change))


@of_the_cpu
def test_norms_of_another_size_than_heads_are_refused() -> None:
    case = make(5, [2, 2], norms="whole")
    case["weights"][3] = torch.ones(16)
    with pytest.raises(ValueError, match=r"size 16 in all layers, or of sizes 64 and 32, got \{64\} and \{16, 32\}"):
        decoder_layers(**case)


def test_passes_opcheck(device: str) -> None:
    case = make(4, [3, 1], biases=True, norms="heads", dim=16, device=device, states=[1])
    # opcheck compares clones of the inputs, for which NaN would never be equal.
    case["kv"] = case["kv"].nan_to_num()
    options = {name: case.pop(name) for name in ("windows", "eps", "scale", "tables", "states")}
    torch.library.opcheck(torch.ops.medusa_kernels.decoder_layers.default, tuple(case.values()), options)


@of_the_cpu
@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_node_has_the_bits_of_its_path_decoded_token_by_token(dtype: torch.dtype, int8: bool) -> None:
    """Past blocks of 64 positions, beyond a window, and with ancestors anywhere among 70 nodes."""
    case = make(70, [60, 129], heads=6, dim=32, windows=(0, 66), own_trees=True, spare=70, dtype=dtype)
    if int8:
        case["kv"] = torch.zeros(*case["kv"].shape[:-1], 32 + 4, dtype=torch.int8)
    got, kv = run(case)
    for b, length in enumerate(case["cache_lens"].tolist()):
        words, depths = case["ancestors"][b], case["depths"][b].tolist()
        [leaf] = [n for n in range(70) if depths[n] == max(depths)][:1]
        path = [n for n in range(70) if int(words[leaf, n // 64]) >> n % 64 & 1]
        assert len(path) > 4
        one = case | {"kv": case["kv"][:, :, b : b + 1].clone(), "depths": torch.zeros(1, dtype=torch.int32)}
        one |= {"ancestors": torch.ones(1, 1, dtype=torch.int64)}
        for depth, node in enumerate(path):
            one |= {"hidden": case["hidden"][b : b + 1, node : node + 1]}
            one |= {"cache_lens": torch.tensor([length + depth], dtype=torch.int32)}
            assert torch.equal(decoder_layers(**one)[0, 0], got[b, node])
        rows = one["kv"][:, :, 0, :, length : length + len(path)]
        assert torch.equal(rows, kv[:, :, b][..., [length + node for node in path], :])


def test_weights_that_are_replaced_between_calls_are_seen() -> None:
    """A tensor that holds other memory, and weights of another form beside the same first one."""
    case = make(3, [9], width=48, inner=48, kinds={"down": "int4"}, group=16)
    other = make(3, [9], width=48, inner=48, kinds={"down": "zeros"}, group=48)
    check(case)
    case["weights"][2].data = other["weights"][2].clone()
    check(case)
    case |= {"weights": [case["weights"][0], *other["weights"][1:]], "forms": other["forms"]}
    check(case)
