"""The numbers that projections stored in 8 bits stand for. This module does not know files or losses."""

from __future__ import annotations

import torch

from medusa_decoding.heads import MedusaHeads, Storage


def as_stored(projections: torch.Tensor, storage: Storage, dtype: torch.dtype) -> torch.Tensor:
    """Return the numbers that projections are once they are stored.

    Args:
        projections: [K, V', H] floats.
        storage: "int8" or "fp8".
        dtype: that they have before they are stored.

    Returns:
        [K, V', H] of the dtype of `projections`.
    """
    found = torch.empty_like(projections)
    for head, weight in enumerate(projections):
        # One head at a time: no second set of all of them in full length.
        rows, size = weight.shape
        one = MedusaHeads(size, rows, 1, bias=False, dtype=dtype, device=weight.device)
        with torch.no_grad():
            one.get_parameter("w2").copy_(weight[None])
            stored = one.quantized(storage)
            found[head] = stored.get_buffer("w2")[0].float() * stored.get_buffer("w2_scale")[0, :, None]
    return found
