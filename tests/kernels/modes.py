"""What tests of the ops skip in Triton's interpreter (TRITON_INTERPRET=1 on CPU tensors), and why."""

from __future__ import annotations

import pytest
import torch

from medusa_kernels._registry import interpreted

NO_BF16 = pytest.mark.skipif(interpreted(), reason="the interpreter's bfloat16 dot is wrong")
"""For bf16 cases."""

DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=NO_BF16), torch.float16]
"""Parameters of every test over dtypes."""

reads_values = pytest.mark.skipif(interpreted(), reason="kernels do not read values on the host, so cannot refuse them")
"""For tests that a bad value (a length, an index) is refused, which only the CPU implementations do."""

of_the_cpu = pytest.mark.skipif(interpreted(), reason="tests the CPU implementation; Triton's interpreter serves here")
"""For tests of a CPU implementation's own ways."""

NOT_FINITE = ["nan", "-nan", "ones", "inf", "-inf"]
"""Parameters of tests with numbers that are none; "ones" is the NaN whose bits are all set."""


def not_finite(kind: str, dtype: torch.dtype) -> torch.Tensor:
    """Return the number of that name."""
    if kind == "ones":
        integers = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
        return torch.tensor(-1, dtype=integers).view(dtype)
    return torch.tensor(float(kind), dtype=dtype)
