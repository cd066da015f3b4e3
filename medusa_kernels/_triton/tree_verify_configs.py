"""Launch configurations of `tree_verify`: tiles, warps and stages per device and size."""

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
    rows: int,
    *,
    scaled: bool = False,
    vectors: bool = True,
    stored: torch.dtype | None = None,
    group: int = 0,
) -> Config:
    """Choose how the weight is streamed past `rows` nodes of the whole batch.

    `scaled`: whether there are a temperature and noise, which take registers; `vectors`: whether 16 bytes can be loaded
    at once (see `streaming.wide`); `stored`: the weight's dtype, if it is another; `group`: the columns of a group of
    4-bit codes.
    """
    if group:
        return packed_config(device, dtype, rows, group, crowded=scaled and rows > 32)
    if interpreted():
        return interpreted_config(rows)
    m = min(128, max(16, triton.next_power_of_2(rows)))
    if dtype == torch.float32 or not vectors:
        # In fp32 a chain of multiply-adds is as long as a block, see `dot_accumulate`.
        return Config(16, 32, 16 if dtype == torch.float32 else 32, 4, 4, 2)
    if m <= 32:
        bytes_each = 1 if stored is None else stored.itemsize
        return Config(m, 64, (128 if device.roomy else 64) * (2 if m == 16 and bytes_each == 1 else 1), 4, 4, 2)
    if device.hopper:
        if scaled:
            return Config(64, 128, 64, 8, 6, 1)
        return Config(m, 256, 64, 8, 4, 1) if m == 64 else Config(m, 128, 64, 8, 5, 1)
    if m == 64:
        return Config(m, 64, 64, 4, 3, 2)
    # There are registers for one program, which keeps the memory busy alone.
    return Config(m, 64, 64, 8, 5 if device.roomy else 4, 1)
