"""What the benchmarks' own tests share."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def way_through(benchmark: Any) -> Any:
    """A benchmark of which only the way through is shown, with tiny shapes: its time says nothing."""
    benchmark.group = "the way through larger benchmarks, tiny shapes: no measurement"
    return benchmark
