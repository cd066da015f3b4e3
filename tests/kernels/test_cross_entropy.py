"""The internal cross_entropy against log-softmax in fp64, and ranks by their definition."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from modes import NO_BF16
from torch import Tensor

from medusa_kernels.cross_entropy import cross_entropy

NAN, INF = math.nan, math.inf


def drawn(vocabulary: int, device: str) -> tuple[Tensor, Tensor]:
    """Rows whose targets have probabilities from tiny to almost 1, two with many equal logits, one without a target."""
    logits = (torch.randn(6, vocabulary) * torch.tensor([0.03, 0.03, 5.0, 20.0, 3.0, 1.0])[:, None]).round(decimals=1)
    targets = torch.randint(0, vocabulary, (6,))
    largest = logits == logits.amax(1, keepdim=True)
    targets[0], targets[1] = largest[0].nonzero()[0], largest[1].nonzero()[-1]  # the first and the last of equal ones
    targets[4] = -100
    logits[5, targets[5]] = 30.0
    return logits.to(device), targets.to(device)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("vocabulary", [1, 7, 1000, 8192, 20_011])
@pytest.mark.parametrize("dtype", [None, pytest.param(torch.bfloat16, marks=NO_BF16), torch.float32])
@pytest.mark.parametrize("top", [0, 1, 3])
def test_matches_fp64(vocabulary: int, dtype: torch.dtype | None, top: int, device: str) -> None:
    logits, targets = drawn(vocabulary, device)
    found, ranks, gradient = cross_entropy(logits.clone(), targets, top, dtype)
    x = logits.double().requires_grad_()
    exact = F.cross_entropy(x, targets, reduction="none")
    (exact_gradient,) = torch.autograd.grad(exact.sum(), x)
    plain = F.cross_entropy(logits, targets, reduction="none")
    assert found.dtype == torch.float32
    assert found[4] == 0
    assert ((found - exact).abs() <= 2 * (plain - exact).abs().max() + 2**-23).all()
    assert (gradient is None) == (dtype is None)
    if gradient is not None:
        # As exact as PyTorch's softmax, or as an exponential of a difference in fp32; then `dtype` rounds.
        shares, below = x.detach().softmax(1), (logits.amax(1, keepdim=True) - logits).double()
        relative = ((logits.softmax(1) - shares).abs() / shares).where(shares > 2**-126, 0.0).amax(1, keepdim=True)
        allowed = shares * (2 * relative + (2 + below) * 2**-22)
        allowed += exact_gradient.abs() * torch.finfo(dtype).eps + 2**-126
        assert ((gradient - exact_gradient).abs() <= allowed).all()
        assert (gradient[4] == 0).all()
    if top:
        before = [
            vocabulary if t < 0 else sum(y > row[t] or (y == row[t] and place < t) for place, y in enumerate(row))
            for row, t in zip(logits.tolist(), targets.tolist(), strict=True)
        ]
        assert ranks.clamp(max=top).tolist() == [min(rank, top) for rank in before]


def test_what_is_not_finite(device: str) -> None:
    rows = [[NAN, 2.0, 1.0], [1.0, NAN, 0.0], [INF, 1.0, 0.0], [-INF, 3.0, -INF], [-INF] * 3, [NAN] * 3]
    targets = torch.tensor([1, 1, 0, 0, 2, -100], device=device)
    losses, ranks, gradient = cross_entropy(torch.tensor(rows, device=device), targets, 3, torch.float32)
    assert losses.isnan().tolist() == [True, True, True, False, True, False]
    assert losses[3] == INF
    assert ranks.tolist() == [1, 3, 0, 1, 2, 3]
    assert gradient is not None
    assert gradient[:5].isnan().all(1).tolist() == [True, True, True, False, True]
    assert gradient[3].tolist() == [-1.0, 1.0, 0.0]
