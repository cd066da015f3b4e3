"""Tree attention in Triton: launch configurations, and the launches.

The keys are cut into as many shares as fill the device together with the KV heads, batch rows and tiles of rows; what
a share holds is decided on the device, from the lengths. Grid and memory depend on shapes only, nothing is added in an
order that could change, and no value is read on the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from medusa_kernels._registry import interpreted
from medusa_kernels._triton.launch import OPTIONS, TRITON_TYPES, Device, Specialisation, describe, on_device
from medusa_kernels._triton.programmatic import has_programmatic, launch_options, programmatic
from medusa_kernels._triton.tree_attention_kernels import attend_kernel, merge_kernel

LONG = 16384
"""Cache rows from which on many rows a KV head are worth larger tiles."""

MERGE_CHUNK, MERGE_STAGES = 8, 2
"""Parts that the merge loads at once, and the depth of its pipeline."""


@dataclass(frozen=True)
class Config:
    """How one problem is cut and run.

    Attributes:
        block_m: rows (nodes times query heads of a KV head) a tile.
        block_n: keys a block of the prefix.
        num_warps: warps a program.
        num_stages: depth of the pipelines.
        programs: programs that one multiprocessor holds at once.
        min_keys: keys that are worth a program of their own.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int
    min_keys: int = 256


def configuration(device: Device, dtype: torch.dtype, head_dim: int, rows: int, *, keys: int = LONG) -> Config:
    """Return the configuration for `rows` rows a KV head and a cache of `keys` rows.

    What serves Hopper at head sizes up to 128 is what measured best on an H200 at the heads of Llama-2-7B and
    Llama-3-8B. There tiles of 64 rows and more use the asynchronous tensor-core operations, whose pipeline keeps one
    buffer more than that of the others: three stages are three blocks in shared memory there, two elsewhere. All other
    devices, newer ones included, get what fits the shared memory that their blocks may have.
    """
    if interpreted():
        # Time goes by blocks, whatever their size; small shares, so that there are several.
        return Config(64, 64, 4, 2, 2, 64)
    if dtype == torch.float32:
        # No tensor cores at full precision: operands are in registers, of which larger tiles need too many.
        if head_dim <= 64:
            return Config(32, 64, 8, 2, 2, 128)
        # Two programs of 256 dimensions take 103 KB, which only multiprocessors of the data centres' GPUs have.
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


def candidates(device: Device, dtype: torch.dtype, head_dim: int, rows: int, *, keys: int = LONG) -> list[Config]:
    """Return the configurations worth measuring, the chosen one first; others for 16 bits and D <= 128 on Hopper."""
    chosen = configuration(device, dtype, head_dim, rows, keys=keys)
    if dtype == torch.float32 or head_dim > 128 or not device.hopper:
        return [chosen]
    of_64 = [
        *(Config(64, 64, 4, stages, 2) for stages in (2, 3)),
        *(Config(64, 64, 4, 4, 1), Config(64, 128, 4, 2, 1), Config(64, 128, 4, 3, 1)),
        *(Config(64, 64, 8, 2, 1), Config(64, 64, 8, 3, 1), Config(64, 128, 8, 2, 1), Config(64, 128, 8, 3, 1)),
        *(Config(64, 32, 4, 3, 3), Config(64, 32, 4, 4, 2), Config(64, 32, 4, 5, 2)),
    ]
    if rows <= 16:
        others = [
            *(Config(16, 64, 4, stages, programs, 128) for stages, programs in ((2, 4), (3, 3), (4, 2), (5, 1))),
            *(Config(16, 128, 4, stages, programs, 128) for stages, programs in ((2, 3), (3, 1))),
            *(Config(16, 128, 8, stages, programs, 128) for stages, programs in ((2, 2), (3, 1), (4, 1))),
            *(Config(16, 32, 4, stages, programs, 128) for stages, programs in ((4, 4), (5, 3), (6, 2))),
            *(Config(16, 32, 2, stages, programs, 128) for stages, programs in ((4, 4), (5, 3))),
        ]
    elif rows <= 32:
        others = [
            *(Config(32, 64, 4, 3, 2, 128), Config(32, 128, 4, 2, 2, 128), Config(32, 128, 4, 3, 1, 128)),
            *(Config(32, 32, 2, 4, 3, 128), Config(64, 64, 4, 3, 2)),
        ]
    elif rows <= 64:
        others = of_64
    else:
        others = [
            *(Config(128, 64, 8, stages, 1) for stages in (2, 3, 4)),
            *(Config(128, 128, 8, stages, 1) for stages in (2, 3)),
            *(Config(128, 32, 8, stages, 1) for stages in (3, 4)),
            *of_64,
        ]
    return [chosen, *(other for other in others if other != chosen)]


