"""Projections replaced in place by the values that 8 bits represent."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from medusa_decoding.training.loop.heads import fake_quant


class Largest(TorchDispatchMode):
    """Records the bytes of the largest new tensor, other than a given one."""

    def __init__(self, given):
        super().__init__()
        self.given, self.bytes = given.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() != self.given:
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return made


@pytest.mark.parametrize("storage", ["int8", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_of_a_row_equal_the_stored_ones(storage, dtype):
    given = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    projections = torch.nn.Parameter(given.clone())
    fake_quant(projections, storage, dtype)
    rows = given.to(dtype).float()
    largest = rows.abs().amax(-1, keepdim=True)
    if storage == "int8":
        expected = (rows * 127 / largest).round() * largest / 127
    else:
        expected = (rows * 448 / largest).to(torch.float8_e4m3fn).float() * largest / 448
    assert torch.allclose(projections, expected, rtol=1e-5)
    assert not torch.allclose(projections, rows, rtol=1e-5)


def test_no_second_copy_of_the_projections_is_made():
    projections = torch.randn(6, 40, 4)
    with Largest(projections) as largest:
        fake_quant(projections, "int8", torch.float32)
    assert 0 < largest.bytes <= projections.nbytes / 6
