"""How far a candidate's result may be from the chosen configuration's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks import tune_kernels


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        (torch.full((4,), 1.0), torch.full((4,), 1.01), 1.0),
        ((torch.tensor([1.0]), torch.tensor([5])), (torch.tensor([1.0]), torch.tensor([6])), 0.0),
        ((torch.tensor([1, 2, 3, 4]), torch.empty(0)), (torch.tensor([1, 2, 3, 5]), torch.empty(0)), 2.5),
    ],
)
def test_difference(one: Any, other: Any, apart: float) -> None:
    assert tune_kernels.difference(one, other) == pytest.approx(apart, rel=0.02)
    assert not tune_kernels.difference(torch.tensor([float("nan")]), torch.tensor([1.0])) <= 1
