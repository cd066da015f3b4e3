"""Token selection of a batch whose rows belong to several callers, each with settings of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers.generation import logits_process as lp

from medusa_decoding.decode.limits import Limits
from medusa_decoding.decode.selection.greedy import Greedy
from medusa_decoding.decode.selection.processors import HostRow, LogitsProcessors
from medusa_decoding.decode.selection.sampling import Sampling, follow
from medusa_decoding.decode.state import DecodeState
from medusa_decoding.decode.verify import Nodes, TokenSelector, allowed_logits, fused_tokens


class RowTemperatures(TokenSelector):
    """Draws each row at a temperature of its own, or takes its argmax; by one op where logits are not needed.

    Args:
        temperatures: fp32 [B], on the model's device; 0 for the argmax. Captured steps read this very tensor.
    """

    key = "row temperatures"
    makes_logits = False
    draw_temperature = 1.0

    def __init__(self, temperatures: torch.Tensor) -> None:
        self.temperatures = temperatures

    def __call__(self, nodes: Nodes, lm_head: nn.Module, state: DecodeState, limits: Limits) -> torch.Tensor:
        """Return the token after every node, [B, N]."""
        drawn = fused_tokens(nodes, lm_head, state, limits, 1.0)
        if drawn is not None:
            return drawn
        logits, noise = allowed_logits(nodes, lm_head, state, limits).float(), nodes.noise
        assert noise is not None, "a step that draws makes its noise first"
        rows = torch.arange(len(logits), device=logits.device)
        return follow(nodes.tokens, nodes.shape, lambda depth, node: (logits[rows, node] + noise[:, depth]).argmax(-1))


def temperature_of_row(selector: TokenSelector) -> float:
    """Return what `RowTemperatures` needs to know of a row's own selector: its temperature, 0 for the argmax."""
    return selector.draw_temperature or 0.0


def common_selector(selectors: Sequence[TokenSelector], temperatures: torch.Tensor) -> TokenSelector | None:
    """Return one selector on the device under which every row gets the tokens of its own; None if the host selects.

    That is one of the rows' own if all have equal settings, or `RowTemperatures` if they differ in nothing else.

    Args:
        selectors: each row's own. Those of typical acceptance are all alike.
        temperatures: fp32 [at least B], `temperature_of_row` of each.
    """
    first = selectors[0]
    if any(isinstance(selector, LogitsProcessors) for selector in selectors):
        return None
    if all(selector.key == first.key for selector in selectors):
        return first
    return RowTemperatures(temperatures) if all(map(_only_temperature, selectors)) else None


def _only_temperature(selector: TokenSelector) -> bool:
    if not isinstance(selector, Sampling):
        return isinstance(selector, Greedy)
    plain = all(type(processor) is lp.TemperatureLogitsWarper for processor in selector.processors)
    return plain and selector.draw_temperature is not None and not selector.makes_logits


def host_row(selector: TokenSelector, text: torch.Tensor, prompt: int, budget: int, ends: frozenset[int]) -> HostRow:
    """Return what `LogitsProcessors.of_rows` takes for a row whose own selector runs on the device.

    `text` is int64 [T], prompt and tokens so far; `prompt` counts the prompt's.
    """
    processors = selector.processors if isinstance(selector, Sampling) else []
    return HostRow(text, prompt, len(text), processors, budget, ends, selector.draw_temperature is not None)
