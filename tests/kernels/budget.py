"""How far a result may be from the exact one: at most twice as far as PyTorch in the same precision."""

from __future__ import annotations

import torch
from torch import Tensor


def assert_within_twice(got: Tensor, same_precision: Tensor, exact: Tensor) -> None:
    """Compare the errors of `got` and of a plain PyTorch computation in its precision against an fp64 result.

    One rounding of the largest value is always granted: on a few numbers the plain computation may be exact by luck.
    """
    assert got.shape == exact.shape
    assert exact.dtype == torch.float64
    exact = exact.to(got.device)
    error = (got.double() - exact).abs().max().item()
    plain = (same_precision.double() - exact).abs().max().item()
    rounding = torch.finfo(same_precision.dtype).eps * exact.abs().max().item()
    assert error <= max(2 * plain, rounding), f"error {error:.3e}, of plain PyTorch {plain:.3e}"
