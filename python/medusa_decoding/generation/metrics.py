"""Figures of one generation, computed on request from what the loop records anyway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from medusa_decoding.trees.tree import Tree


@dataclass(frozen=True)
class GenerationMetrics:
    """Figures of one call of `generate`.

    Attributes:
        prompt_tokens: tokens of all prompts.
        new_tokens: tokens emitted in all rows, including the prefill's.
        steps: number of steps, summed over the rows (the prefill is not a step).
        accepted_histogram: number of steps by accepted tokens below the root.
        depth_acceptance: entry d is the share of steps that accepted a path of length d + 1 or more, among those whose
            tree may be that deep (a dynamic one need not be).
        tree_nodes: number of steps by nodes of their tree.
        prefill_seconds: duration of the prefill.
        decode_seconds: duration of all steps.
        step_seconds: duration of each step, in order.
    """

    prompt_tokens: int
    new_tokens: int
    steps: int
    accepted_histogram: dict[int, int]
    depth_acceptance: list[float]
    tree_nodes: dict[int, int]
    prefill_seconds: float
    decode_seconds: float
    step_seconds: list[float]

    @property
    def tokens_per_step(self) -> float:
        """Accepted tokens per step, the root included; NaN without a step."""
        committed = sum((accepted + 1) * count for accepted, count in self.accepted_histogram.items())
        return committed / self.steps if self.steps else float("nan")

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of prefill and steps; NaN if nothing took time."""
        seconds = self.prefill_seconds + self.decode_seconds
        return self.new_tokens / seconds if seconds else float("nan")

    @classmethod
    def from_steps(
        cls,
        prompts: Sequence[int],
        new: Sequence[int],
        accepted: list[list[int]],
        trees: Sequence[Tree],
        seconds: list[float],
    ) -> GenerationMetrics:
        """Add up one generation: the tokens of each prompt, the new tokens of each row, and the tree of each step.

        `accepted` has a list per row: tokens below the root of each step. `seconds` begin with the prefill's.
        """
        taken = [(length, trees[step]) for row in accepted for step, length in enumerate(row)]
        depth = max((tree.depth for _, tree in taken), default=0)
        reaching = [[length > d for length, tree in taken if tree.depth > d] for d in range(depth)]
        steps = len(max(accepted, key=len, default=[]))
        used = Counter(tree.num_nodes for tree in trees[:steps])
        return cls(
            prompt_tokens=sum(prompts),
            new_tokens=sum(new),
            steps=len(taken),
            accepted_histogram=dict(sorted(Counter(length for length, _ in taken).items())),
            depth_acceptance=[sum(reached) / len(reached) for reached in reaching],
            tree_nodes=dict(sorted(used.items())),
            prefill_seconds=seconds[0],
            decode_seconds=sum(seconds[1 : steps + 1]),
            step_seconds=seconds[1 : steps + 1],
        )
