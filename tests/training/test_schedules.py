"""Learning rates and lambda_0 against their formulas, stages by counting, and contents of parameter groups."""

import math

import pytest
import torch
from torch import nn

from medusa_decoding import MedusaHeads
from medusa_decoding.training.config import Config
from medusa_decoding.training.loop.schedules import (
    Stage,
    lambda_0,
    learning_rates,
    make_optimiser,
    parameter_groups,
    stages,
)


def config(**sections):
    needed = {"model": {"name": "m"}, "data": {"train": [{"path": "d"}]}, "output": {"folder": "o"}}
    return Config.of(needed | sections)


@pytest.mark.parametrize(
    ("name", "after"),
    [
        ("cosine", [1 + math.cos(math.pi * s / 8) for s in range(9)]),
        ("linear", [2 * (8 - s) / 8 for s in range(9)]),
        ("constant", [2.0] * 9),
    ],
)
def test_learning_rates_with_warm_up(name, after):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    schedule = learning_rates(optimizer, 4, 12, name)
    rates = []
    for _ in range(12):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([2 * s / 4 for s in range(4)] + after, abs=1e-12)


def test_lambda_0_follows_its_formula():
    assert {lambda_0(step, 7, 0.2) for step in range(7)} == {0.2}
    rising = [lambda_0(step, 6, 0.01, "sine") for step in range(6)]
    # sin of 15, 30, 45, 60, 75 and 90 degrees.
    root2, root3, root6 = math.sqrt(2), math.sqrt(3), math.sqrt(6)
    sines = [(root6 - root2) / 4, 1 / 2, root2 / 2, root3 / 2, (root6 + root2) / 4, 1]
    assert rising == pytest.approx([0.01 * sine for sine in sines], rel=1e-14)


def test_steps_of_stages():
    # 3,000 rows in batches of 64 are 46.875 steps: 47.
    # A quarter of them is less than the paper's warm-up.
    assert stages(config(), 3000) == [Stage("heads", 94, False, 23)]
    assert stages(config(method="medusa-2"), 3000) == [Stage("heads", 94, False, 23), Stage("joint", 94, True, 23)]
    assert stages(config(method="medusa-2", heads={"initial": "h"}), 3000) == [Stage("joint", 94, True, 23)]
    assert stages(config(method="self-distillation"), 3000) == [Stage("joint", 48, True, 12)]
    changed = {"epochs": 0.5, "heads_first_epochs": 1, "max_steps": 30, "warmup_steps": 3}
    found = stages(config(method="medusa-2", optimisation=changed), 3000)
    assert found == [Stage("heads", 30, False, 3), Stage("joint", 24, True, 3)]


def test_a_stage_too_short_for_its_warm_up_is_named():
    message = (
        r"fewer than the 4 steps of stage heads \(100 rows, batch 64, 2 epochs\), or null for a share of them, got 40"
    )
    with pytest.raises(ValueError, match=message):
        stages(config(optimisation={"warmup_steps": 40}), 100)
    assert stages(config(), 100) == [Stage("heads", 4, False, 1)]


def test_heads_learn_four_times_as_fast_and_biases_do_not_decay():
    heads = MedusaHeads(4, 6, 2)
    backbone = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 6, bias=False))
    backbone[2].requires_grad_(False)
    settings = config(method="medusa-2", optimisation={"weight_decay": 0.1})
    groups = parameter_groups(heads, backbone.named_parameters(), config=settings)
    found = {group["name"]: group for group in groups}
    expected = {
        "heads, matrices": (2e-3, 0.1, [heads.w1, heads.w2]),
        "heads, vectors": (2e-3, 0.0, [heads.b1]),
        "backbone, matrices": (5e-4, 0.1, [backbone[0].weight]),
        "backbone, vectors": (5e-4, 0.0, [backbone[0].bias, backbone[1].weight, backbone[1].bias]),
    }
    assert list(found) == list(expected)
    for name, (rate, decay, members) in expected.items():
        assert found[name]["lr"] == pytest.approx(rate)
        assert found[name]["weight_decay"] == decay
        assert [id(p) for p in found[name]["params"]] == [id(p) for p in members]
    torch.optim.AdamW(groups)


def test_adamw_by_its_formula():
    weight = nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))
    settings = config(optimisation={"optimizer": "adamw", "beta_1": 0.8, "beta_2": 0.9})
    optimiser = make_optimiser([{"params": [weight], "lr": 0.1, "weight_decay": 0.05, "name": "w"}], settings)
    expected, mean, square = weight.detach().double(), torch.zeros(3), torch.zeros(3)
    for step, gradient in enumerate(([3.0, -1.0, 0.25], [-1.0, -1.0, 4.0]), start=1):
        weight.grad = torch.tensor(gradient)
        optimiser.step()
        mean, square = 0.8 * mean + 0.2 * weight.grad, 0.9 * square + 0.1 * weight.grad**2
        move = (mean / (1 - 0.8**step)) / ((square / (1 - 0.9**step)).sqrt() + 1e-8)
        expected = expected - 0.1 * (move + 0.05 * expected)
    torch.testing.assert_close(weight.detach().double(), expected, rtol=1e-6, atol=1e-6)


def test_groups_without_a_backbone():
    heads = MedusaHeads(4, 6, 2, bias=False)
    assert [group["name"] for group in parameter_groups(heads, config=config())] == ["heads, matrices"]
