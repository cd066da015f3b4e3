"""Verify: the model's own next token at every node (Medusa paper, section 2.1.3).

The generation's `TokenSelector` picks it (see `selection`). All selectors answer the same question, so acceptance does
not know which one was asked.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from medusa_decoding.decode.limits import Limits
from medusa_decoding.decode.state import DecodeState
from medusa_decoding.decode.tree_tensors import TreeShape


@dataclass(frozen=True)
class Nodes:
    """The tree after the model's forward pass.

    Attributes:
        hidden: [B, N, H] after the final norm.
        tokens: int64 [B, N], the nodes' tokens.
        shape: the tree's.
    """

    hidden: torch.Tensor
    tokens: torch.Tensor
    shape: TreeShape


class TokenSelector:
    """How the next token is picked at a node.

    Attributes:
        key: selectors with the same key run the same operations; captured and compiled steps are cached by it.
        makes_logits: whether it makes the logits of all nodes, which take memory.
    """

    key: Hashable
    makes_logits = True

    def __call__(self, nodes: Nodes, lm_head: nn.Module, state: DecodeState, limits: Limits) -> torch.Tensor:
        """Return int64 [B, N]: the next token at every node; any id at nodes that no path can reach.

        `state.check` [B] is set: not finite if the model's output is not.
        """
        raise NotImplementedError


class HostTokenSelector(TokenSelector):
    """A selector that reads device data on the host: a captured step is interrupted for it."""

    def walk(self, logits: torch.Tensor, nodes: Nodes, state: DecodeState) -> torch.Tensor:
        """Return what `__call__` does, from logits [B, N, V] that have been made already."""
        raise NotImplementedError


def refuse_broken(broken: Sequence[bool], finished: Sequence[bool], step: int | torch.Tensor) -> None:
    """Raise `FloatingPointError` if a row's output is not finite, unless the row had ended."""
    for row, (wrong, ended) in enumerate(zip(broken, finished, strict=True)):
        if wrong and not ended:
            raise FloatingPointError(
                f"model: expected finite logits, got NaN or infinity at step {int(step)} (0 is the prefill) "
                f"in row {row}"
            )


def allowed_logits(nodes: Nodes, lm_head: nn.Module, state: DecodeState, limits: Limits) -> torch.Tensor:
    """Return all logits [B, N, V], with EOS tokens that are still suppressed at -inf; sets `state.check`."""
    logits = lm_head(nodes.hidden)
    state.check.copy_(logits.amax((1, 2)))
    if limits.min_new_tensor is None:
        return logits
    too_early = state.count[:, None] + nodes.shape.depths < limits.min_new_tensor[:, None]
    # Not torch.isin: for more than some dozens of tokens it sorts, and reads a size on the host.
    ends = (torch.arange(logits.shape[-1], device=logits.device)[:, None] == limits.eos_tensor).any(-1)
    return logits.masked_fill(too_early[..., None] & ends, float("-inf"))
