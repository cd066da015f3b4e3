"""Tree attention: N tree nodes per batch row attend to the cached prefix and to their own ancestors in the tree.

It runs as a Triton kernel on a GPU (`_triton/tree_attention.py`), and as `scaled_dot_product_attention` over the valid
rows on a CPU. It knows positions only as far as the window needs them, and it does not write the cache: `rope_append`
did that before.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from medusa_kernels import _checks, cache_rows, reference
from medusa_kernels._last_result import LastResult
from medusa_kernels._registry import register, triton_or

MAX_NODES = 256


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_lens: Tensor,
    ancestors: Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """Attend from N tree nodes per batch row (the paper's tree attention, section 2.1.2) over cached keys and values.

    Node i of row b sees the cache rows `[0, cache_lens[b])` and the tree row `cache_lens[b] + j` for every node j in
    its ancestor set. Query head h uses KV head `h // (Hq // Hkv)`. Rows from `cache_lens[b] + N` on are never read into
    a result and may hold anything. `N = 1` is plain decoding.

    Args:
        q: rotated queries `[B, N, Hq, D]`; fp16, bf16 or fp32; any strides.
        k_cache: rotated keys `[B, Hkv, S, D]`, dtype of q; any strides. Or in 8 bits, int8 `[B, Hkv, S, D + 4]`, see
            `medusa_kernels.cache_rows`. With `slots`, of any number of sequences. A GPU divides the work for S keys: if
            the host knows that far fewer rows are filled, a view of these (`k_cache[:, :, :filled]`) takes less time.
        v_cache: values, like `k_cache`.
        cache_lens: int32 `[B]`, cached rows before the tree's rows; `cache_lens[b] + N <= S`.
        ancestors: int64 `[N, W]` or `[B, N, W]`, `W = ceil(N / 64)`: bit `j % 64` of word `j // 64` of row i is set iff
            node j is an ancestor of node i or node i itself. Every node must be in its own set.
        scale: factor of the scores; None means `D ** -0.5`.
        window: sliding window: a node at position p sees keys at positions above `p - window` only. The position of a
            node is `cache_lens[b]` plus its depth, which is the size of its ancestor set less one. None: no window.
        softcap: scores become `softcap * tanh(scores / softcap)`. None: no cap.
        slots: int32 `[B]`, which sequence of the caches belongs to each batch row. None: sequence b to row b.

    Returns:
        `[B, N, Hq, D]`, contiguous, in the dtype of q; scores and sums are taken in fp32. Two runs on one device give
        equal bits.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value (on the CPU also if a row of the tree or a
            slot would be outside the cache; on a GPU lengths and slots are not read).
    """
    _checks.axes("q", q, "B", "N", "Hq", "D")
    _checks.axes("k_cache", k_cache, "B", "Hkv", "S", "D")
    batch, nodes, heads, head_dim = q.shape
    kv_heads, rows = k_cache.shape[1], k_cache.shape[2]
    _checks.dtype("q", q, *_checks.FLOATS)
    _checks.require(1 <= nodes <= MAX_NODES, "q", f"1 to {MAX_NODES} nodes", nodes)
    cache = (_checks.slots_axis("q", q, batch, slots), kv_heads, rows, head_dim)
    cache_rows.check("k_cache", k_cache, cache, "q", q)
    cache_rows.check("v_cache", v_cache, (*k_cache.shape[:3], head_dim), "q", q)
    _checks.dtype("v_cache", v_cache, k_cache.dtype)
    _checks.require(kv_heads > 0 and heads % kv_heads == 0, "q", f"a multiple of {kv_heads} heads", heads)
    _checks.typed("cache_lens", cache_lens, (batch,), torch.int32, "q", q)
    words = -(-nodes // reference.WORD)
    shape = (nodes, words) if ancestors.dim() == 2 else (batch, nodes, words)
    _checks.typed("ancestors", ancestors, shape, torch.int64, "q", q)
    _checks.require(window is None or window >= 1, "window", "None or at least 1", window)
    _checks.require(softcap is None or softcap > 0, "softcap", "None or more than 0", softcap)
    return torch.ops.medusa_kernels.tree_attention.default(
        q, k_cache, v_cache, cache_lens, ancestors, scale=scale, window=window, softcap=softcap, slots=slots
    )


def _sdpa(
    q, k_cache, v_cache, cache_lens, ancestors, *, scale=None, window=None, softcap=None, slots=None
):  # fmt: skip
    """Run the op on the CPU, where reading the lengths is free: attend to a slice of the valid rows only."""
    nodes = q.shape[1]
    lens = cache_lens.tolist()
    _checks.rows_fit(lens, nodes, k_cache.shape[2])
    places = _checks.slots_fit(slots, len(k_cache))
    if not q.numel():
        return q.new_empty(q.shape)
    longest = max(lens)
    if softcap is not None:
        keys, values = (cache[:, :, : longest + nodes] for cache in (k_cache, v_cache))
        options = {"scale": scale, "window": window, "softcap": softcap, "slots": slots}
        return reference.tree_attention(q, keys, values, cache_lens, ancestors, **options)
    bias = None
    if nodes > 1:
        seen = longest if window is None else min(longest, window - 1)
        bias = _tree_bias(ancestors, nodes, q.shape[2] // k_cache.shape[1], seen, window, q.dtype)
    if places and places == list(range(places[0], places[0] + len(places))):
        k_cache, v_cache = (cache[places[0] : places[0] + len(places)] for cache in (k_cache, v_cache))
        places = None
    if lens.count(longest) == len(lens) and places is None:
        return _attend(q, k_cache, v_cache, longest, bias, scale, window)
    parts = []
    for b, length in enumerate(lens):
        own = slice(b, b + 1)
        place = own if places is None else slice(places[b], places[b] + 1)
        own_bias = bias if bias is None or bias.shape[0] == 1 else bias[own]
        parts.append(_attend(q[own], k_cache[place], v_cache[place], length, own_bias, scale, window))
    return torch.cat(parts)


def _attend(q, k_cache, v_cache, length, bias, scale, window):
    """Attend for batch rows of one length.

    The query heads of one KV head are packed into its rows, so that keys and values are read once for all of them;
    `enable_gqa` reads them again for each.
    """
    batch, nodes, heads, head_dim = q.shape
    kv_heads = k_cache.shape[1]
    groups = heads // kv_heads
    # With a window, no node sees a row that the root, which is the lowest, does not see.
    start = 0 if window is None else max(0, length + 1 - window)
    keys, values = (
        cache_rows.dequantised_rows(cache[:, :, start : length + nodes], q.dtype) for cache in (k_cache, v_cache)
    )
    if bias is None:
        out = scaled_dot_product_attention(q.reshape(batch, kv_heads, groups, head_dim), keys, values, scale=scale)
        return out.reshape(q.shape).contiguous()
    packed = q.reshape(batch, nodes, kv_heads, groups, head_dim).transpose(1, 2)
    out = scaled_dot_product_attention(
        packed.reshape(batch, kv_heads, nodes * groups, head_dim),
        keys,
        values,
        attn_mask=bias[..., bias.shape[-1] - (length - start + nodes) :],
        scale=scale,
    )
    return out.view(batch, kv_heads, nodes, groups, head_dim).transpose(1, 2).reshape(q.shape).contiguous()


# The mask of the last tree: every layer asks for it, and with a static tree every step does.
_last_bias = LastResult[Tensor]()
_PREFIX_STEP = 512


def _tree_bias(ancestors: Tensor, nodes: int, groups: int, seen: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Return an additive mask `[1 or B, 1, N * groups, P + N]` with `P >= seen`, for the last P + N valid keys.

    What a node sees depends only on a key's distance from the end of the prefix, also with a window. So one mask serves
    every length up to P: a shorter prefix takes the last columns.
    """
    form = groups, window, dtype
    mask = _last_bias.get((ancestors,), form)
    if mask is None or mask.shape[-1] - nodes < seen:
        prefix = -(-seen // _PREFIX_STEP) * _PREFIX_STEP
        if ancestors.dim() == 3 or ancestors.is_inference():
            # Per-row trees change at every step, and masks of inference tensors are not kept: do not look ahead, and
            # free the last mask first.
            _last_bias.forget()
            prefix = seen
        mask = _last_bias.keep((ancestors,), form, _build_bias(ancestors, nodes, groups, prefix, window, dtype))
    return mask


def _build_bias(
    ancestors: Tensor, nodes: int, groups: int, prefix: int, window: int | None, dtype: torch.dtype
) -> Tensor:
    tree = reference.visible_nodes(ancestors.reshape(-1, *ancestors.shape[-2:]), nodes)
    batch = tree.shape[0]
    if window is None:
        bias = torch.zeros(batch, 1, nodes * groups, prefix + nodes, dtype=dtype)
        bias[:, 0, :, prefix:].masked_fill_(~tree.repeat_interleave(groups, dim=1), -torch.inf)
        return bias
    visible = torch.cat((tree.new_ones(batch, nodes, prefix), tree), dim=-1)
    depth = tree.sum(-1) - 1
    before = torch.arange(-prefix, 0).expand(batch, prefix)
    visible &= depth[:, :, None] - torch.cat((before, depth), dim=-1)[:, None] < window
    bias = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -torch.inf)
    return bias.repeat_interleave(groups, dim=1).unsqueeze(1)


_WHY = "scaled_dot_product_attention over the valid rows; with a softcap, which it lacks, the reference"
register(
    tree_attention,
    lambda a: a.q.new_empty(a.q.shape),
    cpu=triton_or("tree_attention", "sdpa", _sdpa, _WHY),
    cuda=triton_or("tree_attention", "reference", reference.tree_attention),
)
