"""Token selection through any transformers logits processors, with each node's own prefix.

Processors are called as plain decoding would call them: once for each emitted token, in order. Only nodes on the path
of the model's own tokens are visited, so a processor with a memory (a grammar) sees one growing text; it needs a batch
of 1, because all rows share the caller's objects. If a stopping criterion ends a row within an accepted path (see
`runtime.streaming`), processors have been called for the rest of that path too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from medusa_decoding.decode.limits import Limits
from medusa_decoding.decode.selection import sampling
from medusa_decoding.decode.selection.sampling import draw_temperature, temperature_of, without_sorting
from medusa_decoding.decode.state import DecodeState, append_tokens
from medusa_decoding.decode.verify import HostTokenSelector, Nodes, refuse_broken
from medusa_decoding.linears.logits import logits_of
from medusa_kernels import draw_tokens, served_by

Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class HostRow:
    """One sequence and its processors.

    Attributes:
        text: int64 [at least length], prompt and tokens so far.
        prompt: tokens of the prompt.
        length: tokens so far.
        processors: called in order with (int64 [1, length], scores fp32 [1, V]).
        budget: new tokens it may get.
        ends: tokens that end it.
        samples: whether its tokens are drawn.
        top_logprobs: how many of the model's most likely tokens to keep with every emitted token; None for none.
        logprobs: at each emitted token, if kept: its log-probability in the model's own distribution, and the most
            likely tokens with theirs, best first.
        drawn_by: settings of `draw_tokens` that take the place of the last processors, which are not called then.
        error: what ended a row of a batch whose rows belong to several callers.
        logits: the model's logits fp32 [V] at each emitted token, if kept.
        scores: the processed scores fp32 [V] at each emitted token, if kept.
    """

    text: torch.Tensor
    prompt: int
    length: int
    processors: Sequence[Processor]
    budget: int
    ends: frozenset[int] = frozenset()
    samples: bool = False
    top_logprobs: int | None = None
    logprobs: list[tuple[float, list[tuple[int, float]]]] = field(default_factory=list)
    drawn_by: dict[str, Any] | None = None
    error: Exception | None = None
    logits: list[torch.Tensor] = field(default_factory=list)
    scores: list[torch.Tensor] = field(default_factory=list)


class LogitsProcessors(HostTokenSelector):
    """Follows each row's path on the host, through the row's own processors.

    Args:
        prompts: int64 [T_b] per row, on the model's device.
        processors: a sequence of processors per row.
        budgets: new tokens that each row may get.
        eos: tokens that end a row.
        sample: draw from the processed distribution; False takes its argmax.
        keep_logits: keep the model's logits of every emitted token.
        keep_scores: keep the processed scores of every emitted token.
        top_logprobs: see `HostRow`.

    Attributes:
        shared: whether the rows belong to several callers, so that an error ends only its own row.
    """

    shared = False

    def __init__(
        self,
        prompts: Sequence[torch.Tensor],
        processors: Sequence[Sequence[Processor]],
        budgets: Sequence[int],
        eos: Sequence[int],
        sample: bool = False,
        keep_logits: bool = False,
        keep_scores: bool = False,
        top_logprobs: int | None = None,
    ) -> None:
        self.rows = []
        for prompt, own, budget in zip(prompts, processors, budgets, strict=True):
            called, drawn_by = _divided(own, prompt.device) if sample and not keep_scores else (own, None)
            called = [without_sorting(processor) for processor in called]
            row = HostRow(prompt, len(prompt), len(prompt), called, budget, frozenset(eos), sample, top_logprobs)
            row.drawn_by = drawn_by
            self.rows.append(row)
        if sample:
            self.draw_temperature = draw_temperature(temperature_of(processors[0]))
        self.key = ("processed", self.draw_temperature)
        self.keep_logits, self.keep_scores = keep_logits, keep_scores

    @classmethod
    def of_rows(cls, rows: Sequence[HostRow], temperatures: torch.Tensor) -> LogitsProcessors:
        """Return the selector of a batch whose rows belong to several callers.

        Args:
            rows: of selectors of one row each, or of others; they go on here.
            temperatures: fp32 [B], see `TokenSelector`.
        """
        selector = cls([], [], [], [])
        selector.rows, selector.shared = list(rows), True
        if any(row.samples for row in rows):
            selector.draw_temperature, selector.temperatures = 1.0, temperatures
        selector.key = ("processed", selector.draw_temperature, "rows")
        return selector

    def __call__(self, nodes: Nodes, lm_head: nn.Module, state: DecodeState, limits: Limits) -> torch.Tensor:
        """Return the token after every visited node, [B, N]; 0 after the others, which no path reaches."""
        return self.walk(logits_of(lm_head, nodes.hidden), nodes, state)

    def walk(self, logits: torch.Tensor, nodes: Nodes, state: DecodeState) -> torch.Tensor:
        """Follow every row that has not ended: logits [B, N, V] -> next tokens int64 [B, N]."""
        state.check.copy_(logits.amax((1, 2)))
        tokens, finished = nodes.tokens.cpu(), state.finished.tolist()
        next_tokens = torch.zeros_like(tokens)
        # What the loop would raise after this step: processors must not see logits that are not finite.
        broken = [not math.isfinite(value) for value in state.check.tolist()]
        if not self.shared:
            refuse_broken(broken, finished, state.step)
        trees = nodes.shape.children()
        temperatures = None if self.temperatures is None else self.temperatures.tolist()
        for index, row in enumerate(self.rows):
            if finished[index] or (self.shared and broken[index]):
                continue
            noise = nodes.noise[index] if nodes.noise is not None and row.samples else None
            if noise is not None and temperatures is not None:
                noise = noise / temperatures[index]
            try:
                self._walk(row, logits[index], noise, tokens[index], trees[index % len(trees)], next_tokens[index])
            except Exception as error:
                if not self.shared:
                    raise
                row.error = error
        return next_tokens.to(logits.device)

    def _walk(
        self,
        row: HostRow,
        logits: torch.Tensor,
        noise: torch.Tensor | None,
        tokens: torch.Tensor,
        children: list[list[int]],
        next_tokens: torch.Tensor,
    ) -> None:
        """Follow one row down the tree: logits [N, V], noise [more than the depth, V], tokens and next_tokens [N]."""
        visited, depth = [0], 0
        while visited and not self._ended(row):
            token = self._next(row, logits[visited[0]], None if noise is None else noise[depth])
            next_tokens[visited] = token
            below = [child for node in visited for child in children[node]]
            visited = [child for child in below if int(tokens[child]) == token]
            depth += 1

    def _ended(self, row: HostRow) -> bool:
        new = row.length - row.prompt
        return new >= row.budget or (new > 0 and int(row.text[row.length - 1]) in row.ends)

    def _next(self, row: HostRow, logits: torch.Tensor, noise: torch.Tensor | None) -> int:
        text = row.text[None, : row.length]
        scores = raw = logits[None].to(torch.float32, copy=True)
        if self.keep_logits:
            row.logits.append(raw[0].clone())
        logprobs = None if row.top_logprobs is None else raw[0].log_softmax(-1)
        for processor in row.processors:
            scores = processor(text, scores)
        if self.keep_scores:
            row.scores.append(scores[0].clone())
        highest = scores.amax()
        if noise is not None and row.drawn_by is not None:
            drawn, value = draw_tokens(scores[None], noise[None, None], **row.drawn_by)
            highest = highest + 0.0 * value[0, 0]
        if noise is not None:
            if not math.isfinite(float(highest)):
                raise ValueError(
                    f"logits_processor: expected scores to draw from at new token {row.length - row.prompt + 1}, got "
                    "NaN, infinity or no token allowed"
                )
            scores = scores + noise
        token = int(scores.argmax(-1) if noise is None or row.drawn_by is None else drawn[0, 0])
        if logprobs is not None:
            best = logprobs.topk(row.top_logprobs or 0)
            top = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
            row.logprobs.append((float(logprobs[token]), top))
        row.text = append_tokens(row.text, row.length, row.text.new_tensor([token]))
        row.length += 1
        return token


def _divided(processors: Sequence[Any], device: torch.device) -> tuple[Sequence[Any], dict[str, Any] | None]:
    """Return the processors to call, and the settings of `draw_tokens` that do what the others, the last ones, do."""
    if not sampling.DRAW_AT_ONCE or served_by("draw_tokens", device).name != "triton":
        return processors, None
    found = ((first, sampling.at_once(processors[first:])) for first in range(len(processors)))
    first, settings = next(((first, one) for first, one in found if one), (len(processors), None))
    return processors[:first], settings
