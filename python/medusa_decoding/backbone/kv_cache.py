"""TreeCache: the keys and values of all layers in one preallocated block, and the length of each row.

With one block, one launch compacts every layer (`kv_compact`), and addresses stay fixed for captured steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

SMALLEST_BUCKET = 64
FINE_BUCKETS = 4096
Tables = tuple[torch.Tensor, torch.Tensor]


@dataclass(eq=False)
class TreeCache:
    """Keys, values and lengths of a batch of sequences.

    Attributes:
        kv: [L, 2, B, Hkv, S, D]; kv[l, 0] holds layer l's keys (already rotated), kv[l, 1] its values. With `slots` of
            any number of sequences. In 8 bits int8 [.., D + 4], see `medusa_kernels.cache_rows`.
        lengths: int32 [B], filled rows of each sequence, on the same device.
        cos, sin: [P, D] or [B, P, D] rotary tables by position, P >= S, in the dtype of the model; where layers
            differ several of them, along an axis before these.
        slots: int32 [B], which sequence of `kv` belongs to each row, for a cache of which rows change places; None:
            sequence b to row b.
        places: the same on the host, for a prefill.
        views: see `tables_of`.
    """

    kv: torch.Tensor
    lengths: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    slots: torch.Tensor | None = None
    places: list[int] | None = None
    views: dict[int, Tables] = field(default_factory=dict, repr=False)

    @classmethod
    def allocate(cls, shape: tuple[int, ...], rope: Tables, dtype: torch.dtype | None = None) -> TreeCache:
        """Allocate an empty cache of shape (L, 2, B, Hkv, S, D), on the device of the rotary tables and in their dtype.

        `dtype` may be another one: int8, whose shape is (.., D + 4).

        Raises:
            MemoryError: the block does not fit on the device; the message gives its size.
        """
        dtype, device = dtype or rope[0].dtype, rope[0].device
        try:
            kv = torch.zeros(shape, dtype=dtype, device=device)
        except RuntimeError as error:  # torch.OutOfMemoryError on CUDA, a plain RuntimeError from the CPU allocator
            size = torch.Size(shape).numel() * dtype.itemsize / 2**30
            raise MemoryError(f"cache: {size:.2f} GiB for {list(shape)} {dtype} do not fit on {device}") from error
        lengths = torch.zeros(shape[2], dtype=torch.int32, device=device)
        return cls(kv, lengths, *rope)

    @property
    def capacity(self) -> int:
        """S, the number of rows per sequence."""
        return self.kv.shape[4]

    @property
    def tables(self) -> Tables:
        """The rotary tables, cosines and sines."""
        return self.cos, self.sin

    def tables_of(self, table: int | None) -> Tables:
        """Return one of the pairs of rotary tables, each [P, D] or [B, P, D]; with None there is only one."""
        if table is None:
            return self.tables
        # The same views each time: `rope_append` knows what it has checked by identity.
        if table not in self.views:
            self.views[table] = (self.cos[table], self.sin[table])
        return self.views[table]

    @property
    def nbytes(self) -> int:
        """Bytes of the block and the tables."""
        return self.kv.nbytes + self.cos.nbytes + self.sin.nbytes

    def set_tables(self, tables: Tables) -> bool:
        """Replace the rotary tables; return whether they were copied in place, which keeps addresses."""
        in_place = self.cos.shape == tables[0].shape
        if in_place:
            self.cos.copy_(tables[0])
            self.sin.copy_(tables[1])
        else:
            self.cos, self.sin = tables
            self.views = {}
        return in_place

    def release(self) -> None:
        """Free the memory, even if the cache is still referenced; it cannot be used afterwards."""
        self.views = {}
        self.kv, self.cos, self.sin = (tensor.new_empty(0) for tensor in (self.kv, self.cos, self.sin))

    def layer(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one layer's keys and values, each [B, Hkv, S, D], as views."""
        return self.kv[index, 0], self.kv[index, 1]


def bucket(size: int) -> int:
    """Round a size up to 64, 96, 128, 192, .. 4096, 4608, 5120, ..: few shapes for compiled steps, little waste.

    There are two sizes per doubling up to 4096 (at most 50 % waste), and eight above (at most an eighth).
    """
    if size <= SMALLEST_BUCKET:
        return SMALLEST_BUCKET
    power = 1 << (size - 1).bit_length() - 1
    step = power // (2 if power < FINE_BUCKETS else 8)
    return -(-size // step) * step


def reusable_rows(old: Tables, new: Tables) -> int:
    """Return the number of leading positions at which two pairs of rotary tables are equal.

    Keys cached with one pair can be used with the other up to there. Tables, each [P, D] or [B, P, D], differ if the
    frequencies depend on the sequence length (dynamic scaling); P may be another, and axes may come before. This waits
    for the device.
    """
    rows = min(old[0].shape[-2], new[0].shape[-2])
    differ = torch.zeros(rows, dtype=torch.bool, device=old[0].device)
    for before, after in zip(old, new, strict=True):
        unequal = (before[..., :rows, :] != after[..., :rows, :]).any(-1)
        differ |= unequal.view(-1, rows).any(0)
    places = differ.nonzero()
    return int(places[0]) if len(places) else rows
