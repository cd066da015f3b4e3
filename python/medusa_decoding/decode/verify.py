"""Verify: the model's own next token at every node (Medusa paper, section 2.1.3).

How a token is chosen is the generation's choice: `Greedy` here, `sampling.Sampled`, `typical.Typical`, and
`processed.Processed` for logits processors that need to see a node's own prefix. All answer the same question, so that
acceptance never knows which of them was asked.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from medusa_decoding.heads import plain_weight
from medusa_kernels import tree_verify

if TYPE_CHECKING:
    from medusa_decoding.decode.arrange import Shape
    from medusa_decoding.decode.state import DecodeState, Rules


@dataclass(frozen=True)
class Nodes:
    """What a pass made of the tree: the input of verification.

    Attributes:
        hidden: [B, N, H] after the final norm.
        tokens: int64 [B, N], the nodes' tokens.
        shape: the tree's.
    """

    hidden: torch.Tensor
    tokens: torch.Tensor
    shape: Shape


class TokenSelector(Protocol):
    """How the model's next token is chosen at a node.

    Attributes:
        key: choices of one key run the same operations; captured and compiled steps are kept by it.
        on_host: whether it reads device data on the host, so that a captured step is interrupted for it.
    """

    @property
    def key(self) -> Hashable: ...  # noqa: D102

    @property
    def on_host(self) -> bool: ...  # noqa: D102

    def __call__(self, nodes: Nodes, lm_head: nn.Module, state: DecodeState, rules: Rules) -> torch.Tensor:
        """Return int64 [B, N]: the next token at every node; any id where no path can lead."""


def verify(nodes: Nodes, lm_head: nn.Module, state: DecodeState, rules: Rules) -> torch.Tensor:
    """Return the model's own next token at every node, int64 [B, N].

    Args:
        nodes: the tree after the pass.
        lm_head: the base model's.
        state: for the tokens emitted so far. `state.check` [B] is set: not finite where the model's output is not.
        rules: for the choice, EOS and `min_new`.
    """
    return rules.choice(nodes, lm_head, state, rules)


class Greedy:
    """The likeliest token. With plain weights the op `tree_verify` fuses projection and argmax: no logits are made."""

    key = "greedy"
    on_host = False

    def __call__(self, nodes: Nodes, lm_head: nn.Module, state: DecodeState, rules: Rules) -> torch.Tensor:
        """Return the argmax at every node, [B, N]."""
        weight = plain_weight(lm_head)
        if weight is None or rules.min_new is not None:
            return allowed_logits(nodes, lm_head, state, rules).argmax(-1)
        torch.sum(nodes.hidden, (1, 2), dtype=torch.float32, out=state.check)
        return tree_verify(nodes.hidden, weight, nodes.tokens, nodes.shape.parents, want_stats=False)[0]


def allowed_logits(nodes: Nodes, lm_head: nn.Module, state: DecodeState, rules: Rules) -> torch.Tensor:
    """Return all logits [B, N, V], with EOS tokens that may not be chosen yet at -inf; sets `state.check`."""
    logits = lm_head(nodes.hidden)
    state.check.copy_(logits.amax((1, 2)))
    if rules.min_new is None:
        return logits
    too_early = state.count[:, None] + nodes.shape.depths < rules.min_new[:, None]
    # Not torch.isin: behind some dozens of tokens it sorts, and reads a size on the host.
    ends = (torch.arange(logits.shape[-1], device=logits.device)[:, None] == rules.eos).any(-1)
    return logits.masked_fill(too_early[..., None] & ends, float("-inf"))
