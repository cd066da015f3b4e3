"""What every test relies on: threads under pytest-xdist, the GPU skip, a cache of its own, and setup.py as a module."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
# benchmarks/ and recipes/ are not installed. First, because tests/ has a folder of the same name as benchmarks/.
sys.path.insert(0, str(ROOT))

# tests/clients has an environment of its own: `make test-clients`. tests/emulator runs under its own plugin.
collect_ignore = ["clients", *([] if "emulator.plugin" in sys.modules else ["emulator"])]

# Several workers on few cores: one thread each. Read by OpenMP when torch is first imported, hence here.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device, and torch sees none")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep tests, and the programs that they start, from what `medusa tune` has stored for the user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def setup_script() -> ModuleType:
    """setup.py as a module; it builds only when it is the main program."""
    spec = importlib.util.spec_from_file_location("medusa_setup_script", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
