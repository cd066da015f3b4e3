"""Launch configurations of `tree_attention`: tiles, warps, stages and programs per device and size."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from medusa_kernels._registry import interpreted
from medusa_kernels._triton.launch import Device

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
        overlap: whether the product with the values of a block runs during the exponentials of the next block. It costs
            a program the time of one more block, and works for 16-bit tiles of 64 rows and more on Hopper only.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int
    min_keys: int = 256
    overlap: bool = False


def configuration(
    device: Device,
    dtype: torch.dtype,
    head_dim: int,
    rows: int,
    *,
    keys: int = LONG,
    kv_heads: int = 1,
    eight_bits: bool = False,
) -> Config:
    """Return the configuration of `_configuration`, for a cache in 8 bits with smaller blocks and more warps.

    Its numbers pass through registers, which larger blocks would spill. Not measured.
    """
    found = _configuration(device, dtype, head_dim, rows, keys, kv_heads)
    if not eight_bits:
        return found
    if interpreted():
        return replace(found, overlap=False)
    wide = head_dim > 128
    return Config(
        block_m=min(found.block_m, 32) if wide and device.hopper else found.block_m,
        block_n=min(found.block_n, 16 if wide or dtype == torch.float32 else 32),
        num_warps=8,
        num_stages=min(found.num_stages, 2 if wide else 3),
        programs=1,
        min_keys=found.min_keys,
    )


def _configuration(device: Device, dtype: torch.dtype, head_dim: int, rows: int, keys: int, kv_heads: int) -> Config:
    """Return the configuration for `rows` rows per KV head, a cache of `keys` rows and all batch rows' KV heads.

    On Hopper, head sizes up to 128 get the fastest on an H200 for the heads of Llama-2-7B and Llama-3-8B. Tiles of 64
    rows and more use asynchronous tensor-core operations there, whose pipeline keeps one buffer more: three stages are
    three blocks in shared memory, elsewhere two. All other devices, also newer ones, get what fits the shared memory of
    their blocks.

    Some choices are calculated. Where nothing was measured, a program has at least two blocks of keys. On Hopper, two
    programs share a multiprocessor if the KV heads alone are more than one wave: on an H200, each wave of single
    programs took 5 us more than its bytes. Tiles for more than 64 rows per KV head, which tensor cores and exponentials
    limit there and not the memory, have `overlap`.
    """
    if interpreted():
        # The time depends on the number of blocks, not their size; small shares, so that there are several.
        return Config(64, 64, 4, 2, 2, 64, overlap=dtype != torch.float32)
    if dtype == torch.float32:
        # No tensor cores at full precision: operands are in registers, of which larger tiles need too many.
        if head_dim <= 64:
            return Config(32, 64, 8, 2, 2, 128)
        # Two programs of 256 dimensions take 103 KB, which only data-centre GPUs have.
        programs = 2 if head_dim <= 128 or device.roomy else 1
        return Config(16, 32 if device.hopper and head_dim <= 128 else 16, 8, 2, programs, 128)
    if device.hopper and head_dim <= 128 and not 16 < rows <= 32:
        crowded = kv_heads > device.multiprocessors
        if rows <= 16:
            return Config(16, 64, 4, 4, 2, 128) if crowded else Config(16, 128, 4, 3, 1, 128)
        if rows <= 64:
            return Config(64, 64, 4, 3, 2, 128) if crowded else Config(64, 64, 4, 4, 1, 128)
        return replace(Config(128, 64, 8, 3, 1) if keys >= LONG else Config(64, 64, 4, 3, 2), overlap=True)
    wide, large = head_dim > 128, device.roomy
    if rows <= 16 and device.capability >= (10, 0):
        # With 64 keys ptxas stays at 128 registers there, and spills.
        return Config(16, 32, 4, 3 if wide else 4, 1 + large, 64)
    if rows <= 32:
        block_m = 16 if rows <= 16 else 32
        return Config(block_m, 32 if wide else 64, 4, 4 if device.hopper and rows <= 16 else 3, 1 + large, 128)
    if device.hopper:
        return Config(64 if rows <= 64 else 128, 32, 8, 3, 1)
    if wide:
        return Config(64, 32, 8, 2, 1, 64)
    if rows <= 64:
        return Config(64, 32, 4, 4, 1 + large, 64)
    return Config(128, 64, 8, 3, 1, 128) if large else Config(128, 32, 8, 3, 1, 64)
