"""The error budget of a result: at most twice the error of PyTorch in the same precision."""

from __future__ import annotations

import torch
from torch import Tensor


def allowed(same_precision: Tensor, exact: Tensor, largest: float | None = None) -> float:
    """Twice the largest error of a plain PyTorch computation against fp64.

    One rounding of the largest value (of the result, or of the `largest` number it is made from: for a dot product the
    sum of the absolute products) is always allowed: on a few numbers the plain computation may be exact by chance.
    """
    assert exact.dtype == torch.float64
    plain = (same_precision.double() - exact.to(same_precision.device)).abs().max().item()
    largest = exact.abs().max().item() if largest is None else largest
    return max(2 * plain, torch.finfo(same_precision.dtype).eps * largest)


def assert_within_twice(got: Tensor, same_precision: Tensor, exact: Tensor, largest: float | None = None) -> None:
    """Check that the error of `got` is within `allowed`; NaN never is."""
    assert got.shape == exact.shape
    error = (got.double() - exact.to(got.device)).abs().max().item()
    limit = allowed(same_precision, exact, largest)
    assert error <= limit, f"error {error:.3e}, allowed {limit:.3e}"


def assert_typical_error_within_twice(got: Tensor, same_precision: Tensor, exact: Tensor) -> None:
    """Root mean square errors instead of the largest ones, which on a few numbers depend on chance."""
    assert got.shape == exact.shape
    error, plain = ((t.double().cpu() - exact.cpu()).square().mean().sqrt().item() for t in (got, same_precision))
    granted = torch.finfo(got.dtype).eps / 2 * exact.abs().max().item()
    assert error <= max(2 * plain, granted), f"error {error:.3e}, PyTorch's {plain:.3e}"
