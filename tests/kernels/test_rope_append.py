"""rope_append against the rotation of transformers, bit by bit, and against a loop over rows for the cache writes."""

from __future__ import annotations

import math
from typing import Any

import modes
import pytest
import torch
from budget import assert_within_twice
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.phi3 import modeling_phi3
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from medusa_kernels import reference, rope_append
from medusa_kernels._registry import interpreted

Case = dict[str, Any]
ORDER = ("q", "k", "v", "cos", "sin", "k_cache", "v_cache", "cache_lens", "depths")


def make(
    nodes: int,
    lens: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 8,
    rotated: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    own_tables: bool = False,
    own_depths: bool = False,
) -> Case:
    """Random inputs; the caches start as NaN, and the tables end where the last position does."""
    batch, longest = len(lens), max(lens)
    depths = torch.randint(0, nodes, (batch, nodes) if own_depths else (nodes,), dtype=torch.int32)
    angles = torch.rand((batch,) * own_tables + (longest + nodes, (rotated or dim) // 2)) * 6.28
    angles = torch.cat((angles, angles), -1)
    block = torch.full((2, batch, kv_heads, longest + nodes + 1, dim), math.nan)
    case = {
        "q": torch.randn(batch, nodes, heads, dim),
        "k": torch.randn(batch, nodes, kv_heads, dim),
        "v": torch.randn(batch, nodes, kv_heads, dim),
        "cos": angles.cos(),
        "sin": angles.sin(),
        "k_cache": block[0],
        "v_cache": block[1],
    }
    case = {name: tensor.to(device, dtype) for name, tensor in case.items()}
    return case | {
        "cache_lens": torch.tensor(lens, dtype=torch.int32, device=device),
        "depths": depths.to(device),
    }


def run(case: Case) -> Tensor:
    return rope_append(*(case[name] for name in ORDER))


def expected(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated q, and the two caches, made one batch row and one node at a time."""
    q, k, v = case["q"], case["k"], case["v"]
    batch, nodes = q.shape[:2]
    rotate = apply_rotary_pos_emb if case["cos"].shape[-1] == q.shape[-1] else modeling_phi3.apply_rotary_pos_emb
    out, keys, values = torch.empty_like(q), case["k_cache"].clone(), case["v_cache"].clone()
    for b in range(batch):
        length = int(case["cache_lens"][b])
        depths = case["depths"] if case["depths"].dim() == 1 else case["depths"][b]
        cos, sin = (case[n] if case[n].dim() == 2 else case[n][b] for n in ("cos", "sin"))
        for i in range(nodes):
            position = slice(length + int(depths[i]), length + int(depths[i]) + 1)
            of_node = (q[b, i][None, :, None], k[b, i][None, :, None], cos[None, position], sin[None, position])
            rotated_q, rotated_k = rotate(*of_node)
            out[b, i] = rotated_q[0, :, 0]
            keys[b, :, length + i] = rotated_k[0, :, 0]
            values[b, :, length + i] = v[b, i]
    return out, keys, values


def assert_equal(case: Case, wanted: tuple[Tensor, Tensor, Tensor], got: Tensor) -> None:
    assert torch.equal(got, wanted[0])
    for name, tensor in (("k_cache", wanted[1]), ("v_cache", wanted[2])):
        # NaN marks the rows that must not be touched.
        assert torch.equal(case[name].isnan(), tensor.isnan())
        assert torch.equal(case[name].nan_to_num(), tensor.nan_to_num())


@given(data=st.data())
@pytest.mark.parametrize("dtype", modes.DTYPES, ids=str)
def test_bit_equal_to_transformers(device: str, dtype: torch.dtype, data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**16), label="seed"))
    kv_heads = data.draw(st.integers(1, 2), label="kv_heads")
    dim = data.draw(st.sampled_from([2, 6, 16]), label="dim")
    case = make(
        data.draw(st.integers(1, 6), label="nodes"),
        data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=3), label="lens"),
        heads=kv_heads * data.draw(st.integers(1, 3), label="groups"),
        kv_heads=kv_heads,
        dim=dim,
        rotated=data.draw(st.sampled_from([dim, 2, (dim + 2) // 4 * 2]), label="rotated"),
        own_tables=data.draw(st.booleans(), label="own_tables"),
        own_depths=data.draw(st.booleans(), label="own_depths"),
        dtype=dtype,
        device=device,
    )
    wanted = expected(case)
    untouched = {name: case[name].clone() for name in ("q", "k", "v", "cos", "sin", "cache_lens", "depths")}
    assert_equal(case, wanted, run(case))
    for name, tensor in untouched.items():
        assert torch.equal(case[name], tensor), name


@pytest.mark.parametrize("own_tables", [False, True])
@pytest.mark.parametrize("own_depths", [False, True])
def test_reference_is_bit_equal_to_transformers(device: str, own_tables: bool, own_depths: bool) -> None:
    for rotated in (8, 2):
        case = make(5, [0, 7, 3], rotated=rotated, own_tables=own_tables, own_depths=own_depths, device=device)
        wanted = expected(case)
        assert_equal(case, wanted, reference.rope_append(*(case[name] for name in ORDER)))


@pytest.mark.parametrize("dtype", modes.DTYPES, ids=str)
@pytest.mark.parametrize("parts", [1, 4])
def test_parts_are_added_in_order_and_rounded_once(device: str, parts: int, dtype: torch.dtype) -> None:
    """As q, k and v of one divided projection, whose sums are rounded to the dtype of the tables."""
    for nodes, lens, dim, rotated in ((1, [3], 64, 64), (17, [4, 2], 64, 64), (17, [4, 2], 128, 96)):
        case = make(nodes, lens, dim=dim, rotated=rotated, dtype=dtype, device=device)
        divided = torch.randn(parts, len(lens), nodes, 8, dim, device=device)
        total = divided[0]
        for part in divided[1:]:
            total = total + part
        case |= dict(zip("qkv", total.to(dtype).split((4, 2, 2), 2), strict=True))
        wanted = expected(case)
        got = run(case | dict(zip("qkv", divided.split((4, 2, 2), 3), strict=True)))
        assert got.dtype == dtype
        assert_equal(case, wanted, got)


@pytest.mark.parametrize("dtype", modes.DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "rotated", "parts"), [(8, 8, 0), (80, 80, 0), (128, 128, 3), (80, 32, 3)])
@pytest.mark.parametrize("offset", [None, 1.0])
def test_heads_are_normed_like_qwen3_and_gemma3(
    device: str, offset: float | None, dim: int, rotated: int, parts: int, dtype: torch.dtype
) -> None:
    """Against transformers' norm in fp64, with twice the error of the same in the dtype of the case."""
    nodes, lens, eps = 9, [5, 0], 1e-6
    case = make(nodes, lens, dim=dim, rotated=rotated, dtype=dtype, device=device)
    norms = {name: (1 + torch.randn(dim) / 4).to(device, dtype) for name in ("q_norm", "k_norm")}
    given_case = dict(case)
    if parts:
        divided = {name: torch.randn(parts, *case[name].shape, device=device) for name in "qkv"}
        case |= {name: sum(part.unbind(0)).to(dtype) for name, part in divided.items()}
        given_case |= divided

    def normed(kind: torch.dtype) -> tuple[Tensor, Tensor]:
        wide = {name: t.to(kind) if t.is_floating_point() else t for name, t in case.items()}
        for name, norm in norms.items():
            x, layer = wide[name[0]], (Qwen3RMSNorm if offset is None else Gemma3RMSNorm)(dim, eps)
            layer.weight = torch.nn.Parameter(norm.to(kind), requires_grad=False)
            # The norms themselves compute in fp32.
            exact = ((offset or 0) + layer.weight) * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
            wide[name[0]] = exact if kind == torch.float64 else layer(x)
        out, keys, _ = expected(wide)
        return out, keys

    got = rope_append(*(given_case[name] for name in ORDER), **norms, eps=eps, norm_offset=offset)
    rows = [slice(length, length + nodes) for length in lens]
    for mine, plain, exact in zip((got, case["k_cache"]), normed(dtype), normed(torch.float64), strict=True):
        for b, row in enumerate(rows):
            part = (slice(None), row) if mine is case["k_cache"] else ()
            assert_within_twice(mine[b][part], plain[b][part], exact[b][part])
    for b, row in enumerate(rows):
        assert torch.equal(case["v_cache"][b, :, row], case["v"][b].transpose(0, 1))


@pytest.mark.parametrize(("heads", "kv_heads"), [(28, 4), (3, 3), (40, 8)])
@pytest.mark.parametrize("nodes", [1, 3, 65])
def test_head_counts(device: str, nodes: int, heads: int, kv_heads: int) -> None:
    """Tiles that end within a node's heads, and tiles that span several nodes."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    case = make(nodes, [3, 0], heads=heads, kv_heads=kv_heads, dim=64, dtype=dtype, device=device)
    wanted = expected(case)
    assert_equal(case, wanted, run(case))


@pytest.mark.parametrize("own_tables", [False, True])
def test_any_strides(device: str, own_tables: bool) -> None:
    """Heads before nodes, every second element, caches with rows before heads: no stride is assumed."""
    case = make(5, [4, 2, 0], heads=6, kv_heads=3, dim=16, own_tables=own_tables, own_depths=True, device=device)
    wanted = expected(case)
    swapped = {name: case[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("q", "k", "v")}
    swapped |= {name: case[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("k_cache", "v_cache")}
    got = run(case | swapped)
    assert torch.equal(got, wanted[0])
    assert_equal(case | swapped, wanted, got)

    def spread(tensor: Tensor) -> Tensor:
        wide = torch.full((*tensor.shape, 2), math.nan, dtype=tensor.dtype, device=device)
        wide[..., 0] = tensor
        return wide[..., 0]

    apart = {name: spread(case[name]) for name in ("q", "k", "v", "k_cache", "v_cache")}
    assert_equal(case | apart, wanted, run(case | apart))


def test_slots_name_the_sequence_of_each_row(device: str) -> None:
    """Out of order in larger caches: sequences that nobody names keep their NaN."""
    case, slots = make(5, [4, 0, 7], device=device), [3, 0, 2]
    wanted = expected(case)
    out, *caches = wanted
    large = {name: torch.full((5, *case[name].shape[1:]), math.nan, device=device) for name in ("k_cache", "v_cache")}
    grown = [torch.full_like(large["k_cache"], math.nan) for _ in caches]
    for cache, filled in zip(grown, caches, strict=True):
        cache[slots] = filled
    for op in (rope_append, reference.rope_append):
        own = case | {name: cache.clone() for name, cache in large.items()}
        got = op(*(own[name] for name in ORDER), slots=torch.tensor(slots, dtype=torch.int32, device=device))
        assert_equal(own, (out, grown[0], grown[1]), got)


@pytest.mark.parametrize("slots", [[-1, 1], [0, 2**31 - 1]])
def test_slots_outside_the_cache_are_not_written(device: str, slots: list[int]) -> None:
    """As rows outside the cache: memory around it does not change."""
    if device == "cpu" and not interpreted():
        pytest.skip("the CPU implementation refuses them, see test_bad_arguments_are_refused")
    case = make(3, [2, 4], device=device)
    memory = torch.full((2, 4, *case["k_cache"].shape[1:]), 7.0, device=device)
    own = case | {"k_cache": memory[0, 1:3], "v_cache": memory[1, 1:3]}
    rope_append(*(own[name] for name in ORDER), slots=torch.tensor(slots, dtype=torch.int32, device=device))
    inside = [1 + slot for slot in slots if 0 <= slot < 2]
    assert all((memory[:, slot] == 7).all() for slot in range(4) if slot not in inside)
    assert all((memory[:, slot] != 7).any() for slot in inside)


@pytest.mark.parametrize("lens", [[7, 6], [-1, 12], [2**31 - 1, -(2**31)]])
@pytest.mark.parametrize("rotated", [8, 2])
def test_rows_outside_the_cache_are_not_written(device: str, rotated: int, lens: list[int]) -> None:
    """A kernel cannot refuse them: it must not change memory around the cache, nor read beyond a table."""
    if device == "cpu" and not interpreted():
        pytest.skip("the CPU implementation refuses them, see test_bad_arguments_are_refused")
    nodes, rows = 3, 8
    case = make(nodes, [rows - nodes, 0], rotated=rotated, device=device)
    case["cache_lens"] = torch.tensor(lens, dtype=torch.int32, device=device)
    case["depths"] = torch.arange(nodes, dtype=torch.int32, device=device)
    memory = torch.full((2, 2, 4, rows + 4, 8), 7.0, device=device)
    inner = memory[:, :, 1:3, 2 : 2 + rows]
    got = run(case | {"k_cache": inner[0], "v_cache": inner[1]})
    positions = case["cos"].shape[0]
    for b, length in enumerate(lens):
        for i in range(nodes):
            outside = not 0 <= length + i < positions
            assert torch.equal(got[b, i].isnan(), torch.full_like(got[b, i], outside, dtype=torch.bool))
        kept = [r for r in range(rows) if not length <= r < length + nodes]
        assert (inner[:, b, :, kept] == 7).all()
        written = [r for r in range(rows) if length <= r < length + nodes]
        if written:
            values = case["v"][b, [r - length for r in written]].transpose(0, 1)
            assert torch.equal(inner[1, b][:, written], values)
    inner.fill_(7.0)
    assert (memory == 7).all()


def test_inputs_changed_in_place_take_effect(device: str) -> None:
    """The CPU path caches the last call's factors, and must notice an in-place change of any input."""
    case = make(3, [4], device=device)
    run(case)
    changes = {"cos": lambda t: t.mul_(0.5), "sin": lambda t: t.neg_(), "depths": lambda t: t.fill_(1)}
    for name, change in changes.items():
        change(case[name])
        wanted = expected(case)
        assert_equal(case, wanted, run(case))
    case["cache_lens"].fill_(2)
    wanted = expected(case)
    assert_equal(case, wanted, run(case))


BAD = {
    "q-dtype": ({"q": torch.zeros(2, 3, 4, 8, dtype=torch.int32)}, "q: expected dtype"),
    "q-odd": ({"q": torch.zeros(2, 3, 4, 7)}, "q: expected an even head size, got 7"),
    "k-nodes": ({"k": torch.zeros(2, 4, 2, 8)}, "k: expected shape"),
    "cos-batch": ({"cos": torch.zeros(1, 9, 8)}, "cos: expected shape"),
    "cos-odd": ({"cos": torch.zeros(9, 5)}, "cos: expected an even number of columns up to the head size 8, got 5"),
    "cos-wide": ({"cos": torch.zeros(9, 10)}, "cos: expected an even number of columns up to the head size 8, got 10"),
    "sin-rows": ({"sin": torch.zeros(8, 8)}, "sin: expected shape"),
    "v_cache-dtype": ({"v_cache": torch.zeros(2, 2, 9, 8).half()}, "v_cache: expected dtype"),
    "cache_lens-dtype": ({"cache_lens": torch.zeros(2, dtype=torch.int64)}, "cache_lens: expected dtype int32"),
    "cache_lens-value": ({"cache_lens": torch.tensor([0, 7], dtype=torch.int32)}, "cache_lens: expected 0 to 6"),
    "slots-value": ({"slots": torch.tensor([0, 2], dtype=torch.int32)}, "slots: expected 0 to 1, got 2 in batch row 1"),
    "depths-shape": ({"depths": torch.zeros(4, dtype=torch.int32)}, "depths: expected shape"),
    "parts-count": (
        {"q": torch.zeros(2, 2, 3, 4, 8), "k": torch.zeros(3, 2, 3, 2, 8), "v": torch.zeros(2, 2, 3, 2, 8)},
        r"k: expected shape \[2, 2, 3, 2, 8\], got \[3, 2, 3, 2, 8\]",
    ),
    "norm-alone": ({"q_norm": torch.ones(8)}, "k_norm: expected given together with q_norm, or neither, got None"),
    "norm-shape": ({"q_norm": torch.ones(4), "k_norm": torch.ones(8)}, r"q_norm: expected shape \[8\], got \[4\]"),
    "depths-high": ({"depths": torch.tensor([0, 1, 9], dtype=torch.int32)}, "depths: .*9 rows of cos.*0 to 9"),
    "depths-low": ({"depths": torch.tensor([0, -1, 1], dtype=torch.int32)}, "depths: .*got positions -1 to 1"),
}


READ_VALUES = ("cache_lens-value", "slots-value", "depths-high", "depths-low")


@pytest.mark.parametrize(
    ("change", "message"),
    [pytest.param(*BAD[name], id=name, marks=modes.reads_values if name in READ_VALUES else ()) for name in BAD],
)
def test_bad_arguments_are_refused(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "q": torch.zeros(2, 3, 4, 8),
        "k": torch.zeros(2, 3, 2, 8),
        "v": torch.zeros(2, 3, 2, 8),
        "cos": torch.zeros(9, 8),
        "sin": torch.zeros(9, 8),
        "k_cache": torch.zeros(2, 2, 9, 8),
        "v_cache": torch.zeros(2, 2, 9, 8),
        "cache_lens": torch.zeros(2, dtype=torch.int32),
        "depths": torch.zeros(3, dtype=torch.int32),
    }
    with pytest.raises(ValueError, match=message):
        rope_append(**(good | change))
    assert not good["k_cache"].any()


@pytest.mark.parametrize("own", [False, True])
def test_passes_opcheck(device: str, own: bool) -> None:
    lens = [0, 5]
    case = make(4, lens, own_tables=own, own_depths=own, device=device)
    # opcheck compares clones of the caches, for which NaN would never be equal.
    case["k_cache"].zero_(), case["v_cache"].zero_()
    options = {} if own else {"q_norm": torch.ones(8, device=device), "k_norm": torch.ones(8, device=device)}
    if own:
        case |= {name: torch.stack((case[name], case[name])) for name in "qkv"}
        options["slots"] = torch.arange(len(lens), dtype=torch.int32, device=device).flip(0)
    torch.library.opcheck(torch.ops.medusa_kernels.rope_append.default, tuple(case[name] for name in ORDER), options)
