"""How learning rates and the weight of the heads' loss move over a run (Medusa paper, sections 2.2.2, B.2 to B.4).

The rates follow transformers' own schedules with linear warm-up, the cosine unless said otherwise (B.2); the heads
have several times the backbone's (B.2: four). lambda_0, the weight of the heads' loss in equation 2, is constant (B.3)
or rises to its value along a sine (B.4); in two-stage training (2.2.2, B.3) a first stage trains the heads alone. This
module knows counts of steps; it does not know data or losses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from medusa_decoding.training.config import Config


def learning_rates(
    optimizer: torch.optim.Optimizer, warmup_steps: int, total_steps: int, schedule: str = "cosine"
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return the rates' schedule: up from 0 over `warmup_steps`, then half a wave down to 0 (B.2).

    Step s (from 0) has the factor s / warmup_steps before the end of the warm-up. With t the share of the steps behind
    it, (s - warmup_steps) / (total_steps - warmup_steps), "cosine" then has (1 + cos(pi t)) / 2, "linear" 1 - t,
    "constant" 1.

    Raises:
        ValueError: no step after the warm-up, or another schedule.
    """
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(f"warmup_steps: expected from 0 to below the {total_steps} steps in all, got {warmup_steps}")
    rates: torch.optim.lr_scheduler.LambdaLR
    if schedule == "cosine":
        rates = get_cosine_schedule_with_warmup(optimizer, warmup_steps, total_steps)
    elif schedule == "linear":
        rates = get_linear_schedule_with_warmup(optimizer, warmup_steps, total_steps)
    elif schedule == "constant":
        rates = get_constant_schedule_with_warmup(optimizer, warmup_steps)
    else:
        raise ValueError(f"schedule: expected 'cosine', 'linear' or 'constant', got {schedule!r}")
    return rates


def lambda_0(step: int, total_steps: int, value: float, schedule: str = "constant") -> float:
    """Return the weight of the heads' loss at a step (from 0) of a stage.

    "constant" (B.3): `value`. "sine" (B.4, which has the weight rise along a sine to its peak at the end of training
    and gives no formula): value * sin(pi / 2 * (step + 1) / total_steps), a quarter wave whose last step has `value`.

    Raises:
        ValueError: another schedule, or a step outside the stage.
    """
    if not 0 <= step < total_steps:
        raise ValueError(f"step: expected from 0 to below {total_steps}, got {step}")
    if schedule == "constant":
        return value
    if schedule == "sine":
        return value * math.sin(math.pi / 2 * (step + 1) / total_steps)
    raise ValueError(f"schedule: expected 'constant' or 'sine', got {schedule!r}")


@dataclass(frozen=True)
class Stage:
    """A part of a run with an optimizer and schedules of its own.

    Attributes:
        name: "heads" or "joint".
        steps: optimizer steps.
        trains_backbone: whether the backbone (its adapter) is trained too.
    """

    name: str
    steps: int
    trains_backbone: bool


def stages(config: Config, rows: int) -> list[Stage]:
    """Return the stages of a run in order (2.2.2): heads alone, then heads and backbone; one of them or both.

    Args:
        config: of the run.
        rows: of the training data; the last, smaller batch of an epoch counts as a step.

    Raises:
        ValueError: a stage with fewer steps than its warm-up needs.
    """
    rates = config.optimisation
    an_epoch = -(-rows // rates.batch_size)
    parts = [("joint", rates.epochs, True)] if config.trains_backbone else [("heads", rates.epochs, False)]
    if rates.heads_first_epochs > 0:
        parts.insert(0, ("heads", rates.heads_first_epochs, False))
    found = []
    for name, epochs, trains_backbone in parts:
        steps = max(1, round(epochs * an_epoch))
        steps = steps if rates.max_steps is None else min(steps, rates.max_steps)
        if steps <= rates.warmup_steps:
            raise ValueError(
                f"optimisation.warmup_steps: expected fewer than the {steps} steps of stage {name} "
                f"({rows} rows, batch {rates.batch_size}, {epochs:g} epochs), got {rates.warmup_steps}"
            )
        found.append(Stage(name, steps, trains_backbone))
    return found


def parameter_groups(
    heads: nn.Module, backbone: Iterable[tuple[str, nn.Parameter]] = (), *, config: Config
) -> list[dict[str, Any]]:
    """Return an optimizer's groups: the heads at `heads_factor` times the rate of the backbone (2.2.2, B.2).

    Args:
        heads: their trainable parameters.
        backbone: (name, parameter) of the backbone or its adapter; those that are not trainable are left out.
        config: for rates and weight decay. Biases and vectors do not decay.

    Returns:
        Dictionaries of `params`, `lr`, `weight_decay` and `name`, none of them empty.

    Raises:
        ValueError: nothing to train, or a parameter in both.
    """
    rates = config.optimisation
    of_heads = [(name, p) for name, p in heads.named_parameters() if p.requires_grad]
    of_backbone = [(name, p) for name, p in backbone if p.requires_grad]
    if not of_heads and not of_backbone:
        raise ValueError("heads: expected parameters that require a gradient, got none")
    if {id(p) for _, p in of_heads} & {id(p) for _, p in of_backbone}:
        raise ValueError("backbone: expected parameters that are not the heads', got some of theirs")
    found = []
    for group, named, rate in (
        ("heads", of_heads, rates.learning_rate * rates.heads_factor),
        ("backbone", of_backbone, rates.learning_rate),
    ):
        for kind, decay in (("matrices", rates.weight_decay), ("vectors", 0.0)):
            chosen = [p for name, p in named if _is_vector(name, p) == (kind == "vectors")]
            if chosen:
                found.append({"params": chosen, "lr": rate, "weight_decay": decay, "name": f"{group}, {kind}"})
    return found


def _is_vector(name: str, parameter: nn.Parameter) -> bool:
    # The heads' biases are packed: b1 has more than one axis.
    last = name.rpartition(".")[2]
    return parameter.ndim < 2 or last in ("bias", "b1")
