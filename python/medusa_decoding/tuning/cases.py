"""What was measured and chosen for one batch and one prefix length, as `tuning.json` has it.

This module does not know where that holds (see `stored`), nor how it was measured (see `latency`) and chosen (see
`choice`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from medusa_decoding.trees.tree import Tree
from medusa_decoding.tuning.select import Candidate

if TYPE_CHECKING:
    from medusa_decoding.tuning.step_timer import Latency


@dataclass(frozen=True)
class Size:
    """What was measured and is expected of one size of tree.

    Attributes:
        nodes: root included.
        seconds: typical duration of a step (see `Latency`).
        median: of the durations.
        low, high: quartiles of the durations.
        steps: how many were timed.
        tokens: expected tokens a step and row.
        tree: the best one of this size; `Tree([])` for one node.
    """

    nodes: int
    seconds: float
    median: float
    low: float
    high: float
    steps: int
    tokens: float
    tree: Tree

    @property
    def rate(self) -> float:
        """Tokens a second and row."""
        return self.tokens / self.seconds

    def to_json(self) -> dict[str, Any]:
        """Return all as JSON has it, with the rate that follows."""
        kept = {part.name: getattr(self, part.name) for part in fields(self) if part.name != "tree"}
        return kept | {"tokens_per_second": self.rate, "choices": self.tree.choices}


@dataclass(frozen=True)
class Case:
    """What was chosen for one batch and one prefix length.

    Attributes:
        batch: rows of the batch.
        prefix: committed tokens of each row.
        rows: rows of the cache.
        tree: the chosen one; `Tree([])` where plain decoding is the fastest.
        sizes: what it was chosen among, in ascending order.
    """

    batch: int
    prefix: int
    rows: int
    tree: Tree
    sizes: tuple[Size, ...]

    @classmethod
    def of(cls, measured: Sequence[Latency], chosen: Candidate, weighed: Sequence[Candidate]) -> Case:
        """Put together what was measured for a batch and a prefix, and what was made of it."""
        of_size = {one.tree.num_nodes: one for one in weighed}
        sizes = [
            Size(
                one.nodes,
                one.typical,
                one.median,
                *one.quartiles,
                len(one.seconds),
                of_size[one.nodes].tokens,
                of_size[one.nodes].tree,
            )
            for one in sorted(measured, key=lambda one: one.nodes)
        ]
        first = measured[0]
        return cls(first.batch, first.prefix, first.rows, chosen.tree, tuple(sizes))

    @property
    def chosen(self) -> Size:
        """The size of the chosen tree."""
        return next(size for size in self.sizes if size.nodes == self.tree.num_nodes)


def case_of(values: Any) -> Case:
    """Read a case from what JSON has of it.

    Raises:
        ValueError: sizes and trees that do not go together, a number that cannot be.
        KeyError, TypeError: parts that are missing or something else.
    """
    counts = {name: _count(name, values[name]) for name in ("batch", "prefix", "rows", "nodes")}
    sizes = tuple(
        Size(
            nodes=_count("nodes", size["nodes"]),
            seconds=_positive("seconds", size["seconds"]),
            median=_positive("median", size["median"]),
            low=_positive("low", size["low"]),
            high=_positive("high", size["high"]),
            steps=_count("steps", size["steps"]),
            tokens=_positive("tokens", size["tokens"]),
            tree=Tree(size["choices"]),
        )
        for size in values["sizes"]
    )
    tree = Tree(values["choices"])
    known = [size.nodes for size in sizes]
    if tree.num_nodes != counts["nodes"] or tree.num_nodes not in known or known[:1] != [1] or known != sorted(known):
        raise ValueError(f"cases: expected a tree of one of the sizes from 1 on, got {tree.num_nodes} nodes of {known}")
    if any(size.tree.num_nodes != size.nodes for size in sizes) or tree not in [size.tree for size in sizes]:
        raise ValueError("cases: expected each size's tree to have that many nodes and the chosen one among them")
    return Case(counts["batch"], counts["prefix"], counts["rows"], tree, sizes)


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}: expected a whole number from 1, got {value!r}")
    return value


def _positive(name: str, value: Any) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise ValueError(f"{name}: expected a number above 0, got {value!r}")
    return float(value)
