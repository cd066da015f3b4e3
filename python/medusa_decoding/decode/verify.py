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
from medusa_decoding.linears.logits import logits_of, logits_projection
from medusa_kernels import gumbel_noise, tree_verify


@dataclass(frozen=True)
class Nodes:
    """The tree after the model's forward pass.

    Attributes:
        hidden: [B, N, H] after the final norm.
        tokens: int64 [B, N], the nodes' tokens.
        shape: the tree's.
        noise: fp32 [B, more than the tree's depth, V], what `TokenSelector.noise` returned for this step. Its row d
            belongs to the tokens after nodes of depth d.
    """

    hidden: torch.Tensor
    tokens: torch.Tensor
    shape: TreeShape
    noise: torch.Tensor | None = None


class TokenSelector:
    """How the next token is picked at a node.

    Attributes:
        key: selectors with the same key run the same operations; captured and compiled steps are cached by it.
        makes_logits: whether it makes the logits of all nodes, which take memory.
        draw_temperature: the temperature at which tokens are drawn, as far as the heads follow it; None if none are.
        temperatures: fp32 [B] if every row has its own temperature, 0 for the argmax. The noise is multiplied by them,
            and `draw_temperature` is 1: the argmax of logits + T * noise is that of logits / T + noise.
    """

    key: Hashable
    makes_logits = True
    draw_temperature: float | None = None
    temperatures: torch.Tensor | None = None

    def noise(self, state: DecodeState, places: int, vocabulary: int) -> torch.Tensor | None:
        """Return the random numbers of a step's tokens, or None if none are drawn.

        They depend on a row's seed, the place of a token among the new ones and its id only, so heads that draft for a
        place and the model, which draws there, add the same numbers.

        Args:
            state: before the step.
            places: of new tokens from `state.count` on.
            vocabulary: V.

        Returns:
            Standard Gumbel noise times the rows' own temperatures, if they have some: fp32 [B, places, V].
        """
        if self.draw_temperature is None:
            return None
        noise = gumbel_noise(state.seeds, state.count, places, vocabulary)
        return noise if self.temperatures is None else noise.mul_(self.temperatures[:, None, None])

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


def fused_tokens(
    nodes: Nodes, lm_head: nn.Module, state: DecodeState, limits: Limits, temperature: float = 0.0
) -> torch.Tensor | None:
    """Return the argmax at every node, or above temperature 0 its draw, by the op `tree_verify`: int64 [B, N].

    No logits are stored, or few at a time (see the op). Sets `state.check` by the hidden states. Returns None, without
    doing anything, if only the module `lm_head` itself can project or if EOS tokens may be suppressed.
    """
    projected, divisor, softcap = logits_projection(lm_head)
    if projected is None or limits.min_new_tensor is not None:
        return None
    torch.sum(nodes.hidden, (1, 2), dtype=torch.float32, out=state.check)
    return tree_verify(
        nodes.hidden, projected.weight, nodes.tokens, nodes.shape.parents,
        temperature=temperature, noise=nodes.noise, noise_rows=nodes.shape.depths, want_stats=False,
        weight_scale=projected.scale, weight_zero=projected.zero, codes=projected.codes, divisor=divisor,
        softcap=softcap,
    )[0]  # fmt: skip


def allowed_logits(nodes: Nodes, lm_head: nn.Module, state: DecodeState, limits: Limits) -> torch.Tensor:
    """Return all logits [B, N, V], with EOS tokens that are still suppressed at -inf; sets `state.check`."""
    logits = logits_of(lm_head, nodes.hidden)
    state.check.copy_(logits.amax((1, 2)))
    if limits.min_new_tensor is None:
        return logits
    too_early = state.count[:, None] + nodes.shape.depths < limits.min_new_tensor[:, None]
    # Not torch.isin: for more than some dozens of tokens it sorts, and reads a size on the host.
    ends = (torch.arange(logits.shape[-1], device=logits.device)[:, None] == limits.eos_tensor).any(-1)
    return logits.masked_fill(too_early[..., None] & ends, float("-inf"))
