"""The pytest plugin: `pytest -p emulator.plugin` runs tests of the ops on compiled kernels."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from emulator.machine import Emulator, Settings
from emulator.project import TARGETS, install

_emulators: list[Emulator] = []
_of_workers: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("emulator", "compiled kernels without a GPU")
    group.addoption("--sm", type=int, default=80, choices=TARGETS, help="target to compile for (default: 80)")
    group.addoption("--races", action="store_true", help="look for races; blocks and warps take turns at random")
    group.addoption("--seed", type=int, default=0, help="of the order of blocks, warps and copies (default: 0)")


def pytest_configure(config: pytest.Config) -> None:
    races = config.getoption("races")
    settings = Settings(sm=config.getoption("sm"), races=races, seed=config.getoption("seed"))
    if races:
        settings.order, settings.residents, settings.burst = 2, 3, 200
    _emulators.append(install(settings))
    # Test modules read these when they are imported: nothing is left out because of the interpreter.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "kernels"))
    import modes

    modes.NO_BF16 = pytest.mark.skipif(False, reason="")
    modes.DTYPES[:] = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="session")
def machine() -> Emulator:
    """The emulator of this run."""
    return _emulators[0]


def pytest_sessionfinish(session: pytest.Session) -> None:
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["emulator"] = _emulators[0].summary()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Keep what a worker of pytest-xdist ran."""
    _of_workers.append(getattr(node, "workeroutput", {}).get("emulator", ""))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what ran, and the findings."""
    terminalreporter.section("emulated kernels")
    for text in _of_workers or [_emulators[0].summary()]:
        terminalreporter.write_line(text)
