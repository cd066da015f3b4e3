"""Optimiser, learning rates, weight of the heads' loss, and stages of a run (Medusa paper, 2.2.2, B.2 to B.4).

In two-stage training (2.2.2, B.3) a first stage trains the heads alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import get_scheduler

from medusa_decoding.checks import import_library
from medusa_decoding.training.config import Config


def parameter_groups(
    heads: nn.Module, backbone: Iterable[tuple[str, nn.Parameter]] = (), *, config: Config
) -> list[dict[str, Any]]:
    """Return an optimiser's groups: the heads at `heads_factor` times the rate of the backbone (2.2.2, B.2).

    Only trainable parameters are in them. Biases and vectors do not decay.

    Returns:
        Dictionaries of `params`, `lr`, `weight_decay` and `name`, none of them empty.
    """
    rates = config.optimisation
    of_heads = [(name, p) for name, p in heads.named_parameters() if p.requires_grad]
    of_backbone = [(name, p) for name, p in backbone if p.requires_grad]
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
    return parameter.ndim < 2 or name.rpartition(".")[2] in ("bias", "b1")


def make_optimiser(groups: list[dict[str, Any]], config: Config) -> torch.optim.Optimizer:
    """Return AdamW over the groups, with its state in 32 or in 8 bits."""
    rates = config.optimisation
    options: dict[str, Any] = {"betas": (rates.beta_1, rates.beta_2), "eps": rates.epsilon}
    if rates.optimizer == "adamw":
        # torch's default makes ten passes over each weight: on a CPU a tenth of a small step with own projections.
        fused = all(weight.device.type in ("cpu", "cuda") for group in groups for weight in group["params"])
        return torch.optim.AdamW(groups, fused=fused or None, **options)
    for weight in (weight for group in groups for weight in group["params"]):
        if weight.numel() >= 2**31:
            raise ValueError(
                f"optimisation.optimizer: expected adamw for weights of {list(weight.shape)} (adamw_8bit counts in 32 "
                "bits; or make them smaller with heads.token_map_size or heads.shared_projection), got adamw_8bit"
            )
    library = import_library("bitsandbytes.optim.adamw", "optimisation.optimizer adamw_8bit", ", or use adamw")
    return library.AdamW8bit(groups, **options)


def learning_rates(
    optimizer: torch.optim.Optimizer, warmup_steps: int, total_steps: int, schedule: str = "cosine"
) -> torch.optim.lr_scheduler.LambdaLR:
    """Return the rates' schedule: up from 0 over `warmup_steps`, then half a wave down to 0 (B.2).

    Step s (from 0) has the factor s / warmup_steps until the warm-up ends. Let t be the share of the other steps that
    are done, (s - warmup_steps) / (total_steps - warmup_steps). Then "cosine" has the factor (1 + cos(pi t)) / 2,
    "linear" 1 - t and "constant" 1.
    """
    name = "constant_with_warmup" if schedule == "constant" else schedule
    return get_scheduler(name, optimizer, num_warmup_steps=warmup_steps, num_training_steps=total_steps)


def lambda_0(step: int, total_steps: int, value: float, schedule: str = "constant") -> float:
    """Return the weight of the heads' loss at a step (from 0) of a stage.

    "constant" (B.3): `value`. "sine" (B.4): value * sin(pi / 2 * (step + 1) / total_steps), a quarter wave whose last
    step has `value`. The paper says that the weight rises along a sine to its peak, and gives no formula.
    """
    return value * math.sin(math.pi / 2 * (step + 1) / total_steps) if schedule == "sine" else value


@dataclass(frozen=True)
class Stage:
    """A part of a run, "heads" or "joint", with an optimiser and schedules of its own.

    It `trains_backbone` (or its adapter), or the heads alone. Its first `warmup_steps` have a rising rate.
    """

    name: str
    steps: int
    trains_backbone: bool
    warmup_steps: int


def stages(config: Config, rows: int) -> list[Stage]:
    """Return the stages of a run in order (2.2.2): heads alone, then heads and backbone; one of them or both.

    The last, smaller batch of an epoch's rows counts as a step.
    """
    rates = config.optimisation
    steps_per_epoch = math.ceil(rows / rates.batch_size)
    parts = [("joint" if config.trains_backbone else "heads", rates.epochs, config.trains_backbone)]
    if rates.heads_first_epochs > 0:
        parts.insert(0, ("heads", rates.heads_first_epochs, False))
    found = []
    for name, epochs, trains_backbone in parts:
        steps = max(1, round(epochs * steps_per_epoch))
        steps = steps if rates.max_steps is None else min(steps, rates.max_steps)
        warmup = config.warmup_steps(steps)
        if steps <= warmup:
            raise ValueError(
                f"optimisation.warmup_steps: expected fewer than the {steps} steps of stage {name} ({rows} rows, batch "
                f"{rates.batch_size}, {epochs:g} epochs), or null for a share of them, got {warmup}"
            )
        found.append(Stage(name, steps, trains_backbone, warmup))
    return found


@dataclass
class Progress:
    """The point that a run has reached: number of the stage, steps done in this stage, and in the whole run.

    Also the tokens trained on, including padding, and the seconds spent in steps.
    """

    stage: int = 0
    step: int = 0
    done: int = 0
    tokens: int = 0
    seconds: float = 0.0
