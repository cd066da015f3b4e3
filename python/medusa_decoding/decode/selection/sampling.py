"""Lossless sampling on a tree: the model's own draws are followed down the tree.

The token after a node is drawn from the model's processed distribution there, and the child with that token, if any, is
visited next. A draw is the argmax of the processed scores plus independent Gumbel noise (the Gumbel-max trick). The
noise belongs to a row's seed, a place in its text and a token: with one seed every tree, plain decoding included,
writes the same text (up to rounding). Heads rank their candidates with the same noise, so they often guess the draw
itself (Daliri et al. 2024, "Coupling without communication and drafter-invariant speculative decoding",
arXiv:2408.07978). What they propose decides only how many tokens a step accepts, so nothing needs correcting.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import nn
from transformers.generation import logits_process as lp

from medusa_decoding.decode.limits import Limits
from medusa_decoding.decode.state import DecodeState
from medusa_decoding.decode.tree_tensors import TreeShape
from medusa_decoding.decode.verify import Nodes, TokenSelector, allowed_logits, fused_tokens
from medusa_kernels import draw_tokens, served_by

# transformers' processors that need only the scores and read nothing on the host: they run on the device, within a
# captured step. All others get each node's own prefix (see `processors`).
CONTEXT_FREE = (
    lp.TemperatureLogitsWarper,
    lp.TopKLogitsWarper,
    lp.TopPLogitsWarper,
    lp.MinPLogitsWarper,
    lp.TypicalLogitsWarper,
    lp.EpsilonLogitsWarper,
    lp.LogitNormalization,
)

DRAW_AT_ONCE = True
"""Whether a GPU draws at all nodes in one launch (`draw_tokens`) where its settings allow. Otherwise it runs the
processors at each depth in turn, and top-p sorts the vocabulary there."""

COLDEST, HOTTEST = 1e-4, 1e4
"""The temperatures that heads and `tree_verify` are given. Colder, scores may overflow and have to be checked; hotter,
all tokens are equally likely."""
FEW_TOKENS = 2**12
"""Vocabulary up to which sorting is faster than buckets of probabilities."""


class Nucleus(lp.TopPLogitsWarper):
    """transformers' top-p without sorting the vocabulary on a CPU, where sorting 128,256 scores takes tens of ms.

    It keeps the same tokens: of equally probable ones at the edge, those with the highest ids, as a stable sort does.
    Only a token within rounding of the edge may differ, because sums are exact here. On CUDA the scores are sorted,
    which takes less time there than the launches of this selection; see `at_once` for what avoids both.
    """

    def __call__(self, input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
        """Return fp32 scores [R, V], those outside of the nucleus -inf."""
        if scores.is_cuda or scores.dtype != torch.float32:  # a processor of the caller's may return others
            return super().__call__(input_ids, scores)
        # NaN, which `check` reports, must not become an index.
        probabilities = scores.softmax(-1).nan_to_num()
        # As integers their sum is exact in any order; it is below 2^63, and fp32 holds each product exactly.
        mass = (probabilities * 2.0**62).long()
        limit = mass.sum(-1, keepdim=True).sub(1).clamp(max=int((1 - self.top_p) * 2.0**62))  # the most likely stays
        bits = probabilities.view(torch.int32)  # of non-negative numbers: in the order of the numbers
        if scores.shape[-1] <= FEW_TOKENS:
            order = bits.argsort(stable=True)
            removed = torch.zeros_like(bits, dtype=torch.bool)
            removed.scatter_(-1, order, mass.gather(-1, order).cumsum(-1) <= limit)
            return scores.masked_fill(removed, self.filter_value)
        # The edge is found 15 bits at a time.
        high = bits >> 15
        edge, below = _bucket(high, mass, limit)
        at_edge = high == edge
        low_edge, more = _bucket(torch.where(at_edge, bits & 0x7FFF, 0), torch.where(at_edge, mass, 0), limit - below)
        edge, below = (edge << 15) | low_edge, below + more
        equal = bits == edge
        removed = (bits < edge) | (equal & (torch.where(equal, mass, 0).cumsum(-1) <= limit - below))
        return scores.masked_fill(removed, self.filter_value)


def _bucket(buckets: torch.Tensor, mass: torch.Tensor, limit: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first bucket up to which more than the limit lies, and what lies before it: both int64 [R, 1]."""
    held = mass.new_zeros(len(mass), 2**15).scatter_add_(1, buckets.long(), mass).cumsum(1)
    before = held <= limit
    return before.sum(1, keepdim=True), torch.where(before, held, 0).amax(1, keepdim=True)


def without_sorting(processor: Any) -> Any:
    """Return `Nucleus` for transformers' own top-p with one token to keep; any other processor as it is."""
    if type(processor) is not lp.TopPLogitsWarper:
        return processor
    if processor.min_tokens_to_keep != 1 or processor.filter_value != -math.inf:
        return processor
    return Nucleus(processor.top_p)


