"""Launch configurations of `decode_linear`: measured on Hopper, chosen by a model of the time on other devices."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, replace

import torch
import triton

from medusa_kernels._triton.launch import Device
from medusa_kernels.decode_linear import MOST_ROWS

MOST_DIVIDED = 16
"""Most rows of x for which Hopper divides the columns of 16-bit weights, unless whole ones leave too much idle. On an
H200 that makes whole steps 1 % faster with 1 and 16 rows, and 1 to 2 % slower with 64: the norms that add the parts up
cost more than the projections gain."""

MOST_PARTS = 6
MOST_IDLE = 1 / 3
"""Most that a launch may leave idle (see `Device.idle`), if it can be helped."""
GOOD_ENOUGH = 1.03
"""The fewest parts are taken whose estimated time is within this factor of the best."""

THREADS = 1536
"""Threads that a multiprocessor of any supported GPU runs at once."""

SHARED_BY_TWO = 112 * 1024
"""Most shared memory of a program that lets two share a multiprocessor."""


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

    def stage_bytes(self, dtype: torch.dtype, gate: bool, bits: int = 0) -> int:
        """Return the bytes of shared memory per step; `bits` of a weight, 0: those of the dtype."""
        bits, weights = bits or 8 * dtype.itemsize, self.block_n * (2 if gate else 1)
        return (self.block_m * dtype.itemsize * 8 + weights * bits) * self.block_k // 8


def configuration(
    device: Device,
    dtype: torch.dtype,
    rows: int,
    out_features: int,
    in_features: int,
    gate: bool,
    *,
    vectors: bool = True,
    parts: int = 1,
    bits: int = 0,
    group: int = 0,
) -> Config:
    """Choose how weights with `out_features` rows in all and `in_features` columns are streamed past 1 to 64 rows of x.

    `gate`: whether programs have two accumulators; `vectors`: whether 16 bytes can be loaded at once; `parts`: into how
    many the columns are divided; `bits` of a weight, 0: those of the dtype; `group`: columns with a scale of their own.
    """
    m = min(MOST_ROWS, max(16, triton.next_power_of_2(rows)))
    if dtype == torch.float32:
        # A step is also how long a chain of additions gets. Two accumulators of 64 rows spill in 4 warps.
        return Config(False, m, 32, 32 if bits == 4 else 16, 8 if gate and m == MOST_ROWS else 4, 2)
    if not vectors or scales_weights(dtype, group):
        return Config(False, m, 32, 32, 4, 2)
    if device.hopper and parts == 1 and not bits:
        return _fitting(_on_hopper(device, m, out_features, gate), device, dtype, gate)

    def rank(config: Config) -> tuple[float, float, int]:
        # Of equal times the one that leaves least idle, then the one with the most programs per multiprocessor.
        held = programs(config, device, dtype, gate, bits)
        count = -(-out_features // (config.block_n * (1 + gate))) * parts
        time = _time(config, device, dtype, out_features, in_features, gate, parts, bits)
        return time, device.idle(count, held), -held

    if bits:
        return min(stored_choices(device, dtype, m, gate, bits, group), key=rank)
    return min(choices(device, dtype, m, gate), key=rank)


def scales_weights(dtype: torch.dtype, group: int) -> bool:
    """Return whether scales are multiplied into 4-bit weights, not into sums: those of fp32, and of short groups."""
    return group > 0 and (dtype == torch.float32 or group % 32 != 0)


@functools.cache
def best_parts(
    device: Device, dtype: torch.dtype, rows: int, out_features: int, in_features: int, bits: int = 0, group: int = 0
) -> int:
    """Return into how many parts the columns of weights are best divided, by the same model of the time.

    fp32 products are sums of short chains already, and are not divided.
    """
    if dtype == torch.float32 or rows > MOST_ROWS:
        return 1

    def time(parts: int) -> float:
        config = configuration(
            device, dtype, rows, out_features, in_features, False, parts=parts, bits=bits, group=group
        )
        idle = device.idle(-(-out_features // config.block_n) * parts, programs(config, device, dtype, False, bits))
        if idle > MOST_IDLE and parts < MOST_PARTS:
            return math.inf
        # A part is written and read once more in fp32, through the L2, which has about twice the memory's bandwidth.
        sums = parts * rows * out_features * 32 / (in_features * (bits or 8 * dtype.itemsize)) if parts > 1 else 0
        return _time(config, device, dtype, out_features, in_features, False, parts, bits) + sums

    if rows > MOST_DIVIDED and device.hopper and not bits and math.isfinite(time(1)):
        return 1
    times = [time(parts) for parts in range(1, MOST_PARTS + 1)]
    return next(parts for parts, one in enumerate(times, 1) if one <= GOOD_ENOUGH * min(times))


def _on_hopper(device: Device, m: int, out_features: int, gate: bool) -> Config:
    """Return the fastest on an H200 for the projections of Llama-2-7B and Llama-3-8B, M = 1 and 64."""
    if gate and m == MOST_ROWS:
        return Config(out_features > 24576, m, 64, 64, 4, 4)
    if gate:
        narrow = Config(False, m, 32, 128, 4, 3)
        slots = device.multiprocessors * programs(narrow, device, torch.bfloat16, gate)
        return Config(True, m, 64, 64, 4, 4) if m == 32 or out_features > slots * 64 else narrow
    if m < 64:
        return Config(True, m, 64, 128, 4, 6 if out_features <= 8192 else 4)
    if out_features <= device.multiprocessors * 32:  # a multiprocessor holds one program of six stages: a single wave
        return Config(False, m, 32, 128, 4, 6)
    if out_features <= 8192:
        return Config(True, m, 64, 128, 4, 6)
    return Config(False, m, 128, 64, 4, 5)


IN_FLIGHT = 16 * 1024
"""Bytes of weights in flight to each multiprocessor that keep the memory busy: what it delivers within its latency."""

PULL = 2.3
"""Most that a multiprocessor can load, activations included, as a multiple of its even share of the bandwidth. 75 KB/us
of 33 explain what 64 rows cost on an H200; for other GPUs it is a guess."""


DECODED = {
    (False, 4): (1.0, 0.2, 0.5),
    (False, 8): (0.0, 0.2, 0.5),
    (True, 4): (2.2, 0.16, 0.28),
    (True, 8): (1.25, 0.39, 0.55),
}
"""What decoding takes on an H200, by `swap` and the bits of a weight: the least time of a step of columns, in latencies
of the memory; then the most that one program decodes, and all of a multiprocessor's programs do together, as shares of
its even part of the bandwidth. With `swap` fitted to times of the projections of Llama-3-8B: a step of 128 x 128 codes
takes four warps 1.4 us, and two such programs at once 1.6 us; one of 64 x 64 nf4 codes takes 1.0 us, with up to three
at once. Without it those that choose the best parts: 1 % from the least times, on average over 1, 16 and 32 rows."""


def choices(device: Device, dtype: torch.dtype, m: int, gate: bool) -> list[Config]:
    """Return the tiles to choose from where nothing was measured, each with as many stages as fit.

    On Hopper those are for divided columns: tiles that fill its matrix instruction, two programs to a multiprocessor.
    Elsewhere steps of 128 columns spill with 64 rows of x or two accumulators, unless the tile is the smallest. Gated
    weights, which are not divided, may take a stage less: one more program fits, and no last wave is nearly empty.
    """
    if device.hopper:
        config = Config(False, m, 128, 64, 4, 5) if m == MOST_ROWS else Config(True, m, 64, 128, 4, 5)
        return [replace(config, num_stages=min(5, SHARED_BY_TWO // config.stage_bytes(dtype, gate)))]
    tiles = ((32, 128, 5), (32, 64, 5), (64, 128, 4), (64, 64, 4))
    return [
        _fitting(Config(False, m, n, k, 4, stages - fewer), device, dtype, gate)
        for (n, k, stages), fewer in itertools.product(tiles, range(1 + gate))
        if k < 128 or (m < MOST_ROWS and not gate) or (m, n) == (16, 32)
    ]


def stored_choices(device: Device, dtype: torch.dtype, m: int, gate: bool, bits: int, group: int) -> list[Config]:
    """Return the tiles for weights in 4 and 8 bits: those whose warps decode no weight twice, calculated.

    Decoded weights are the left factor on Hopper with 64 rows of x, and where two sums of 64 spill otherwise. With
    fewer rows an H200 takes 0.6 to 0.97 of the time if they are the right one.
    """
    swap = m == MOST_ROWS and (device.hopper or (device.capability[0] == 10 and gate))
    tiles: tuple[tuple[int, int, int], ...]
    if device.hopper:
        tiles = ((64, 128, 4), (128, 128, 8))[: 1 + swap]
    elif swap:
        tiles = ((64, 64, 4),)
    elif m == MOST_ROWS:
        # The tables of nf4 and fp4, whose groups mostly have 64 columns, take registers too.
        tiles = ((128, 32 if gate and group % 128 else 64, 8 if gate else 4),)
    else:
        tiles = ((32, 128, 4), (64, 128, 4)) if gate and m == 16 else ((64, 64 if gate else 128, 4), (128, 128, 4))
    found = []
    for n, k, warps in tiles[: 1 if gate and m > 16 else 2]:
        # A step has columns of one group.
        config = Config(swap, m, n, min(k, group & -group) if group else k, warps, 4)
        stages = max(2, device.shared_memory // config.stage_bytes(dtype, gate, bits))
        found.append(replace(config, num_stages=min(4, stages)))
    return found


def programs(config: Config, device: Device, dtype: torch.dtype, gate: bool, bits: int = 0) -> int:
    """Return how many programs share a multiprocessor, by its shared memory.

    The memory holds all stages if tensor cores read both factors from it (9.0; 10.0 from 64 rows on), else all but one.
    """
    stages = config.num_stages - (not device.hopper and (device.capability[0] != 10 or config.block_m < 64))
    by_memory = device.blocks(stages * config.stage_bytes(dtype, gate, bits))
    threads = 32 * config.num_warps
    sums = config.block_m * config.block_n // threads
    # About 96 registers besides the accumulators. Stored weights are decoded into more; 4 bits have sums of a group.
    registers = 96 + sums * (1 + gate)
    if bits:
        decoded = config.block_n * config.block_k * (1 + gate) // (2 * threads)
        registers += sums * (bits == 4) + decoded - 16 * (device.capability < (10, 0))
    by_registers = 2**16 // (registers * threads) if gate or bits else by_memory
    return max(1, min(by_memory, by_registers, THREADS // threads))


def _time(
    config: Config, device: Device, dtype: torch.dtype, out_features: int, in_features: int, gate: bool, parts: int = 1,
    bits: int = 0,
) -> float:  # fmt: skip
    """Estimate the time of a launch, in rows of weights that the memory could deliver in it.

    Programs run in waves of as many as the device holds at once. A wave takes the memory's latency, plus the longest of
    three times: the memory's for the weights, the busiest multiprocessor's for its programs' weights and activations,
    and that of a wave too small to keep the memory busy. On Hopper, where it was measured, there is a fourth one: that
    of decoding stored weights.
    """
    weights, count = config.block_n * (1 + gate), device.multiprocessors
    stored = bits / 8 or dtype.itemsize
    in_flight = (config.num_stages - 1) * weights * config.block_k * stored
    latency = count * IN_FLIGHT / (in_features * stored)
    step, alone, together = DECODED[config.swap, bits] if bits and device.hopper else (0.0, math.inf, math.inf)

    def wave(held: int) -> float:
        most = -(-held // count)  # programs of the busiest multiprocessor
        pulled = most * (weights + config.block_m * dtype.itemsize / stored)
        moving = max(held * weights, pulled * count / PULL, count * IN_FLIGHT / in_flight * weights)
        decoding = max(step * latency * in_features / config.block_k, weights * count * max(1 / alone, most / together))
        return latency + max(moving, decoding) / parts

    at_once = count * programs(config, device, dtype, gate, bits)
    waves, rest = divmod(-(-out_features // weights) * parts, at_once)
    return waves * wave(at_once) + (wave(rest) if rest else 0.0)


def _fitting(config: Config, device: Device, dtype: torch.dtype, gate: bool) -> Config:
    """Return the configuration with no more stages than fit the shared memory."""
    stages = max(2, device.shared_memory // config.stage_bytes(dtype, gate))
    return replace(config, num_stages=min(config.num_stages, stages))
