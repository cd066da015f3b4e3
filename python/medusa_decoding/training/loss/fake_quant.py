"""The numbers that projections stored in 8 bits stand for. This module does not know files or losses."""

from __future__ import annotations

import torch

from medusa_decoding.heads import MedusaHeads, Storage


def store(projections: torch.Tensor, storage: Storage, dtype: torch.dtype) -> None:
    """Put the numbers that projections are once they are stored in their place.

    Args:
        projections: [K, V', H] floats, changed; K may be 0.
        storage: "int8" or "fp8".
        dtype: that they have before they are stored.
    """
    for weight in projections.detach():
        # One head at a time: at the end of a run there may be no room for a second set of all of them.
        rows, size = weight.shape
        one = MedusaHeads(size, rows, 1, bias=False, dtype=dtype, device=weight.device)
        with torch.no_grad():
            one.get_parameter("w2").copy_(weight[None])
            stored = one.quantized(storage)
            del one
            weight.copy_(stored.get_buffer("w2")[0])
            weight.mul_(stored.get_buffer("w2_scale")[0, :, None])
