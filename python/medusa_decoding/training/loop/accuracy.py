"""How often heads are right on given targets, and what a tree gains by it (Medusa paper, section 2.3.3)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from medusa_decoding.training.loss.chunked import TOP
from medusa_decoding.trees.tree import Tree, most_nodes

FIGURE_NODES = 16
"""Nodes of the tree by which heads of one run are compared."""


@dataclass
class HeadAccuracy:
    """How many targets are among the top n candidates of each head.

    Attributes:
        hits: int64 [K, R], for n from 1 to R.
        total: int64 [K], all targets, including those outside a trimmed vocabulary.
    """

    hits: torch.Tensor
    total: torch.Tensor

    @classmethod
    def empty(cls, num_heads: int, ranks: int = TOP) -> HeadAccuracy:
        """Return counts of zero."""
        zeros = torch.zeros(num_heads, ranks, dtype=torch.int64)
        return cls(zeros, zeros[:, 0].clone())

    def add(self, hits: torch.Tensor, total: torch.Tensor) -> None:
        """Add counts of held-out data: int64 [K, R'] and [K]. A tiny vocabulary has R' < R candidates."""
        ranks = hits.shape[1]
        hits = hits.cpu()
        self.hits[:, :ranks] += hits
        self.hits[:, ranks:] += hits[:, -1:]
        self.total += total.cpu()

    @property
    def cumulative(self) -> list[list[float]]:
        """For each head, the share of targets among its top n candidates, for each n."""
        return self._shares(self.hits)

    @property
    def by_rank(self) -> list[list[float]]:
        """For each head, the share of targets that are its n-th candidate: what `Tree.optimal` takes."""
        return self._shares(torch.diff(self.hits, dim=1, prepend=torch.zeros_like(self.hits[:, :1])))

    def _shares(self, hits: torch.Tensor) -> list[list[float]]:
        return (hits.double() / self.total.clamp(min=1)[:, None]).tolist()

    @property
    def most_nodes(self) -> int:
        """Nodes of the largest tree that the heads can fill."""
        return most_nodes([self.hits.shape[1]] * len(self.hits))

    def expected_tokens(self, num_nodes: int) -> float:
        """Return the tokens per step of the best tree of `num_nodes` nodes (root included), as section 2.3.3 has it.

        The heads count as independent. The tree has fewer nodes if the heads cannot fill as many.
        """
        accuracies = self.by_rank
        return Tree.optimal(accuracies, min(num_nodes, self.most_nodes)).expected_tokens(accuracies)

    def to_json(self) -> dict[str, Any]:
        """Return the counts as plain lists."""
        return {"hits": self.hits.tolist(), "total": self.total.tolist()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> HeadAccuracy:
        """Read what `to_json` returned."""
        return cls(torch.tensor(values["hits"], dtype=torch.int64), torch.tensor(values["total"]))


@dataclass(frozen=True)
class Measured:
    """Figures of held-out data.

    Attributes:
        accuracy: of the heads.
        model_loss, model_top1: the model's own loss in nats per token, and its accuracy.
        head_losses: of each head, in nats per target within its vocabulary; empty in older checkpoints.
    """

    accuracy: HeadAccuracy
    model_loss: float
    model_top1: float
    head_losses: tuple[float, ...] = ()

    @property
    def figure(self) -> float:
        """Expected tokens per step of the best tree of `FIGURE_NODES` nodes: what the best heads have most of.

        Decoding uses the ranks of candidates only, so the loss of heads that are right but too sure does not count.
        """
        return self.accuracy.expected_tokens(FIGURE_NODES)

    def to_json(self) -> dict[str, Any]:
        """Return the figures as plain lists."""
        return {
            "model_loss": self.model_loss,
            "model_top1": self.model_top1,
            "head_losses": list(self.head_losses),
            "head_top1": [row[0] for row in self.accuracy.cumulative],
            "accuracy": self.accuracy.to_json(),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Measured:
        """Read what `to_json` returned."""
        accuracy = HeadAccuracy.from_json(values["accuracy"])
        return cls(accuracy, values["model_loss"], values["model_top1"], tuple(values.get("head_losses", ())))
