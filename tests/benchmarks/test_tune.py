"""The tuner on a kernel of two stages that cost what their configurations say; one of the candidates is wrong."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch

from benchmarks import gpu, kernel_candidates, suite, tune_kernels

CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Config:
    work: int
    added: float = 0.0


@dataclasses.dataclass(frozen=True)
class Case:
    size: int

    def shapes(self) -> dict[str, Any]:
        return {"size": self.size}

    def bytes(self, element: int) -> int:
        return self.size * element


def two_stages() -> types.ModuleType:
    module = types.ModuleType("two_stages")
    module.done = 0  # type: ignore[attr-defined]
    module.configuration = lambda stage, size: Config(3)  # type: ignore[attr-defined]

    def call(case: Case, x: torch.Tensor) -> torch.Tensor:
        for stage in ("first", "second"):
            config = module.configuration(stage, size=case.size)
            if config.work < 0:
                raise ValueError("cannot be compiled")
            module.done += config.work  # type: ignore[attr-defined]
            x = x + config.added
        return x

    module.call = call  # type: ignore[attr-defined]
    module.inputs = lambda case, run: torch.arange(1.0, case.size + 1)  # type: ignore[attr-defined]
    return module


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> tune_kernels.Search:
    module = two_stages()

    def candidates(stage: str, size: int) -> list[Config]:
        added = 5.0 if stage == "second" else 0.0
        return [module.configuration(stage, size), Config(1), Config(1, added), Config(-1)]

    monkeypatch.setitem(kernel_candidates.CANDIDATES, "two_stages", candidates)

    def units_of_work(make_call: Any, sets: int, device: torch.device, seconds: float) -> gpu.Timing:
        before = module.done
        make_call(sets - 1)()
        us = float(module.done - before)
        return gpu.Timing(us, us, us, captured=True, calls=1, replays=1, sets=sets)

    monkeypatch.setattr(gpu, "cold_replay", units_of_work)
    problem = tune_kernels.Problem(module, module.call, [Case(7)], lambda case: None)
    return tune_kernels.Search("two", problem, module, suite.Run("two", CPU, dtype=torch.float32, seconds=0.01))


def test_each_stage_is_tuned_while_the_other_keeps_its_choice(search: tune_kernels.Search) -> None:
    before = search.module.configuration
    first, second = search.time_case(Case(7))
    assert (first["arguments"], second["arguments"]) == (
        {"stage": "first", "size": "7"},
        {"stage": "second", "size": "7"},
    )
    assert [row["config"]["work"] for row in first["rows"]] == [1, 1, 3, -1]
    # One stage at its candidate's cost, the other at 3.
    assert [row.get("median_us") for row in first["rows"]] == [4, 4, 6, None]
    assert [row["chosen"] for row in first["rows"]] == [False, False, True, False]
    errors = {(row["config"]["work"], row["config"]["added"]): row.get("error", "") for row in second["rows"]}
    assert errors[1, 5.0].startswith("wrong")
    assert "cannot be compiled" in errors[-1, 0.0]
    assert errors[1, 0.0] == errors[3, 0.0] == ""
    assert search.module.configuration is before


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
