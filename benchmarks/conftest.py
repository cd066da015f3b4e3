"""How `pytest benchmarks/ --benchmark-only` shows its tables: one for each op, its ways beside each other."""

from __future__ import annotations

from typing import Any

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Show medians, with ratios to the fastest way, unless the command line asks for other columns."""
    if not config.getoption("benchmark_columns", True):
        config.option.benchmark_columns = ["median", "iqr", "rounds"]


@pytest.fixture
def way_through(benchmark: Any) -> Any:
    """A benchmark of which only the way through is shown, with tiny shapes: its time says nothing."""
    benchmark.group = "the way through larger benchmarks, tiny shapes: no measurement"
    return benchmark
