"""The launch configurations of each Triton kernel that are worth timing; the chosen one comes first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from medusa_kernels._triton import (
    decode_linear,
    heads_topk,
    rope_append,
    streaming,
    tree_attention,
    tree_verify,
)
from medusa_kernels._triton.decode_linear_configs import choices
from medusa_kernels._triton.launch import Device

# block_m, block_n, num_warps, num_stages, programs
_FEW = [
    (16, 64, 4, 2, 4), (16, 64, 4, 3, 3), (16, 64, 4, 4, 2), (16, 64, 4, 5, 1), (16, 128, 4, 2, 3), (16, 128, 4, 3, 1),
    (16, 128, 8, 2, 2), (16, 128, 8, 3, 1), (16, 128, 8, 4, 1), (16, 32, 4, 4, 4), (16, 32, 4, 5, 3), (16, 32, 4, 6, 2),
    (16, 32, 2, 4, 4), (16, 32, 2, 5, 3),
]  # fmt: skip
_UP_TO_32 = [(32, 64, 4, 3, 2), (32, 128, 4, 2, 2), (32, 128, 4, 3, 1), (32, 32, 2, 4, 3)]
_UP_TO_64 = [
    (64, 64, 4, 2, 2), (64, 64, 4, 3, 2), (64, 64, 4, 4, 1), (64, 128, 4, 2, 1), (64, 128, 4, 3, 1), (64, 64, 8, 2, 1),
    (64, 64, 8, 3, 1), (64, 128, 8, 2, 1), (64, 128, 8, 3, 1), (64, 32, 4, 3, 3), (64, 32, 4, 4, 2), (64, 32, 4, 5, 2),
]  # fmt: skip
_MANY = [
    (128, 64, 8, 2, 1), (128, 64, 8, 3, 1), (128, 64, 8, 4, 1), (128, 128, 8, 2, 1), (128, 128, 8, 3, 1),
    (128, 32, 8, 3, 1), (128, 32, 8, 4, 1),
]  # fmt: skip


def _tree_attention(
    device: Device, dtype: torch.dtype, head_dim: int, rows: int, keys: int, kv_heads: int
) -> list[Any]:
    Config = tree_attention.Config
    chosen = tree_attention.configuration(device, dtype, head_dim, rows, keys=keys, kv_heads=kv_heads)
    if dtype == torch.float32 or head_dim > 128 or not device.hopper:
        few = dtype != torch.float32 and rows <= 16 and head_dim <= 128 and device.capability < (9, 0)
        return [chosen, *([replace(chosen, block_n=32, num_warps=2, num_stages=4)] * few)]
    if rows <= 32:
        others = [Config(*shape, min_keys=128) for shape in (_FEW if rows <= 16 else _UP_TO_32)]
        others += [Config(64, 64, 4, 3, 2)] * (rows > 16)
    else:
        shapes = _UP_TO_64 if rows <= 64 else _MANY + _UP_TO_64
        others = [Config(*shape, overlap=overlap) for shape in shapes for overlap in (False, True)]
    return [chosen, *(other for other in others if other != chosen)]


# block_v, block_k, num_warps, num_stages, programs; the first for 16-bit weights and few rows
_NARROW = [
    (64, 128, 4, 3, 2), (64, 128, 4, 5, 2), (64, 128, 4, 6, 2), (64, 64, 4, 6, 3), (64, 256, 4, 3, 2),
    (32, 128, 4, 5, 3), (32, 256, 4, 4, 2), (128, 64, 4, 5, 2), (128, 128, 8, 5, 1), (64, 256, 8, 5, 1),
    (64, 128, 4, 4, 8), (64, 64, 4, 6, 12), (32, 128, 4, 5, 12),
]  # fmt: skip
_BYTES = [
    (64, 256, 4, 3, 2), (64, 256, 4, 5, 2), (64, 128, 4, 6, 2), (64, 128, 4, 8, 2),
    (32, 256, 4, 5, 2), (128, 128, 4, 5, 2), (128, 256, 8, 5, 1), (64, 512, 8, 4, 1), (64, 256, 4, 4, 8),
    (32, 256, 4, 5, 12), (128, 128, 4, 4, 8),
]  # fmt: skip
_NODES_64 = [
    (256, 64, 8, 3, 1), (256, 64, 8, 4, 1), (256, 64, 8, 5, 1), (256, 64, 8, 4, 4), (128, 64, 4, 3, 2),
    (128, 64, 4, 4, 2), (128, 64, 4, 4, 8), (128, 64, 8, 6, 1), (128, 128, 8, 4, 1), (64, 64, 4, 6, 2),
]  # fmt: skip
_NODES_128 = [
    (128, 64, 8, 4, 1), (128, 64, 8, 5, 1), (128, 64, 8, 6, 1), (128, 128, 8, 3, 1), (64, 128, 8, 4, 1),
    (64, 64, 8, 4, 1), (128, 64, 8, 5, 4), (64, 64, 8, 8, 1),
]  # fmt: skip


def _heads_topk(device: Device, dtype: torch.dtype, stored: torch.dtype, rows: int, stage: str) -> list[Any]:
    chosen = heads_topk.configuration(device, dtype, stored, rows, stage)
    return _streamed(chosen, device, dtype, _BYTES if stored.itemsize == 1 else _NARROW)


def _tree_verify(device: Device, dtype: torch.dtype, rows: int) -> list[Any]:
    chosen = tree_verify.configuration(device, dtype, rows)
    wide = _NODES_64 if chosen.block_m == 64 else _NODES_128
    return _streamed(chosen, device, dtype, _NARROW if chosen.block_m <= 32 else wide)


def _streamed(
    chosen: Any, device: Device, dtype: torch.dtype, shapes: list[tuple[int, int, int, int, int]]
) -> list[Any]:
    if dtype == torch.float32 or not device.hopper:
        return [chosen]
    configs = (streaming.Config(chosen.block_m, *shape) for shape in shapes)
    return [chosen, *(config for config in configs if config != chosen)]


# swap, block_n, block_k, num_warps, stages; of gated weights those of half as many rows
_LINEAR_FEW = [
    (True, 64, 128, 4, (3, 4, 5, 6)), (True, 64, 64, 4, (4, 6, 8)), (True, 128, 64, 4, (4, 5, 6)),
    (False, 32, 128, 4, (3, 4, 5, 6)), (True, 128, 128, 8, (3, 4)),
]  # fmt: skip
_LINEAR_64 = [
    (False, 128, 64, 4, (3, 4, 5, 6)), (False, 256, 64, 8, (3, 4)), (True, 64, 128, 4, (3, 4, 6)),
    (True, 128, 64, 8, (4, 5)), (False, 64, 64, 4, (4, 5, 6)), (False, 32, 128, 4, (4, 6)),
    (True, 64, 64, 4, (4, 6)),
]  # fmt: skip


def _decode_linear(
    device: Device, dtype: torch.dtype, rows: int, out_features: int, in_features: int, gate: bool, parts: int
) -> list[Any]:
    chosen = decode_linear.configuration(device, dtype, rows, out_features, in_features, gate, parts=parts)
    if dtype == torch.float32:
        return [chosen]
    if device.hopper:
        shapes = _LINEAR_64 if chosen.block_m == 64 else _LINEAR_FEW
        others = [
            decode_linear.Config(swap, chosen.block_m, block_n // (1 + gate), block_k, warps, count)
            for swap, block_n, block_k, warps, stages in shapes
            for count in stages
            if block_n // (1 + gate) >= (64 if swap else 32)
        ]
    else:
        tiles = choices(device, dtype, chosen.block_m, gate)
        others = [replace(tile, num_stages=tile.num_stages + more) for tile in tiles for more in (0, -1, 1)]
        if chosen.block_m == 16 and device.capability < (9, 0):
            others += [replace(tile, num_warps=2) for tile in tiles]
    fitting = (one for one in others if one.stage_bytes(dtype, gate) * one.num_stages <= device.shared_memory)
    return list(dict.fromkeys([chosen, *fitting]))


def _rope_append(dtype: torch.dtype, head_dim: int) -> list[Any]:
    return [rope_append.configuration(dtype, head_dim, num_warps) for num_warps in (2, 1, 4, 8)]


CANDIDATES: dict[str, Callable[..., list[Any]]] = {
    "decode_linear": _decode_linear,
    "tree_attention": _tree_attention,
    "heads_topk": _heads_topk,
    "tree_verify": _tree_verify,
    "rope_append": _rope_append,
}
"""For each op, what lists its candidates, by arguments of the kernel's `configuration` with the same names."""
