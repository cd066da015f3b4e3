"""Launch configurations of `heads_topk`: tiles, warps and stages per device and size."""

from __future__ import annotations

import torch
import triton

from medusa_kernels._registry import interpreted
from medusa_kernels._triton.launch import Device
from medusa_kernels._triton.quantised_product import packed_config
from medusa_kernels._triton.streaming import Config, interpreted_config


def configuration(
    device: Device,
    dtype: torch.dtype,
    stored: torch.dtype,
    rows: int,
    stage: str,
    *,
    vectors: bool = True,
    noise: bool = False,
    group: int = 0,
) -> Config:
    """Choose how weights of dtype `stored` are streamed past `rows` states, in the stage "residual" or "vocabulary".

    `vectors`: whether 16 bytes can be loaded at once (see `streaming.wide`). `noise`: whether noise is added. `group`:
    columns of a group of 4-bit codes.
    """
    if group:
        return packed_config(device, dtype, rows, group, crowded=noise or rows > 32)
    if interpreted():
        return interpreted_config(rows)
    m = min(64, max(16, triton.next_power_of_2(rows)))
    if dtype == torch.float32 or not vectors:
        # In fp32 a chain of multiply-adds is as long as a block, see `dot_accumulate`.
        return Config(16, 32, 16 if dtype == torch.float32 else 32, 4, 4, 2)
    # The addresses of the noise of more rows spill with 4 warps.
    warps = 8 if noise and m > 16 else 4
    # As many programs as there are registers for: 8 warps of up to 255 registers, or 12 of up to 168.
    programs = 8 // warps
    # From 9.0 on the residual block of 64 rows spills with 64 weight rows.
    if not device.roomy or (device.capability[0] >= 9 and stage == "residual" and m == 64):
        return Config(m, 32, 64, warps, 4, programs if m == 64 else 12 // warps)
    if device.hopper and stage == "vocabulary" and m == 16:
        # Best on an H200 for own, shared and gathered rows.
        return Config(m, 128, 128 if stored.itemsize == 1 else 64, 4, 5, 2)
    block_k = 128 if m == 16 or (m == 32 and stage == "vocabulary") else 64
    return Config(m, 64, block_k * 2 if stored.itemsize == 1 and m == 16 else block_k, warps, 4, programs)
