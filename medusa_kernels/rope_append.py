"""Rotary embedding of the queries and keys of a forward pass, and the append of keys and values to the cache.

It does not know how the tables of cosines and sines were made (which RoPE variant), nor what a tree is: here a node is
a depth and an index.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
from torch import Tensor

from medusa_kernels import _checks, cache_rows, reference
from medusa_kernels._last_result import LastResult
from medusa_kernels._registry import register, triton_or


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
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    slots: Tensor | None = None,
    norm_offset: float | None = None,
) -> Tensor:
    """Rotate q and k (RoPE, Su et al. 2021, in the half-split form of transformers) and append k and v to the cache.

    Node i of row b is rotated at position `p = cache_lens[b] + depths[i]` with row p of the tables, as
    `x * cos + rotate_half(x) * sin` in the dtype of x: bit-equal to `apply_rotary_pos_emb` of transformers. Tables of R
    columns rotate the first R numbers of each head, and leave the others (Phi-4-mini). Its key and value go to cache
    row `cache_lens[b] + i`. `depths = arange(N)` is a prompt. With norms every head of q and k is
    first normalised as by `add_rms_norm` (Qwen3).

    Args:
        q: queries `[B, N, Hq, D]`; fp16, bf16 or fp32; any strides; D even. Or all of q, k and v are fp32 with a first
            axis of S parts, which are added up in order and rounded to the dtype of the tables (see `decode_linear`).
        k: keys `[B, N, Hkv, D]`, dtype of q; any strides.
        v: values, like `k`.
        cos: table `[P, R]` or `[B, P, R]`, dtype of q (of parts: any), R even and at most D; both halves of a row are
            equal.
        sin: like `cos`.
        k_cache: `[B, Hkv, S, D]`, dtype of `cos`; any strides. Or int8 `[B, Hkv, S, D + 4]`: keys are then rounded to 8
            bits, see `medusa_kernels.cache_rows`. Mutated: rows `cache_lens[b]` to `cache_lens[b] + N`. With `slots`,
            of any number of sequences.
        v_cache: like `k_cache`. Mutated.
        cache_lens: int32 `[B]`, rows already cached; not changed.
        depths: int32 `[N]` or `[B, N]`, not negative.
        q_norm: `[D]`, dtype of `cos`, weight of the norm of each query head; None: no norm. Only with `k_norm`.
        k_norm: the same for the key heads.
        eps: added to the mean of the squares.
        slots: int32 `[B]`, which sequence of the caches belongs to each batch row, each at most once. None: sequence b
            to row b.
        norm_offset: of both norms, as in `add_rms_norm`.

    Returns:
        The rotated queries `[B, N, Hq, D]`, a new contiguous tensor.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value (on the CPU also if a row or a slot would be
            outside the cache or a position outside the tables; on a GPU values are not read: such a row is not written,
            and q and k become NaN at such a position).
    """
    in_parts = q.dim() == 5
    parts = q.shape[:1] if in_parts else ()
    _checks.axes("q", q, *["S"] * in_parts, "B", "N", "Hq", "D")
    _checks.axes("k", k, *["S"] * in_parts, "B", "N", "Hkv", "D")
    _checks.axes("k_cache", k_cache, "B", "Hkv", "S", "D")
    batch, nodes, _, head_dim = q.shape[-4:]
    kv_heads, rows = k.shape[-2], k_cache.shape[2]
    _checks.dtype("q", q, *([torch.float32] if in_parts else _checks.FLOATS))
    _checks.require(head_dim % 2 == 0, "q", "an even head size", head_dim)
    _checks.require(parts != (0,), "q", "at least one part", 0)
    _checks.match("k", k, (*parts, batch, nodes, kv_heads, head_dim), "q", q)
    _checks.match("v", v, (*parts, batch, nodes, kv_heads, head_dim), "q", q)
    table = ("P", "R") if cos.dim() == 2 else (batch, "P", "R")
    if in_parts:
        _checks.dtype("cos", cos, *_checks.FLOATS)
        _checks.shape("cos", cos, table)
        _checks.same_device("cos", cos, "q", q)
    else:
        _checks.match("cos", cos, table, "q", q)
    rotated = cos.shape[-1]
    fits = 0 < rotated <= head_dim and rotated % 2 == 0
    _checks.require(fits, "cos", f"an even number of columns up to the head size {head_dim}", rotated)
    _checks.match("sin", sin, cos.shape, "cos", cos)
    sequences = _checks.slots_axis("q", q, batch, slots)
    cache_rows.check("k_cache", k_cache, (sequences, kv_heads, rows, head_dim), "cos", cos)
    cache_rows.check("v_cache", v_cache, (*k_cache.shape[:3], head_dim), "cos", cos)
    _checks.dtype("v_cache", v_cache, k_cache.dtype)
    _checks.require((q_norm is None) == (k_norm is None), "k_norm", "given together with q_norm, or neither", k_norm)
    for name, norm in (("q_norm", q_norm), ("k_norm", k_norm)):
        if norm is not None:
            _checks.match(name, norm, (head_dim,), "cos", cos)
    _checks.typed("cache_lens", cache_lens, (batch,), torch.int32, "q", q)
    _checks.typed("depths", depths, (nodes,) if depths.dim() == 1 else (batch, nodes), torch.int32, "q", q)
    return torch.ops.medusa_kernels.rope_append.default(
        q, k, v, cos, sin, k_cache, v_cache, cache_lens, depths, q_norm=q_norm, k_norm=k_norm, eps=eps, slots=slots,
        norm_offset=norm_offset,
    )  # fmt: skip


def _sliced(
    q, k, v, cos, sin, k_cache, v_cache, cache_lens, depths, *, q_norm=None, k_norm=None, eps=1e-6, slots=None,
    norm_offset=None,
):  # fmt: skip
    """Run the op on the CPU: lengths are read, and cache rows are written as slices."""
    q, k, v = reference.heads_of(q, k, v, cos.dtype, q_norm, k_norm, eps, norm_offset)
    nodes = q.shape[1]
    lens = cache_lens.tolist()
    _checks.rows_fit(lens, nodes, k_cache.shape[2])
    places = _checks.slots_fit(slots, len(k_cache)) or range(len(lens))
    if not q.numel() and not k.numel():
        return q.new_empty(q.shape)
    cos, sin = _factors(cos, sin, lens, cache_lens, depths)
    rotated = _rotated(k, cos, sin)
    if k_cache.dtype == torch.int8:
        rotated, v = cache_rows.quantised_rows(rotated), cache_rows.quantised_rows(v)
    for b, (place, length) in enumerate(zip(places, lens, strict=True)):
        k_cache[place, :, length : length + nodes] = rotated[b].transpose(0, 1)
        v_cache[place, :, length : length + nodes] = v[b].transpose(0, 1)
    return _rotated(q, cos, sin).contiguous()


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first numbers of heads `[B, N, heads, D]` by factors `[1 or B, N, 1, R]` from `_factors`."""
    width = cos.shape[-1]
    first = x[..., :width]
    turned = (first * cos).add_(first.roll(width // 2, -1).mul_(sin))
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), -1)


