"""Rotary embedding of the queries and keys of a forward pass, and the writing of keys and values to the cache.

It does not know how the tables of cosines and sines were made (which RoPE variant), nor what a tree is: here a node is
a depth and an index.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_kernels import _checks, reference
from medusa_kernels._registry import declare, serve, triton_or


def rope_append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_lens: Tensor,
    depths: Tensor,
) -> Tensor:
    """Rotate q and k (RoPE, Su et al. 2021, in the half-split form of transformers) and append k and v to the cache.

    Node i of row b is rotated at position `p = cache_lens[b] + depths[i]` with row p of the tables, as
    `x * cos + rotate_half(x) * sin` in the dtype of x: bit-equal to `apply_rotary_pos_emb` of transformers. Its key and
    value go to cache row `cache_lens[b] + i`. `depths = arange(N)` is a prompt.

    Args:
        q: queries `[B, N, Hq, D]`; fp16, bf16 or fp32; any strides; D even.
        k: keys `[B, N, Hkv, D]`, dtype of q; any strides.
        v: values, like `k`.
        cos: table `[P, D]` or `[B, P, D]`, dtype of q; both halves of a row are equal.
        sin: like `cos`.
        k_cache: `[B, Hkv, S, D]`, dtype of q; any strides. Mutated: rows `cache_lens[b]` to `cache_lens[b] + N`.
        v_cache: like `k_cache`. Mutated.
        cache_lens: int32 `[B]`, rows already cached; not changed.
        depths: int32 `[N]` or `[B, N]`, not negative.

    Returns:
        The rotated queries `[B, N, Hq, D]`, a new contiguous tensor.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value (on the CPU also where a row would lie outside
            the cache or a position outside the tables; on a GPU values are not read: such a row is not written, and
            at such a position q and k come out as NaN).
    """
    _checks.axes("q", q, "B", "N", "Hq", "D")
    _checks.axes("k", k, "B", "N", "Hkv", "D")
    _checks.axes("k_cache", k_cache, "B", "Hkv", "S", "D")
    batch, nodes, _, head_dim = q.shape
    kv_heads, rows = k.shape[2], k_cache.shape[2]
    _checks.dtype("q", q, *_checks.FLOATS)
    _checks.require(head_dim % 2 == 0, "q", "an even head size", head_dim)
    _checks.shape("k", k, (batch, nodes, kv_heads, head_dim))
    _checks.shape("v", v, (batch, nodes, kv_heads, head_dim))
    _checks.shape("cos", cos, ("P", head_dim) if cos.dim() == 2 else (batch, "P", head_dim))
    _checks.shape("sin", sin, cos.shape)
    _checks.shape("k_cache", k_cache, (batch, kv_heads, rows, head_dim))
    _checks.shape("v_cache", v_cache, (batch, kv_heads, rows, head_dim))
    for name, tensor in (("k", k), ("v", v), ("cos", cos), ("sin", sin), ("k_cache", k_cache), ("v_cache", v_cache)):
        _checks.match(name, tensor, "q", q)
    _checks.shape("cache_lens", cache_lens, (batch,))
    _checks.shape("depths", depths, (nodes,) if depths.dim() == 1 else (batch, nodes))
    for name, tensor in (("cache_lens", cache_lens), ("depths", depths)):
        _checks.dtype(name, tensor, torch.int32)
        _checks.same_device(name, tensor, "q", q)
    return torch.ops.medusa_kernels.rope_append.default(q, k, v, cos, sin, k_cache, v_cache, cache_lens, depths)


def _sliced(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_lens: Tensor,
    depths: Tensor,
) -> Tensor:
    """Run the op on the CPU: lengths are read, and cache rows are written as slices."""
    nodes, head_dim = q.shape[1], q.shape[3]
    lens = cache_lens.tolist()
    _checks.rows_fit(lens, nodes, k_cache.shape[2])
    cos, sin = _factors(cos, sin, lens, cache_lens, depths)
    half = head_dim // 2
    rotated = (k * cos).add_(k.roll(half, -1).mul_(sin))
    for b, length in enumerate(lens):
        k_cache[b, :, length : length + nodes] = rotated[b].transpose(0, 1)
        v_cache[b, :, length : length + nodes] = v[b].transpose(0, 1)
    return (q * cos).add_(q.roll(half, -1).mul_(sin)).contiguous()


@dataclass(frozen=True)
class _Factors:
    """The factors of a rotation, with what they were made from."""

    tensors: tuple[Tensor, Tensor, Tensor]
    values: tuple[int, int, int, list[int]]
    cos: Tensor
    sin: Tensor


# The factors of the last call: within a forward pass every layer asks for the same ones. Replaced as a whole and never
# changed, so that threads at worst make them twice.
_last_factors: _Factors | None = None


def _factors(cos: Tensor, sin: Tensor, lens: list[int], cache_lens: Tensor, depths: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and (-sin, sin) at the positions, each `[1 or B, N, 1, D]`.

    `rotate_half(x) * sin == roll(x) * (-sin, sin)`: negating a factor is exact, and the small table is negated once.
    """
    global _last_factors
    # An inference tensor has no version counter that would tell of a change in place.
    keep = not (cos.is_inference() or sin.is_inference() or depths.is_inference())
    last, values = _last_factors, (0, 0, 0, lens)
    if keep:
        values = (cos._version, sin._version, depths._version, lens)
        if last is not None and last.values == values and _same(last.tensors, (cos, sin, depths)):
            return last.cos, last.sin
    positions = depths + (lens[0] if len(lens) == 1 else cache_lens[:, None])
    at_cos, at_sin = _table_rows(cos, positions, len(lens)), _table_rows(sin, positions, len(lens))
    at_sin = at_sin * _half_signs(sin.shape[-1], sin.dtype)
    if keep:
        _last_factors = _Factors((cos, sin, depths), values, at_cos, at_sin)
    return at_cos, at_sin


