"""Residual addition and RMS normalisation (Zhang and Sennrich 2019) in one pass over the hidden states.

It does not know which layer follows, nor where the sum goes.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
from torch import Tensor

from medusa_kernels import _checks, reference
from medusa_kernels._registry import register, triton_or


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return `s = x + delta` and `weight * (s / sqrt(mean(s^2) + eps))`, rounded as LlamaRMSNorm of transformers does.

    The sum is rounded to the dtype of x. From there the statistics are taken in fp32, the normalised value is rounded
    to that dtype, and its product with the weight is rounded once more.

    Args:
        x: `[..., H]`, fp16, bf16 or fp32; any strides.
        delta: like x; or fp32 `[S, ..., H]`, S parts that are added up in order (see `decode_linear`), and the sum is
            rounded once; or None to normalise x itself.
        weight: `[H]`, dtype of x.
        eps: added to the mean of the squares.

    Returns:
        The sum (x itself if delta is None) and the normalised sum, `[..., H]` in the dtype of x; new contiguous
        tensors, except for x itself.

    Raises:
        ValueError: an argument has a wrong shape, dtype or device.
    """
    _checks.require(x.dim() >= 1 and x.shape[-1] > 0, "x", "shape [..., H] with H of at least 1", list(x.shape))
    _checks.dtype("x", x, *_checks.FLOATS)
    _checks.match("weight", weight, (x.shape[-1],), "x", x)
    if delta is not None:
        if delta.dim() == x.dim() + 1:
            _checks.typed("delta", delta, ("S", *x.shape), torch.float32, "x", x)
            _checks.require(delta.shape[0] > 0, "delta", "at least one part", 0)
        else:
            _checks.match("delta", delta, tuple(x.shape), "x", x)
    total, normed = torch.ops.medusa_kernels.add_rms_norm.default(x, delta, weight, eps)
    return (x if delta is None else total), normed


def _eager(x, delta, weight, eps):
    """Run the op in PyTorch on any device; without delta the sum is empty."""
    if delta is not None and delta.dim() > x.dim():
        total = (x + reference.added(delta)).to(x.dtype).contiguous()
    else:
        total = x if delta is None else (x + delta).contiguous()
    wide = total.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    normed = (weight * (wide * scale).to(x.dtype)).contiguous()
    return (x.new_empty(0) if delta is None else total), normed


register(
    add_rms_norm,
    # Without delta the op has no sum to return, and an output of an op must not be one of its inputs.
    lambda a: (a.x.new_empty(0 if a.delta is None else a.x.shape), a.x.new_empty(a.x.shape)),
    cpu=triton_or("add_rms_norm", "eager", _eager, "PyTorch, operation by operation"),
)
