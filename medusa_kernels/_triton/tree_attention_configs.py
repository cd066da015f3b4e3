"""Launch configurations of tree attention by compute capability, dtype, head size and rows; it launches nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from medusa_kernels._triton.launch import Capability


@dataclass(frozen=True)
class Config:
    """How one problem is cut and run.

    Attributes:
        block_m: rows (nodes times query heads of a KV head) a tile.
        block_n: keys a block of the prefix.
        num_warps: warps a program.
        num_stages: depth of the prefix loop's pipeline.
        programs: programs that one multiprocessor holds at once.
        min_keys: keys that are worth a program of their own.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs: int
    min_keys: int = 256

    @property
    def tree_block(self) -> int:
        """Keys a block of the tree: it must not reach over an ancestor word."""
        return min(64, self.block_n)


def configuration(capability: Capability, dtype: torch.dtype, head_dim: int, rows: int) -> Config:
    """Return the configuration for `rows` rows a KV head."""
    if rows <= 16:
        return Config(16, 64, 4, 3, 2, 128)
    return Config(64, 64, 4, 2, 2)


def candidates(capability: Capability, dtype: torch.dtype, head_dim: int, rows: int) -> list[Config]:
    """Return the alternatives that are worth measuring, the chosen one first."""
    return [configuration(capability, dtype, head_dim, rows)]
