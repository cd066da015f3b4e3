"""The rounding that storage in 8 bits does to projections. This module does not know files or losses."""

from __future__ import annotations

import torch

from medusa_decoding.heads import MedusaHeads, Storage


def fake_quant(projections: torch.Tensor, storage: Storage, dtype: torch.dtype) -> None:
    """Round projections in place to the values that they have once they are stored in 8 bits.

    Args:
        projections: [K, V', H] floats; K may be 0.
        storage: "int8" or "fp8".
        dtype: that they are converted to before they are stored.
    """
    for weight in projections.detach():
        # One head at a time: there may be no memory for a second set of all heads at the end of a run.
        rows, size = weight.shape
        one = MedusaHeads(size, rows, 1, bias=False, dtype=dtype, device=weight.device)
        with torch.no_grad():
            one.get_parameter("w2").copy_(weight[None])
            stored = one.quantized(storage)
            del one
            weight.copy_(stored.get_buffer("w2")[0])
            weight.mul_(stored.get_buffer("w2_scale")[0, :, None])