def at_once(processors: Sequence[Any]) -> dict[str, Any] | None:
    """Return the settings of `draw_tokens` that do what the processors do, None if there are none.

    They exist for transformers' own temperature, top-k, top-p and min-p, each at most once and in this order, which is
    that of transformers' `generate`.
    """
    settings: dict[str, Any] = {}
    names = {
        lp.TemperatureLogitsWarper: "temperature", lp.TopKLogitsWarper: "top_k", lp.TopPLogitsWarper: "top_p",
        lp.MinPLogitsWarper: "min_p",
    }  # fmt: skip
    for processor in processors:
        while names and type(processor) is not next(iter(names)):
            del names[next(iter(names))]
        filled, keeps = (getattr(processor, name, None) for name in ("filter_value", "min_tokens_to_keep"))
        if not names or filled not in (None, -math.inf) or keeps not in (None, 1):
            return None
        name = names.pop(type(processor))
        settings[name] = getattr(processor, name)
    return settings


def temperature_of(processors: Sequence[Any]) -> float:
    """Return the temperature of some processors, 1.0 if none of them sets it."""
    return math.prod(one.temperature for one in processors if type(one) is lp.TemperatureLogitsWarper)


def draw_temperature(temperature: float) -> float:
    """Return the temperature that heads are given if tokens are drawn at `temperature`, above 0."""
    return min(max(temperature, COLDEST), HOTTEST)


def follow(tokens: torch.Tensor, shape: TreeShape, choose: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Walk down the tree along the model's own tokens, all rows at once and on the device.

    Args:
        tokens: int64 [B, N], the nodes' tokens.
        shape: the tree's.
        choose: (depth, node int64 [B]) -> the model's token int64 [B] after these nodes. Nodes with the same
            token after the same prefix are asked for once.

    Returns:
        int64 [B, N]: the token after every visited node, 0 after the others, which no path reaches.
    """
    batch, nodes = tokens.shape
    next_tokens = torch.zeros_like(tokens)
    visited = (shape.depths == 0).expand(batch, nodes)
    for depth in range(shape.depth + 1):
        # The first visited node; in rows that have left the tree any node, whose token is not used.
        token = choose(depth, visited.int().argmax(1))
        next_tokens = torch.where(visited, token[:, None], next_tokens)
        visited = shape.at_parents(visited) & (tokens == token[:, None]) & (shape.depths == depth + 1)
    return next_tokens


class Sampling(TokenSelector):
    """Draws on the device from the distribution that context-free processors leave.

    With nothing but a temperature and plain weights, one op draws at all nodes and stores no logits. Otherwise a GPU
    draws at all nodes from the logits, in one launch if it can (see `at_once`). In all other cases the processors run
    and tokens are drawn at the visited nodes alone.

    Args:
        processors: instances of `CONTEXT_FREE`, in order.
        sample: False takes the argmax of the processed scores.
    """

    def __init__(self, processors: Sequence[Any], sample: bool = True) -> None:
        self.processors = [without_sorting(processor) for processor in processors]
        self.at_once = at_once(processors) if sample and DRAW_AT_ONCE else None
        settings = (settings_of(processor) for processor in self.processors)
        self.key = ("sampled", sample, self.at_once is not None, *settings)
        temperature = temperature_of(processors)
        self.draw_temperature = draw_temperature(temperature) if sample else None
        others = any(type(processor) is not lp.TemperatureLogitsWarper for processor in processors)
        self.makes_logits = others or temperature != self.draw_temperature

    def __call__(self, nodes: Nodes, lm_head: nn.Module, state: DecodeState, limits: Limits) -> torch.Tensor:
        """Return the drawn token after every node that a path can reach, [B, N].

        `state.check` is set: not finite if the model's output, or made logits and the scores to draw from, are not.
        """
        if not self.makes_logits and self.draw_temperature is not None:
            drawn = fused_tokens(nodes, lm_head, state, limits, self.draw_temperature)
            if drawn is not None:
                return drawn
        logits = allowed_logits(nodes, lm_head, state, limits)
        if self.at_once is not None and served_by("draw_tokens", logits.device).name == "triton":
            assert nodes.noise is not None, "a step that draws makes its noise first"
            tokens, best = draw_tokens(logits, nodes.noise, nodes.shape.depths, **self.at_once)
            # As below; at every node, which is as good: the temperature is the same.
            state.check.add_((0.0 * best).sum(1))
            return tokens
        rows = torch.arange(len(logits), device=logits.device)

        def choose(depth: int, node: torch.Tensor) -> torch.Tensor:
            scores = logits[rows, node].float()
            for processor in self.processors:
                scores = processor(None, scores)
            if self.draw_temperature is None:
                return scores.argmax(-1)
            assert nodes.noise is not None, "a step that draws makes its noise first"
            # Nothing can be drawn from infinity (a tiny temperature), or if no token is left: 0 times it is NaN.
            state.check.add_(0.0 * scores.amax(-1))
            return (scores + nodes.noise[:, depth]).argmax(-1)

        return follow(nodes.tokens, nodes.shape, choose)


def settings_of(processor: Any) -> Hashable:
    """Return what makes processors alike: the type, and the attributes with tensors as tuples."""
    values = ((name, _plain(value)) for name, value in sorted(vars(processor).items()))
    return type(processor).__name__, tuple(values)


def _plain(value: Any) -> Hashable:
    return tuple(value.flatten().tolist()) if isinstance(value, torch.Tensor) else value
