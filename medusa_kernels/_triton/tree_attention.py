"""Tree attention in Triton: the launches.

The keys are divided into as many shares as fill the device together with the KV heads, batch rows and tiles of rows;
the device decides from the lengths what a share holds. Grid and memory depend on shapes only, the order of additions
never changes, and no value is read on the host.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import Any

import torch
import triton

from medusa_kernels import _checks
from medusa_kernels._triton import launch
from medusa_kernels._triton.launch import OPTIONS, Warps, describe, on_device
from medusa_kernels._triton.tree_attention_configs import Config, configuration
from medusa_kernels._triton.tree_attention_kernels import attend_kernel, merge_kernel

MOST_WAVES = 4
"""How many times as many programs as run at once may be planned. Shares are planned for all rows of the cache."""

MOST_HEAD_DIM = 256
"""Numbers of a head that fit into shared memory, with blocks of keys and values."""

MERGE_CHUNK = 8
"""Shares that the merge loads at once."""

MERGE = Warps(num_warps=1, num_stages=2)
MERGE_OPTIONS = OPTIONS | {"enable_fp_fusion": False}
"""Threads add the same products in other orders, and several of them store one result: fused, they would differ."""


def _constants(config: Config, head_dim: int, nodes: int, window: int | None) -> dict[str, Any]:
    """Return the constants of both kernels, by which both divide keys into units in the same way."""
    return {
        "D": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_N": config.block_n,
        # A block is within one ancestor word. Positions take many registers, and depths of nodes even more.
        "TREE_BLOCK": min(64 if window is None else 16 if _deep(nodes, window) else 32, config.block_n),
        "MIN_UNITS": max(1, config.min_keys // config.block_n),
        "SINGLE": nodes == 1,
        "HAS_WINDOW": window is not None,
    }


def _attend_constants(
    config: Config, head_dim, nodes, window, *, capped: bool, negative: bool, eight_bits: bool = False
) -> dict[str, Any]:
    return _constants(config, head_dim, nodes, window) | {
        "BLOCK_M": config.block_m,
        "DEEP": _deep(nodes, window),
        "HAS_SOFTCAP": capped,
        "NEGATIVE": negative,
        # A window smaller than the tree has few keys.
        "OVERLAP": config.overlap and not _deep(nodes, window),
        "EIGHT_BITS": eight_bits,
        "STAGES": config.num_stages,
    }


def _options(config: Config) -> dict[str, Any]:
    """Return the compiler's options: as many registers as threads may have if the programs share a multiprocessor.

    Without the limit, the assembler spills some to fit more programs, for which there is no shared memory.
    """
    return OPTIONS | {"maxnreg": min(255, 2**16 // (32 * config.num_warps * config.programs))}


def _deep(nodes: int, window: int | None) -> bool:
    """Return whether a node may be too deep in the tree to see the root."""
    return window is not None and window < nodes


def _splits(config: Config, programs: int, slots: int, keys: int) -> int:
    """Return into how many shares to divide the keys, so that `programs` times as many programs fill `slots`.

    The estimated time is waves times the keys of a share, plus a constant per program. The fewest shares of the least
    time win. More than a few waves gain nothing, so they are not tried.
    """
    most = max(1, min(keys // config.min_keys, MOST_WAVES * slots // programs, 256))
    overhead = 128
    return min(range(1, most + 1), key=lambda s: (-(-programs * s // slots) * (keys / s + overhead * (s > 1)), s))


def tree_attention(
    q, k_cache, v_cache, cache_lens, ancestors, *, scale=None, window=None, softcap=None, slots=None
):  # fmt: skip
    """Launch the kernels; see the public `tree_attention`."""
    batch, nodes, heads, head_dim = q.shape
    kv_heads, capacity = k_cache.shape[1:3]
    groups = heads // kv_heads
    rows = nodes * groups
    out = q.new_empty(q.shape)
    if out.numel() == 0:
        return out
    _checks.require(head_dim <= MOST_HEAD_DIM, "q", f"heads of at most {MOST_HEAD_DIM}", head_dim)
    apart = max(k_cache.stride(2), v_cache.stride(2))  # offsets in a block of rows are int32
    _checks.require(apart < 2**24, "k_cache, v_cache", "rows less than 2**24 numbers apart", apart)
    device = describe(q.device)
    eight_bits = k_cache.dtype == torch.int8
    config = configuration(
        device, q.dtype, head_dim, rows, keys=capacity, kv_heads=batch * kv_heads, eight_bits=eight_bits
    )
    pdl = launch.programmatic(q.device)
    tiles = -(-rows // config.block_m)
    splits = _splits(config, batch * kv_heads * tiles, device.multiprocessors * config.programs, capacity)
    shares = (batch, kv_heads, splits if splits > 1 else 0, rows)
    parts = torch.empty(*shares, head_dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(*shares, 2, dtype=torch.float32, device=q.device)
    scale = head_dim**-0.5 if scale is None else scale
    # A scale of zero becomes one too small to matter: the kernel would multiply infinity by it.
    size = max(abs(scale), 1e-30)
    sizes = (nodes, groups, splits, 0 if window is None else window)
    words = ancestors if ancestors.dim() == 3 else ancestors.expand(batch, -1, -1)
    cache_lens = cache_lens.contiguous()
    with on_device(q):
        attend_kernel[(tiles * splits, kv_heads, batch)](
            q, k_cache, v_cache, cache_lens, words, out, parts, stats,
            cache_lens if slots is None else slots.contiguous(),
            size, 1.0 if softcap is None else softcap,
            *sizes, *q.stride(), *k_cache.stride(), *v_cache.stride(), *words.stride(),
            **_attend_constants(
                config, head_dim, nodes, window,
                capped=softcap is not None, negative=scale < 0, eight_bits=eight_bits,
            ),
            HAS_SLOTS=slots is not None, PDL=pdl,
            **launch.options(config, pdl, _options(config)),
        )  # fmt: skip
        if splits > 1:
            merge_kernel[(rows, kv_heads, batch)](
                parts, stats, cache_lens, out, size if softcap is None else 1.0, *sizes,
                **_constants(config, head_dim, nodes, window),
                CHUNK=MERGE_CHUNK, PDL=pdl, **launch.options(MERGE, pdl, MERGE_OPTIONS),
            )  # fmt: skip
    return out