def _same(these: tuple[Tensor, ...], those: tuple[Tensor, ...]) -> bool:
    return all(a is b for a, b in zip(these, those, strict=True))


def _table_rows(table: Tensor, positions: Tensor, batch: int) -> Tensor:
    """Return the rows of a table at the positions, with an axis for the heads: `[1 or B, N, 1, D]`."""
    try:
        if table.dim() == 2 or batch == 1:
            rows = table.view(-1, table.shape[-1]).index_select(0, positions.flatten())
            return rows.view(-1, positions.shape[-1], 1, table.shape[-1])
        own = [t.index_select(0, p) for t, p in zip(table, positions.expand(batch, -1), strict=True)]
        return torch.stack(own).unsqueeze(2)
    except IndexError as error:
        low, high = (int(p) for p in positions.aminmax())
        raise ValueError(
            f"depths: expected positions cache_lens + depths within the {table.shape[-2]} rows of cos and sin, "
            f"got positions {low} to {high}"
        ) from error


@functools.lru_cache(maxsize=16)
def _half_signs(head_dim: int, dtype: torch.dtype) -> Tensor:
    """Return `[-1] * (D / 2) + [1] * (D / 2)`."""
    signs = torch.ones(head_dim, dtype=dtype)
    signs[: head_dim // 2] = -1
    return signs


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_lens: Tensor,
    depths: Tensor,
) -> Tensor:
    return q.new_empty(q.shape)


declare(
    "rope_append(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor cache_lens, Tensor depths) -> Tensor",
    _fake,
)
_CPU = "PyTorch, with lengths read on the host and rows written as slices"
serve("rope_append", "cpu", lambda device: triton_or("rope_append", "sliced", _sliced, _CPU, device=device))
serve(
    "rope_append",
    "cuda",
    lambda device: triton_or("rope_append", "reference", reference.rope_append, "", device=device),
)
