"""The optimiser and its groups: heads learn at several times the backbone's rate (Medusa paper, 2.2.2 and B.2)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from medusa_decoding.checks import import_library
from medusa_decoding.training.config import Config


def parameter_groups(
    heads: nn.Module, backbone: Iterable[tuple[str, nn.Parameter]] = (), *, config: Config
) -> list[dict[str, Any]]:
    """Return an optimiser's groups: the heads at `heads_factor` times the rate of the backbone (2.2.2, B.2).

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
    return parameter.ndim < 2 or name.rpartition(".")[2] in ("bias", "b1")


def make_optimiser(groups: list[dict[str, Any]], config: Config) -> torch.optim.Optimizer:
    """Return AdamW over the groups, with its state in 32 or in 8 bits.

    Raises:
        ValueError: a weight that is too large for adamw_8bit.
        ModuleNotFoundError: bitsandbytes is missing.
    """
    rates = config.optimisation
    options: dict[str, Any] = {"betas": (rates.beta_1, rates.beta_2), "eps": rates.epsilon}
    if rates.optimizer == "adamw":
        return torch.optim.AdamW(groups, **options)
    for weight in (weight for group in groups for weight in group["params"]):
        if weight.numel() >= 2**31:
            raise ValueError(
                f"optimisation.optimizer: expected adamw for weights of {list(weight.shape)} (adamw_8bit counts in 32 "
                "bits; or make them smaller with heads.token_map_size or heads.shared_projection), got adamw_8bit"
            )
    library = import_library("bitsandbytes.optim.adamw", "optimisation.optimizer adamw_8bit", ", or use adamw")
    found: torch.optim.Optimizer = library.AdamW8bit(groups, **options)
    return found
