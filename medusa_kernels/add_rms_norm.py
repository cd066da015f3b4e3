"""Residual addition and RMS normalisation (Zhang and Sennrich 2019) in one pass over the hidden states.

It does not know which layer follows, nor where the sum goes.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import torch
from torch import Tensor

from medusa_kernels import _checks, reference
from medusa_kernels._registry import register, triton_or


def add_rms_norm(
    x: Tensor,
    delta: Tensor | None,
    weight: Tensor | None,
    eps: float,
    *,
    delta_norm: Tensor | None = None,
    norm_offset: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `s = x + delta` and `weight * (s / sqrt(mean(s^2) + eps))`, rounded as LlamaRMSNorm of transformers does.

    The sum is rounded to the dtype of x. From there the statistics are taken in fp32, the normalised value is rounded
    to that dtype, and its product with the weight is rounded once more.

    With `delta_norm` the same normalisation is first applied to delta, after it is rounded to the dtype of x: a layer
    whose norms come after attention and MLP (OLMo 2, arXiv:2501.00656; Gemma 2, arXiv:2408.00118).

    Args:
        x: `[..., H]`, fp16, bf16 or fp32; any strides.
        delta: like x; or fp32 `[S, ..., H]`, S parts that are added up in order (see `decode_linear`), and the sum is
            rounded once; or None to normalise x itself.
        weight: `[H]`, dtype of x; None, with delta: the sum is not normalised.
        eps: added to the mean of the squares, of both norms.
        delta_norm: `[H]`, dtype of x, the weight of a norm of delta; None: delta is added as it is.
        norm_offset: a number o: both norms multiply by `o + weight` in fp32 and round once, as OLMo 2 (0) and Gemma
            (1) do.

    Returns:
        The sum (x itself if delta is None) and the normalised sum (the sum itself if weight is None), `[..., H]` in the
        dtype of x; new contiguous tensors, except for x itself.

    Raises:
        ValueError: an argument has a wrong shape, dtype or device.
    """
    _checks.require(x.dim() >= 1 and x.shape[-1] > 0, "x", "shape [..., H] with H of at least 1", list(x.shape))
    _checks.dtype("x", x, *_checks.FLOATS)
    for name, given in (("weight", weight), ("delta_norm", delta_norm)):
        if given is not None:
            _checks.match(name, given, (x.shape[-1],), "x", x)
    if delta is None:
        _checks.require(weight is not None, "weight", "a tensor, as there is no delta", weight)
        _checks.require(delta_norm is None, "delta_norm", "None, as there is no delta", "a tensor")
    else:
        if delta.dim() == x.dim() + 1:
            _checks.typed("delta", delta, ("S", *x.shape), torch.float32, "x", x)
            _checks.require(delta.shape[0] > 0, "delta", "at least one part", 0)
        else:
            _checks.match("delta", delta, tuple(x.shape), "x", x)
    total, normed = torch.ops.medusa_kernels.add_rms_norm.default(
        x, delta, weight, eps, delta_norm=delta_norm, norm_offset=norm_offset
    )
    return (x if delta is None else total), (total if weight is None else normed)


def _eager(x, delta, weight, eps, *, delta_norm=None, norm_offset=None):
    """Run the op in PyTorch on any device; without delta the sum is empty, and without weight the other result."""
    found = reference.add_rms_norm(x, delta, weight, eps, delta_norm=delta_norm, norm_offset=norm_offset)
    given = zip(found, (delta, weight), strict=True)
    return tuple(x.new_empty(0) if part is None else result.contiguous() for result, part in given)


register(
    add_rms_norm,
    # Without delta the op has no sum to return, and an output of an op must not be one of its inputs.
    lambda a: tuple(a.x.new_empty(0 if part is None else a.x.shape) for part in (a.delta, a.weight)),
    cpu=triton_or("add_rms_norm", "eager", _eager, "PyTorch, operation by operation"),
)
