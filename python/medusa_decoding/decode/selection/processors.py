"""TokenSelector through any transformers logits processor, each node seen behind its own prefix.

Processors are called as plain decoding would call them: once for each emitted token, in order, with the prompt and
all tokens before it. Only the nodes that the model's own tokens lead to are visited, so a processor with a memory (a
grammar) sees one growing text and nothing that is thrown away. The price is that the host follows the path.

Rows are processed one by one, without the padding that a batch puts before shorter prompts: a row's text is the one it
would have alone. A processor object of the caller's serves all rows, so one with a memory is for a batch of 1.

Stopping criteria are asked behind the step (see `follow`): where one cuts within an accepted path, processors have been
called for the rest of that path too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from medusa_decoding.decode.runtime.streaming import extended
from medusa_decoding.decode.selection.sampling import draw, without_sorting
from medusa_decoding.decode.verify import Nodes

if TYPE_CHECKING:
    from medusa_decoding.decode.state import DecodeState, Rules

Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass
class Row:
    """One sequence and what shapes it.

    Attributes:
        text: int64 [length so far, room], prompt and tokens so far in front.
        prompt: tokens of the prompt.
        length: tokens so far.
        processors: called in order with (int64 [1, length], scores fp32 [1, V]).
        budget: new tokens it may get.
        logits: the model's logits fp32 [V] at each emitted token, if kept.
        scores: the processed scores fp32 [V] at each emitted token, if kept.
    """

    text: torch.Tensor
    prompt: int
    length: int
    processors: Sequence[Processor]
    budget: int
    logits: list[torch.Tensor] = field(default_factory=list)
    scores: list[torch.Tensor] = field(default_factory=list)


class Processed:
    """Follows the path of each row on the host, through the row's own processors.

    Args:
        prompts: int64 [T_b] a row, on the model's device.
        processors: a sequence of processors a row.
        budgets: new tokens a row may get.
        eos: tokens that end a row.
        sample: draw from the processed distribution; False takes its likeliest token.
        keep_logits: keep the model's logits of every emitted token.
        keep_scores: keep the processed scores of every emitted token.
    """

    key = "processed"
    on_host = True

    def __init__(
        self,
        prompts: Sequence[torch.Tensor],
        processors: Sequence[Sequence[Processor]],
        budgets: Sequence[int],
        eos: Sequence[int],
        sample: bool = False,
        keep_logits: bool = False,
        keep_scores: bool = False,
    ) -> None:
        self.rows = [
            Row(prompt, len(prompt), len(prompt), [without_sorting(processor) for processor in own], budget)
            for prompt, own, budget in zip(prompts, processors, budgets, strict=True)
        ]
        self.eos = set(eos)
        self.sample = sample
        self.keep_logits, self.keep_scores = keep_logits, keep_scores

    def __call__(self, nodes: Nodes, lm_head: nn.Module, state: DecodeState, rules: Rules) -> torch.Tensor:
        """Return the token behind every visited node, [B, N]; 0 behind the others, which no path reaches."""
        return self.walk(lm_head(nodes.hidden), nodes.tokens, nodes.shape, state)

    def walk(self, logits: torch.Tensor, tokens: torch.Tensor, shape: Any, state: DecodeState) -> torch.Tensor:
        """Follow every row that has not ended: logits [B, N, V], tokens int64 [B, N] -> next tokens int64 [B, N]."""
        state.check.copy_(logits.amax((1, 2)))
        chosen = torch.zeros_like(tokens, device="cpu")
        tokens, finished = tokens.cpu(), state.finished.tolist()
        self._refuse_broken(state, finished)
        trees = shape.children()
        for index, row in enumerate(self.rows):
            children = trees[index % len(trees)]
            visited = [] if finished[index] else [0]
            while visited and not self._ended(row):
                token = self._next(row, logits[index, visited[0]], state.draws[index])
                chosen[index, visited] = token
                below = [child for node in visited for child in children[node]]
                visited = [child for child in below if int(tokens[index, child]) == token]
        return chosen.to(logits.device)

    def _refuse_broken(self, state: DecodeState, finished: list[bool]) -> None:
        """Raise what the loop would raise behind this step: processors shall not see logits that are not finite."""
        for index, (value, ended) in enumerate(zip(state.check.tolist(), finished, strict=True)):
            if not math.isfinite(value) and not ended:
                raise FloatingPointError(
                    f"model: expected finite logits, got NaN or infinity at step {int(state.step)} (0 is the prefill) "
                    f"in row {index}"
                )

    def _ended(self, row: Row) -> bool:
        new = row.length - row.prompt
        return new >= row.budget or (new > 0 and int(row.text[row.length - 1]) in self.eos)

    def _next(self, row: Row, logits: torch.Tensor, draws: torch.Tensor) -> int:
        text = row.text[None, : row.length]
        scores = raw = logits[None].to(torch.float32, copy=True)
        if self.keep_logits:
            row.logits.append(raw[0].clone())
        for processor in row.processors:
            scores = processor(text, scores)
        if self.keep_scores:
            row.scores.append(scores[0].clone())
        place = row.length - row.prompt
        if not self.sample:
            token = int(scores.argmax(-1))
        elif math.isfinite(float(scores.amax())):
            token = int(draw(scores, draws[place : place + 1]))
        else:
            raise ValueError(
                f"logits_processor: expected scores to draw from at new token {place + 1}, got NaN, infinity or no "
                "token allowed"
            )
        row.text = extended(row.text, row.length, row.text.new_tensor([token]))
        row.length += 1
        return token
