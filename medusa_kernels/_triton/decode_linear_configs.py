"""Launch configurations of `decode_linear`: measured on Hopper, chosen by a model of the time on other devices."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from medusa_kernels._triton.launch import Device
from medusa_kernels.decode_linear import MOST_ROWS


@dataclass(frozen=True)
class Config:
    """How weights are streamed.

    Attributes:
        swap: whether the weight is the left factor, whose rows fill the 64 rows of a Hopper matrix instruction.
        block_m: rows of x, at least as many as there are.
        block_n: rows of each weight that a program streams.
        block_k: columns per step.
        num_warps: warps per program.
        num_stages: depth of software pipelining.
    """

    swap: bool
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def stage_bytes(self, dtype: torch.dtype, gate: bool) -> int:
        """Return the bytes of shared memory per step."""
        return (self.block_m + self.block_n * (2 if gate else 1)) * self.block_k * dtype.itemsize


def configuration(
    device: Device,
    dtype: torch.dtype,
    rows: int,
    out_features: int,
    in_features: int,
    gate: bool,
    *,
    vectors: bool = True,
) -> Config:
    """Choose how weights with `out_features` rows in all and `in_features` columns are streamed past 1 to 64 rows of x.

    `gate`: whether programs have two accumulators; `vectors`: whether 16 bytes can be loaded at once.
    """
    m = min(MOST_ROWS, max(16, triton.next_power_of_2(rows)))
    if dtype == torch.float32:
        # A step is also how long a chain of additions gets. Two accumulators of 64 rows spill in 4 warps.
        return Config(False, m, 32, 16, 8 if gate and m == MOST_ROWS else 4, 2)
    if not vectors:
        return Config(False, m, 32, 32, 4, 2)
    if device.hopper:
        config = _on_hopper(device, m, out_features, gate)
    else:
        # Of equal times the one with the most programs per multiprocessor.
        config = min(
            choices(device, dtype, m, gate),
            key=lambda c: (_time(c, device, dtype, out_features, in_features, gate), -programs(c, device, dtype, gate)),
        )
    return _fitting(config, device, dtype, gate)


def _on_hopper(device: Device, m: int, out_features: int, gate: bool) -> Config:
    """Return the fastest on an H200 for the projections of Llama-2-7B and Llama-3-8B, M = 1 and 64."""
    if gate:
        if out_features > 24576 or m == 32:
            return Config(True, m, 64, 64, 4, 4)
        return Config(False, m, 32, 128, 4, 3) if m < 64 else Config(False, m, 64, 64, 4, 4)
    if m < 64:
        return Config(True, m, 64, 128, 4, 6 if out_features <= 8192 else 4)
    if out_features <= device.multiprocessors * 32:  # a multiprocessor holds one program of six stages: a single wave
        return Config(False, m, 32, 128, 4, 6)
    if out_features <= 8192:
        return Config(True, m, 64, 128, 4, 6)
    return Config(False, m, 128, 64, 4, 5)


IN_FLIGHT = 16 * 1024
"""Bytes of weights in flight to each multiprocessor that keep the memory busy: what it delivers within its latency. An
A100 needs 11 KiB (2 TB/s for 0.6 us)."""

PULL = 2
"""Most that a multiprocessor can load, activations included, as a multiple of its even share of the bandwidth."""


def choices(device: Device, dtype: torch.dtype, m: int, gate: bool) -> list[Config]:
    """Return the tiles to choose from on devices without measurements, each with as many stages as fit.

    Steps of 128 columns spill with 64 rows of x or two accumulators, unless the tile is the smallest.
    """
    tiles = ((32, 128, 5), (32, 64, 5), (64, 128, 4), (64, 64, 4))
    return [
        _fitting(Config(False, m, n, k, 4, stages), device, dtype, gate)
        for n, k, stages in tiles
        if k < 128 or (m < MOST_ROWS and not gate) or (m, n) == (16, 32)
    ]


def programs(config: Config, device: Device, dtype: torch.dtype, gate: bool) -> int:
    """Return how many programs share a multiprocessor, by its shared memory.

    The memory holds all stages if tensor cores read both factors from it (10.0, from 64 rows on), else all but one.
    """
    stages = config.num_stages - (device.capability[0] != 10 or config.block_m < 64)
    return max(1, device.blocks(stages * config.stage_bytes(dtype, gate)))


def _time(config: Config, device: Device, dtype: torch.dtype, out_features: int, in_features: int, gate: bool) -> float:
    """Estimate the time of a launch, in rows of weights that the memory could deliver in it.

    Programs run in waves of as many as the device holds at once. A wave takes the memory's latency, plus the longest of
    three times: the memory's for the weights, the busiest multiprocessor's for its programs' weights and activations,
    and that of a wave too small to keep the memory busy.
    """
    weights, count = config.block_n * (1 + gate), device.multiprocessors
    in_flight = (config.num_stages - 1) * weights * config.block_k * dtype.itemsize
    latency = count * IN_FLIGHT / (in_features * dtype.itemsize)

    def wave(held: int) -> float:
        busiest = -(-held // count) * (weights + config.block_m)
        return latency + max(held * weights, busiest * count / PULL, count * IN_FLIGHT / in_flight * weights)

    at_once = count * programs(config, device, dtype, gate)
    waves, rest = divmod(-(-out_features // weights), at_once)
    return waves * wave(at_once) + (wave(rest) if rest else 0.0)


def _fitting(config: Config, device: Device, dtype: torch.dtype, gate: bool) -> Config:
    """Return the configuration with no more stages than fit the shared memory."""
    stages = max(2, device.shared_memory // config.stage_bytes(dtype, gate))
    return replace(config, num_stages=min(config.num_stages, stages))
