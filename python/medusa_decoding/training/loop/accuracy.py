"""How often heads are right: counted on given targets, and what a tree gains by it (Medusa paper, section 2.3.3).

A target that a trimmed vocabulary lacks is a miss. This module knows counts; it does not know where they come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from medusa_decoding.training.loss.losses import TOP, Loss
from medusa_decoding.trees.tree import Tree


@dataclass
class HeadAccuracy:
    """Targets that stood among the n likeliest candidates of each head.

    Attributes:
        hits: int64 [K, R], for n from 1 to R.
        total: int64 [K], targets asked for, those outside of a trimmed vocabulary included.
    """

    hits: torch.Tensor
    total: torch.Tensor

    @classmethod
    def empty(cls, num_heads: int, ranks: int = TOP) -> HeadAccuracy:
        """Start counting."""
        zeros = torch.zeros(num_heads, ranks, dtype=torch.int64)
        return cls(zeros, zeros[:, 0].clone())

    def add(self, loss: Loss) -> None:
        """Count what a loss over held-out data saw; its candidates' number may be smaller in a tiny vocabulary."""
        ranks = loss.hits.shape[1]
        hits = loss.hits.cpu()
        self.hits[:, :ranks] += hits
        self.hits[:, ranks:] += hits[:, -1:]
        self.total += (loss.counts + loss.outside).cpu()

    @property
    def cumulative(self) -> list[list[float]]:
        """Share of targets among the n likeliest, a row a head."""
        shares = self.hits.double() / self.total.clamp(min=1)[:, None]
        return [[float(value) for value in row] for row in shares]

    @property
    def by_rank(self) -> list[list[float]]:
        """Share of targets that are the head's n-th best alone: what `Tree.optimal` takes."""
        alone = torch.diff(self.hits, dim=1, prepend=torch.zeros_like(self.hits[:, :1]))
        return [[float(value) for value in row] for row in alone.double() / self.total.clamp(min=1)[:, None]]

    def expected_tokens(self, num_nodes: int) -> float:
        """Tokens a step of the best tree of so many nodes (root included), taking heads as independent (2.3.3).

        Fewer nodes where the heads cannot fill as many.
        """
        accuracies = self.by_rank
        possible, level = 1, 1
        for row in accuracies:
            level *= len(row)
            possible += level
        return Tree.optimal(accuracies, min(num_nodes, possible)).expected_tokens(accuracies)

    def to_json(self) -> dict[str, Any]:
        """Return the counts as plain lists."""
        return {"hits": self.hits.tolist(), "total": self.total.tolist()}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> HeadAccuracy:
        """Read what `to_json` returned.

        Raises:
            ValueError: anything else.
        """
        try:
            found = cls(torch.tensor(values["hits"], dtype=torch.int64), torch.tensor(values["total"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"accuracy: expected hits [K, R] and total [K], got {values!r}") from error
        if found.hits.ndim != 2 or found.total.shape != found.hits.shape[:1]:
            shapes = list(found.hits.shape), list(found.total.shape)
            raise ValueError(f"accuracy: expected hits [K, R] and total [K], got shapes {shapes[0]} and {shapes[1]}")
        return found
