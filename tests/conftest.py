"""What every test relies on: threads under pytest-xdist, pairs of parameters, the GPU skip, an own cache, setup.py."""

from __future__ import annotations

import importlib.util
import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
# benchmarks/ and recipes/ are not installed. First, because tests/ has a folder of the same name as benchmarks/.
sys.path.insert(0, str(ROOT))

# tests/clients has an environment of its own: `make test-clients`. tests/emulator runs under its own plugin.
collect_ignore = ["clients", *([] if "emulator.plugin" in sys.modules else ["emulator"])]

# Nothing is fetched: without this, every name of a hub model costs 20 seconds where there is no network.
os.environ["HF_HUB_OFFLINE"] = "1"

# Several workers on few cores: one thread each. Read by OpenMP when torch is first imported, hence here.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--products", action="store_true", help="run every combination of parameters, not only enough for all pairs"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of each test's combinations of parameters keep enough that every two values meet. After -k and -m."""
    if config.getoption("--products"):
        return
    groups: dict[object, list[pytest.Item]] = {}
    for item in items:
        groups.setdefault(_alike(item), []).append(item)
    kept = {item for group in groups.values() for item in _pairs(group)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _alike(item: pytest.Item) -> object:
    """Return a key that a test's combinations share, unless some of them are skipped on this machine."""
    skipped = any(
        mark.name in ("gpu", "skip") or (mark.name == "skipif" and mark.args[0]) for mark in item.iter_markers()
    )
    values = item.callspec.params if hasattr(item, "callspec") else {}
    return item.nodeid.split("[")[0], skipped, values.get("isa")


def _pairs(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Choose items, most new pairs first, until all pairs of parameters' values that occur in `items` are covered."""
    if len(items) == 1:
        return [*items]
    left = {}
    for item in items:
        values = [(name, id(value)) for name, value in sorted(item.callspec.params.items())]  # type: ignore[attr-defined]
        left[item] = set(itertools.combinations(values, min(2, len(values))))
    chosen = []
    while left:
        best = max(left, key=lambda item: len(left[item]))
        covered = left.pop(best)
        chosen.append(best)
        left = {item: rest for item, pairs in left.items() if (rest := pairs - covered)}
    return chosen


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
