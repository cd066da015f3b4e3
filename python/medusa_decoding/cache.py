"""TreeCache: the keys and values of all layers in one preallocated block, and how far each row is filled.

One block lets one launch compact every layer (`kv_compact`) and keeps addresses fixed for captured steps. The cache
knows shapes and lengths; it does not know trees, tokens or models.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

SMALLEST_BUCKET = 64


@dataclass(eq=False)
class TreeCache:
    """Keys, values and lengths of a batch of sequences.

    Attributes:
        kv: [L, 2, B, Hkv, S, D]; kv[l, 0] holds layer l's keys (already rotated), kv[l, 1] its values.
        lengths: int32 [B], filled rows of each sequence, on the same device.
        cos, sin: [P, D] or [B, P, D] rotary tables by position, P >= S, in the dtype of kv.
    """

    kv: torch.Tensor
    lengths: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor

    @classmethod
    def allocate(cls, shape: tuple[int, ...], rope: tuple[torch.Tensor, torch.Tensor]) -> TreeCache:
        """Make an empty cache.

        Args:
            shape: (L, 2, B, Hkv, S, D).
            rope: the tables of cosines and sines, whose dtype and device the cache takes.

        Raises:
            MemoryError: the block does not fit on the device; says how large it would be.
        """
        dtype, device = rope[0].dtype, rope[0].device
        try:
            kv = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:  # torch.OutOfMemoryError on CUDA, a plain RuntimeError from the CPU allocator
            size = torch.Size(shape).numel() * dtype.itemsize / 2**30
            raise MemoryError(f"cache: {size:.2f} GiB for {list(shape)} {dtype} do not fit on {device}") from error
        return cls(kv, torch.zeros(shape[2], dtype=torch.int32, device=device), *rope)

    @property
    def capacity(self) -> int:
        """S, the rows a sequence can hold."""
        return self.kv.shape[4]

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one layer's keys and values, each [B, Hkv, S, D], as views."""
        return self.kv[index, 0], self.kv[index, 1]


def bucket(size: int) -> int:
    """Round a size up to 64, 96, 128, 192, 256, 384, ..: few shapes for compiled steps, at most half again in waste."""
    power = SMALLEST_BUCKET
    while power < size:
        if power * 3 // 2 >= size:
            return power * 3 // 2
        power *= 2
    return power
