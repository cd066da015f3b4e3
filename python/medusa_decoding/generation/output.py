"""MedusaOutput: the result of `generate`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput

from medusa_decoding.decode.runtime.runner import Runner
from medusa_decoding.decode.selection.processors import LogitsProcessors
from medusa_decoding.decode.state import DecodeState
from medusa_decoding.decode.verify import TokenSelector
from medusa_decoding.generation.metrics import GenerationMetrics
from medusa_decoding.generation.request import Request
from medusa_decoding.generation.tree_choice import TreeChoice


@dataclass
class MedusaOutput(GenerateDecoderOnlyOutput):
    """The result of `MedusaModel.generate`: transformers' own output of `generate` with more fields after its own.

    Fields are found by name, by key, and by place among those that are not None (the sequences first). `attentions`,
    `hidden_states` and `past_key_values` (since transformers 5.24 `cache`) are always None.

    Attributes:
        sequences: int64 [B, prompt + new]: the prompt as given (padding included), then the new tokens, padded on the
            right with the pad token; a row ends at its EOS token, as in transformers.
        scores: with `output_scores`: processed scores fp32 [B, V] of each new token, as in transformers; zeros in rows
            that had ended.
        logits: with `output_logits`: the model's logits likewise.
        accept_lengths: one list per row: accepted tokens below the root, a number per step (prefill is not a step). A
            last step cut short by EOS, a stopping criterion or the budget counts the tokens that remain.
        new_tokens: number of new tokens per row.
        metrics: with `metrics=True`.
        tree_choice: the tree that was verified, and why.
    """

    sequences: torch.Tensor  # type: ignore[assignment]  # transformers says LongTensor, and tuples of one
    scores: tuple[torch.Tensor, ...] | None = None  # type: ignore[assignment]
    logits: tuple[torch.Tensor, ...] | None = None  # type: ignore[assignment]
    accept_lengths: list[list[int]] = None  # type: ignore[assignment]  # ModelOutput asks for defaults
    new_tokens: list[int] = None  # type: ignore[assignment]
    metrics: GenerationMetrics | None = None
    tree_choice: TreeChoice | None = None

    @property
    def steps(self) -> int:
        """Number of steps, summed over the rows."""
        return sum(len(row) for row in self.accept_lengths)

    @property
    def tokens_per_step(self) -> float:
        """Accepted tokens per step, the acceleration rate; the prefill's token is not counted. NaN without a step."""
        committed = sum(sum(row) + len(row) for row in self.accept_lengths)
        return committed / self.steps if self.steps else float("nan")


def collect_output(state: DecodeState, request: Request, selector: TokenSelector, runner: Runner) -> MedusaOutput:
    """Make the output of a finished generation, on the device of its prompts; `selector` may have kept scores."""
    ids, counts = request.input_ids, state.count.tolist()
    new = state.output[:, : max(counts)].to(ids.device)
    emitted = torch.arange(new.shape[1], device=new.device) < torch.tensor(counts, device=new.device)[:, None]
    sequences = torch.cat([ids, new.masked_fill(~emitted, request.limits.pad)], dim=1)
    accepted = [row.accepted for row in runner.rows]
    scores = logits = metrics = None
    if isinstance(selector, LogitsProcessors):
        scores = _stacked([row.scores for row in selector.rows], counts) if selector.keep_scores else None
        logits = _stacked([row.logits for row in selector.rows], counts) if selector.keep_logits else None
    if request.metrics:
        prompts = [len(prompt) for prompt in request.prompts]
        metrics = GenerationMetrics.from_steps(prompts, counts, accepted, runner.trees, runner.seconds)
    return MedusaOutput(
        sequences=sequences, scores=scores, logits=logits, accept_lengths=accepted, new_tokens=counts, metrics=metrics
    )


def _stacked(rows: list[list[torch.Tensor]], counts: list[int]) -> tuple[torch.Tensor, ...]:
    nothing = torch.zeros_like(rows[0][0])
    return tuple(
        torch.stack([row[place] if place < count else nothing for row, count in zip(rows, counts, strict=True)])
        for place in range(max(counts))
    )