_last_factors = LastResult[tuple[Tensor, Tensor]]()


def _factors(cos: Tensor, sin: Tensor, lens: list[int], cache_lens: Tensor, depths: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and (-sin, sin) at the positions, each `[1 or B, N, 1, D]`.

    `rotate_half(x) * sin == roll(x) * (-sin, sin)`: negating a factor is exact, and these few rows are negated once.
    """
    found = _last_factors.get((cos, sin, depths), lens)
    if found is not None:
        return found
    positions = depths + (lens[0] if len(lens) == 1 else cache_lens[:, None])
    at_cos, at_sin = _table_rows(cos, positions, len(lens)), _table_rows(sin, positions, len(lens))
    at_sin[..., : sin.shape[-1] // 2].neg_()
    return _last_factors.keep((cos, sin, depths), lens, (at_cos, at_sin))


def _table_rows(table: Tensor, positions: Tensor, batch: int) -> Tensor:
    """Return a copy of a table's rows at the positions, with an axis for the heads: `[1 or B, N, 1, D]`."""
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


register(
    rope_append,
    lambda a: a.q.new_empty(a.q.shape[-4:], dtype=a.cos.dtype),
    mutates=["k_cache", "v_cache"],
    cpu=triton_or(
        "rope_append", "sliced", _sliced, "PyTorch, with lengths read on the host and rows written as slices"
    ),
    cuda=triton_or("rope_append", "reference", reference.rope_append),
)
