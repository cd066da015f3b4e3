"""Tree attention in Triton: the launches.

The keys are divided into as many shares as fill the device together with the KV heads, batch rows and tiles of rows;
the device decides from the lengths what a share holds. Grid and memory depend on shapes only, the order of additions
never changes, and no value is read on the host.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton

from medusa_kernels._registry import interpreted
from medusa_kernels._triton.launch import OPTIONS, Device, Warps, describe, on_device
from medusa_kernels._triton.programmatic import launch_options, programmatic
from medusa_kernels._triton.tree_attention_kernels import attend_kernel, merge_kernel

MERGE_CHUNK = 8
"""Parts that the merge loads at once."""

MERGE = Warps(num_warps=1, num_stages=2)

LONG = 16384
"""From this many cache rows on, many rows per KV head are worth larger tiles."""


@dataclass(frozen=True)
class Config:
    """How one problem is divided and run.

    Attributes:
        block_m: rows (nodes times query heads of a KV head) per tile.
        block_n: keys per block of the prefix.
        num_warps: warps per program.
        num_stages: depth of the pipelines.
        programs: programs that one multiprocessor holds at once.
        min_keys: fewest keys that are worth a separate program.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int
    min_keys: int = 256


def configuration(device: Device, dtype: torch.dtype, head_dim: int, rows: int, *, keys: int = LONG) -> Config:
    """Return the configuration for `rows` rows per KV head and a cache of `keys` rows.

    On Hopper, head sizes up to 128 get the fastest on an H200 for the heads of Llama-2-7B and Llama-3-8B. Tiles of 64
    rows and more use asynchronous tensor-core operations there, whose pipeline keeps one buffer more: three stages are
    three blocks in shared memory, elsewhere two. All other devices, also newer ones, get what fits the shared memory of
    their blocks.
    """
    if interpreted():
        # The time depends on the number of blocks, not their size; small shares, so that there are several.
        return Config(64, 64, 4, 2, 2, 64)
    if dtype == torch.float32:
        # No tensor cores at full precision: operands are in registers, of which larger tiles need too many.
        if head_dim <= 64:
            return Config(32, 64, 8, 2, 2, 128)
        # Two programs of 256 dimensions take 103 KB, which only data-centre GPUs have.
        programs = 2 if head_dim <= 128 or device.roomy else 1
        return Config(16, 32 if device.hopper else 16, 8, 2, programs, 128)
    if device.hopper and head_dim <= 128 and not 16 < rows <= 32:
        if rows <= 16:
            return Config(16, 128, 4, 3, 1, 128)
        if rows <= 64:
            return Config(64, 64, 4, 4, 1)
        return Config(128, 64, 8, 3, 1) if keys >= LONG else Config(64, 64, 4, 3, 2)
    wide, large = head_dim > 128, device.roomy
    if rows <= 16 and device.capability >= (10, 0):
        # With 64 keys ptxas stays at 128 registers there, and spills.
        return Config(16, 32, 4, 3 if wide else 4, 1 + large, 128)
    if rows <= 32:
        block_m = 16 if rows <= 16 else 32
        return Config(block_m, 32 if wide else 64, 4, 4 if device.hopper and rows <= 16 else 3, 1 + large, 128)
    if device.hopper:
        return Config(64 if rows <= 64 else 128, 32, 8, 3, 1)
    if wide:
        return Config(64, 32, 8, 2, 1)
    if rows <= 64:
        return Config(64, 32, 4, 4, 1 + large)
    return Config(128, 64 if large else 32, 8, 3, 1)


def _constants(config: Config, head_dim: int, nodes: int, window: int | None) -> dict[str, Any]:
    """Return the constants of both kernels, by which both divide keys into units in the same way."""
    return {
        "D": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_N": config.block_n,
        # A block is within one ancestor word. The depths of its nodes, if needed, take many registers.
        "TREE_BLOCK": min(16 if _deep(nodes, window) else 64, config.block_n),
        "MIN_UNITS": max(1, config.min_keys // config.block_n),
        "SINGLE": nodes == 1,
        "HAS_WINDOW": window is not None,
    }


def _attend_constants(config: Config, head_dim, nodes, window, *, capped: bool, negative: bool) -> dict[str, Any]:
    return _constants(config, head_dim, nodes, window) | {
        "BLOCK_M": config.block_m,
        "DEEP": _deep(nodes, window),
        "HAS_SOFTCAP": capped,
        "NEGATIVE": negative,
        "STAGES": config.num_stages,
    }


def _deep(nodes: int, window: int | None) -> bool:
    """Return whether a node may be too deep in the tree to see the root."""
    return window is not None and window < nodes


def _splits(config: Config, programs: int, slots: int, keys: int) -> int:
    """Return into how many shares to divide the keys, so that `programs` times as many programs fill `slots`.

    The estimated time is waves times the keys of a share, plus a constant per program. The fewest shares of the least
    time win. More than a few waves gain nothing, so they are not tried.
    """
    most = max(1, min(keys // config.min_keys, 4 * slots // programs, 256))
    overhead = 128
    return min(range(1, most + 1), key=lambda s: (-(-programs * s // slots) * (keys / s + overhead * (s > 1)), s))


def tree_attention(q, k_cache, v_cache, cache_lens, ancestors, *, scale=None, window=None, softcap=None):
    """Launch the kernels; see the public `tree_attention`."""
    batch, nodes, heads, head_dim = q.shape
    kv_heads, capacity = k_cache.shape[1:3]
    groups = heads // kv_heads
    rows = nodes * groups
    out = q.new_empty(q.shape)
    if out.numel() == 0:
        return out
    device = describe(q.device)
    config = configuration(device, q.dtype, head_dim, rows, keys=capacity)
    pdl = programmatic(q.device)
    tiles = -(-rows // config.block_m)
    slots = device.multiprocessors * config.programs
    splits = _splits(config, batch * kv_heads * tiles, slots, capacity)
    shares = (batch, kv_heads, splits if splits > 1 else 0, rows)
    parts = torch.empty(*shares, head_dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(*shares, 2, dtype=torch.float32, device=q.device)
    scale = head_dim**-0.5 if scale is None else scale
    # A scale of zero becomes one too small to matter: the kernel would multiply infinity by it.
    size = max(abs(scale), 1e-30)
    sizes = (nodes, groups, splits, 0 if window is None else window)
    words = ancestors if ancestors.dim() == 3 else ancestors.expand(batch, -1, -1)
    with on_device(q):
        attend_kernel[(tiles * splits, kv_heads, batch)](
            q, k_cache, v_cache, cache_lens, words, out, parts, stats, size, 1.0 if softcap is None else softcap,
            *sizes, *q.stride(), *k_cache.stride(), *v_cache.stride(), *words.stride(),
            **_attend_constants(config, head_dim, nodes, window, capped=softcap is not None, negative=scale < 0),
            PDL=pdl, num_warps=config.num_warps, num_stages=config.num_stages, **OPTIONS, **launch_options(pdl),
        )  # fmt: skip
        if splits > 1:
            merge_kernel[(rows, kv_heads, batch)](
                parts, stats, cache_lens, out, math.log2(math.e) * (size if softcap is None else 1), *sizes,
                **_constants(config, head_dim, nodes, window), CHUNK=MERGE_CHUNK,
                PDL=pdl, num_warps=MERGE.num_warps, num_stages=MERGE.num_stages, **OPTIONS, **launch_options(pdl),
            )  # fmt: skip
    return out
