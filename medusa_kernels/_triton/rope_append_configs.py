"""Launch configurations of `rope_append`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

from medusa_kernels._registry import interpreted


@dataclass(frozen=True)
class Config:
    """How the work is divided: `rows` heads per program, of as many nodes as that spans."""

    rows: int
    num_warps: int
    num_stages: int = 1


def configuration(dtype: torch.dtype, head_dim: int, num_warps: int = 2) -> Config:
    """Return a tile of which every thread holds 16 bytes of either half of a head.

    Two warps divide the work of one decoded token into enough programs (12 for 32 heads of 128 with as many keys and
    values), and let 32 programs share a multiprocessor when there are many.
    """
    half_bytes = triton.next_power_of_2(head_dim // 2) * dtype.itemsize
    rows = max(1, num_warps * 32 * 16 // half_bytes)
    return Config(rows=max(rows, 256) if interpreted() else rows, num_warps=num_warps)
