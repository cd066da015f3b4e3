"""Write records of tests to a scratch folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu, harness


class Results:
    """The folder of a test's records."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for path in sorted(self.folder.glob("*.jsonl")) for line in path.open()]


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Results:
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    return Results(tmp_path / "results")


@pytest.fixture(autouse=True)
def _small_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of inputs are made against a cache of 2 KiB, so that tests stay small."""
    monkeypatch.setattr(gpu, "HOST_CACHE", 2**11)