def _constants(config: Config, head_dim: int, nodes: int, window: int | None) -> dict[str, Any]:
    """Constants that both kernels take: they decide how keys are cut into units, which both must do alike."""
    return {
        "D": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_N": config.block_n,
        # A block lies in one ancestor word. Where the depths of its nodes are needed they take many registers.
        "TREE_BLOCK": min(16 if _deep(nodes, window) else 64, config.block_n),
        "MIN_UNITS": max(1, config.min_keys // config.block_n),
        "SINGLE": nodes == 1,
        "HAS_WINDOW": window is not None,
    }


def _attend_constants(
    config: Config, head_dim: int, nodes: int, window: int | None, *, capped: bool, negative: bool
) -> dict[str, Any]:
    return _constants(config, head_dim, nodes, window) | {
        "BLOCK_M": config.block_m,
        "DEEP": _deep(nodes, window),
        "HAS_SOFTCAP": capped,
        "NEGATIVE": negative,
        "STAGES": config.num_stages,
    }


def _deep(nodes: int, window: int | None) -> bool:
    """Whether a node may be too deep in the tree to see the root."""
    return window is not None and window < nodes


def _splits(config: Config, programs: int, slots: int, keys: int) -> int:
    """Return into how many shares the keys are cut so that `programs` times as many programs fill `slots`.

    The time is taken as waves times the keys of a share, plus a constant for what every program does besides; the
    fewest shares of the least time win. With more than a few waves nothing is gained, so no more are looked at.
    """
    most = max(1, min(keys // config.min_keys, 4 * slots // programs, 256))
    overhead = 128
    return min(range(1, most + 1), key=lambda s: (-(-programs * s // slots) * (keys / s + overhead * (s > 1)), s))


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
) -> Tensor:
    """Launch the kernels; arguments as checked by the public `tree_attention`."""
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
            *(q, k_cache, v_cache, cache_lens, words, out, parts, stats),
            size,
            1.0 if softcap is None else softcap,
            *sizes,
            *(*q.stride(), *k_cache.stride(), *v_cache.stride(), *words.stride()),
            **_attend_constants(config, head_dim, nodes, window, capped=softcap is not None, negative=scale < 0),
            PDL=pdl,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            **OPTIONS,
            **launch_options(pdl),
        )
        if splits > 1:
            merge_kernel[(rows, kv_heads, batch)](
                *(parts, stats, cache_lens, out),
                math.log2(math.e) * (size if softcap is None else 1),
                *sizes,
                **_constants(config, head_dim, nodes, window),
                CHUNK=MERGE_CHUNK,
                PDL=pdl,
                num_warps=1,
                num_stages=MERGE_STAGES,
                **OPTIONS,
                **launch_options(pdl),
            )
    return out


_FORMS: list[tuple[Any, ...]] = [
    # dtype, head size, nodes, rows, window, softcap, and the cache's rows where they matter
    *(
        (torch.bfloat16, 128, nodes, rows, None, False)
        for nodes, rows in ((1, 1), (16, 16), (8, 32), (64, 64), (64, 256))
    ),
    *((torch.bfloat16, 128, 64, 64, window, cap) for window, cap in ((4096, False), (40, False), (None, True))),
    *((torch.bfloat16, 128, 1, 4, window, False) for window in (None, 4096)),
    *((torch.bfloat16, dim, 64, 64, None, False) for dim in (64, 80, 96, 256)),
    *((torch.bfloat16, dim, 1, 1, None, False) for dim in (64, 80, 256)),
    *((torch.bfloat16, 256, 64, rows, 4096, True) for rows in (128, 512)),
    (torch.bfloat16, 128, 64, 256, None, False, 1024),
    (torch.float16, 128, 64, 64, None, False),
    *((torch.float32, dim, 64, 64, None, False) for dim in (64, 128, 256)),
    (torch.float32, 128, 64, 256, 40, True),
]
_MERGED = [
    (torch.bfloat16, 64),
    (torch.bfloat16, 80),
    (torch.bfloat16, 128),
    (torch.bfloat16, 256),
    (torch.float32, 128),
]
_TYPES = {
    "lens_ptr": "*i32",
    "anc_ptr": "*i64",
    "part_ptr": "*fp32",
    "stat_ptr": "*fp32",
    "scale": "fp32",
    "softcap": "fp32",
    "factor": "fp32",
}


def specialisations(device: Device) -> Iterator[Specialisation]:
    """Return the forms that launches of the usual head sizes ask for."""
    pdl = {"PDL": has_programmatic(device)}
    for dtype, head_dim, nodes, rows, window, cap, *keys in _FORMS:
        config = configuration(device, dtype, head_dim, rows, keys=keys[0] if keys else LONG)
        strides = {f"stride_{tensor}d": 1 for tensor in "qkv"}
        constants = strides | _attend_constants(config, head_dim, nodes, window, capped=cap, negative=False) | pdl
        marks = [
            f"N{nodes}",
            f"M{rows}",
            *(["short"] if keys else []),
            *(["window"] if window else []),
            *(["softcap"] if cap else []),
        ]
        if _deep(nodes, window):
            marks.append("deep")
        signature = _signature(attend_kernel, constants, dtype)
        yield Specialisation(
            name=f"tree_attention attend {TRITON_TYPES[dtype]} D{head_dim} {' '.join(marks)}",
            kernel=attend_kernel,
            signature=signature,
            constants=constants,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            aligned=tuple(name for name in signature if name.startswith(("stride_q", "stride_k", "stride_v"))),
            programs=config.programs,
        )
    for dtype, head_dim in _MERGED:
        config = configuration(device, dtype, head_dim, 64)
        constants = _constants(config, head_dim, 64, None) | {"CHUNK": MERGE_CHUNK} | pdl
        yield Specialisation(
            name=f"tree_attention merge {TRITON_TYPES[dtype]} D{head_dim}",
            kernel=merge_kernel,
            signature=_signature(merge_kernel, constants, dtype),
            constants=constants,
            num_warps=1,
            num_stages=MERGE_STAGES,
        )


def _signature(kernel: Any, constants: dict[str, Any], dtype: torch.dtype) -> dict[str, str]:
    """Return the types of a kernel's arguments that are not constants."""
    names = [name for name in kernel.arg_names if name not in constants]
    own = "*" + TRITON_TYPES[dtype]
    return {name: _TYPES.get(name, own if name.endswith("_ptr") else "i32") for name in names}
