"""Run a decoder's own forward and keep the states that heads read, of the last and of earlier layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def layer_states(decoder: Any, feature_layers: Sequence[int], **inputs: Any) -> torch.Tensor:
    """Return the states after a decoder's final norm, and after each of `feature_layers`: [B, T, (1 + F) H].

    Gradients reach all of them.
    """
    kept: dict[int, torch.Tensor] = {}

    def keep(number: int) -> Any:
        def hook(_: Any, given: tuple[Any, ...]) -> None:
            kept[number] = given[0]

        return hook

    handles = [decoder.layers[number].register_forward_pre_hook(keep(number)) for number in feature_layers]
    try:
        last = decoder(**inputs).last_hidden_state
    finally:
        for handle in handles:
            handle.remove()
    return torch.cat([last, *(kept[number] for number in feature_layers)], dim=-1) if handles else last
