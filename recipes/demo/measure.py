"""What the demo's model card states: head accuracies, diversity of the greedy text, and tokens a step."""

from __future__ import annotations

import math

import torch
from torch import nn
from transformers import PreTrainedModel

from medusa_decoding.heads import MedusaHeads
from medusa_decoding.trees.tree import Tree
from recipes.demo.distill import HeadData, hidden_states

RANKS = 10


@torch.no_grad()
def head_accuracies(heads: MedusaHeads, lm_head: nn.Module, data: HeadData, ranks: int = RANKS) -> list[list[float]]:
    """Return accuracies[k][i]: how often head k's i-th best token alone is the target."""
    hits = torch.zeros(heads.num_heads, ranks)
    for states, targets in zip(data.states.split(2048), data.targets.split(2048), strict=True):
        _, drafts = heads.propose(states.to(heads.w1.dtype), ranks, lm_head)
        hits += (drafts == targets[:, :, None]).sum(0)
    return [[float(hit) / len(data.states) for hit in row] for row in hits]


@torch.no_grad()
def next_token_accuracy(base: PreTrainedModel, tokens: torch.Tensor) -> tuple[float, float]:
    """Return top-1 accuracy and mean loss (nats a token) of the base model on text int64 [b, T]."""
    logits = base.get_output_embeddings()(hidden_states(base, tokens)[:, :-1]).float()
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    return float((logits.argmax(-1) == tokens[:, 1:]).float().mean()), float(loss)


def distinct_four_grams(rows: list[list[int]]) -> float:
    """Mean over texts of distinct 4-grams / all 4-grams: 1 repeats nothing, towards 0 for text that loops."""
    ratios = []
    for row in rows:
        grams = [tuple(row[i : i + 4]) for i in range(len(row) - 3)]
        if grams:
            ratios.append(len(set(grams)) / len(grams))
    return sum(ratios) / len(ratios)


def tokens_per_step_on_text(tree: Tree, drafts: list[list[list[int]]], text: list[int]) -> tuple[int, int]:
    """Walk a given text as if it were the model's own choice at every node; return (committed tokens, steps).

    Args:
        tree: the tree verified each step.
        drafts: drafts[t][k]: head k's tokens, best first, from the hidden state of text[t].
        text: the tokens; text[t + 1] is the root when the hidden state is that of text[t].
    """
    paths = {tuple(path) for path in tree.choices}
    committed = steps = position = 0
    while position + tree.depth + 2 <= len(text):
        accepted: tuple[int, ...] = ()
        while len(accepted) < tree.depth:
            target = text[position + 2 + len(accepted)]
            row = drafts[position][len(accepted)]
            longer = (*accepted, row.index(target)) if target in row else None
            if longer not in paths:
                break
            accepted = longer
        committed += 1 + len(accepted)
        steps += 1
        position += 1 + len(accepted)
    return committed, steps


def standard_error(values: list[float]) -> float:
    """Return the standard error of a mean."""
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / (len(values) - 1) / len(values))
