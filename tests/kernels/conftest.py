"""Devices and tolerances shared by the tests of the ops: the same tests run on a CPU and, if there is one, a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

NO_GPU = "needs a CUDA device"

settings.register_profile("kernels", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("kernels")


@pytest.fixture(
    scope="session",
    params=[
        "cpu",
        pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)]),
    ],
)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _one_seed() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        yield


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """Memory that an op allocates is NaN, or the largest integer, until the op writes it."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
