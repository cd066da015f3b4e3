"""Tree: which combinations of the heads' guesses one forward pass verifies (Medusa paper, section 2.1.2).

A tree is a set of paths of child ranks. The path (r1, .., rd) stands for the candidate "head 1's r1-th best token, ..,
head d's rd-th best token" behind the root, the model's own next token. The root is implied and is node 0; the other
nodes are ordered by (path length, path). Everything derived from the shape (parents, depths, ancestor bit words, node
paths) is made once, here. This module knows shapes only: no tokens, no models, no caches.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from medusa_kernels import ancestor_words

MAX_CHOICES = 255


class Tree:
    """A prefix-closed set of paths of child ranks.

    Args:
        choices: paths of child ranks in any order, at most 255 (with the root, 256 nodes). No path is the root alone:
            `Tree([])` is plain decoding.
        lookup: length of one more branch, a chain below the root whose tokens are copied from the text instead of
            guessed by heads (see `decode.lookup`). Its nodes come last.

    Attributes:
        choices: list of paths (lists of int), ordered by (length, path); node i + 1 is choices[i].
        lookup: nodes of the copied branch.
        num_nodes: N, root included.
        depth: the longest path's length, the copied branch's included.
        parents: int32 [N], parent node of each node; -1 for the root.
        depths: int32 [N], path length of each node; 0 for the root.
        ranks: int32 [N], rank of each node among its head's predictions; -1 for the root and the copied branch.
        ancestors: int64 [N, W], W = ceil(N / 64): bit j % 64 of word j // 64 is set iff node j is an ancestor of the
            node or the node itself.
        paths: int32 [N, depth + 1], the nodes from the root to each node, padded with the node itself.

    Raises:
        ValueError: too many choices, an empty, repeated or malformed path, or one whose prefix is missing; it names
            the path.
    """

    def __init__(self, choices: Iterable[Sequence[int]], lookup: int = 0) -> None:
        self.choices = _ordered(choices)
        if (
            isinstance(lookup, bool)
            or not isinstance(lookup, int)
            or not 0 <= lookup <= MAX_CHOICES - len(self.choices)
        ):
            most = MAX_CHOICES - len(self.choices)
            raise ValueError(f"lookup: expected 0 to {most} with {len(self.choices)} choices, got {lookup!r}")
        self.lookup = lookup
        index: dict[tuple[int, ...], int] = {(): 0} | {tuple(path): i + 1 for i, path in enumerate(self.choices)}
        # Copied tokens have no rank: their paths are made of -1.
        index |= {(-1,) * (i + 1): len(self.choices) + 1 + i for i in range(lookup)}
        self.num_nodes = len(index)
        self.depth = max((len(path) for path in index), default=0)
        lineage = [[index[path[:d]] for d in range(len(path) + 1)] for path in index]
        self.parents = torch.tensor([line[-2] if len(line) > 1 else -1 for line in lineage], dtype=torch.int32)
        self.depths = torch.tensor([len(line) - 1 for line in lineage], dtype=torch.int32)
        self.ranks = torch.tensor([path[-1] if path else -1 for path in index], dtype=torch.int32)
        visible = torch.zeros(self.num_nodes, self.num_nodes, dtype=torch.bool)
        for node, line in enumerate(lineage):
            visible[node, line] = True
        self.ancestors = ancestor_words(visible)
        padded = [line + [line[-1]] * (self.depth + 1 - len(line)) for line in lineage]
        self.paths = torch.tensor(padded, dtype=torch.int32).view(self.num_nodes, self.depth + 1)

    @classmethod
    def chain(cls, length: int) -> Tree:
        """The single path of every head's best token: `length` nodes below the root."""
        if length < 0:
            raise ValueError(f"length: expected at least 0, got {length}")
        return cls([[0] * d for d in range(1, length + 1)])

    @classmethod
    def cartesian(cls, widths: Sequence[int]) -> Tree:
        """Every combination of the first widths[k] predictions of each head k (Medusa paper, section 2.1.2)."""
        if any(width < 1 for width in widths):
            raise ValueError(f"widths: expected at least 1 for every head, got {list(widths)}")
        total = sum(math.prod(widths[: d + 1]) for d in range(len(widths)))
        if total > MAX_CHOICES:
            raise ValueError(f"widths: expected at most {MAX_CHOICES} choices in all, {list(widths)} gives {total}")
        choices: list[list[int]] = []
        level: list[list[int]] = [[]]
        for width in widths:
            level = [[*path, rank] for path in level for rank in range(width)]
            choices += level
        return cls(choices)

    @classmethod
    def optimal(cls, accuracies: Sequence[Sequence[float]], num_nodes: int = 64) -> Tree:
        """The tree of `num_nodes` nodes with the longest expected acceptance (Medusa paper, section 2.3.3).

        A node's expected contribution is the product of the accuracies along its path, so the best tree takes the
        `num_nodes - 1` paths with the largest products. Best-first search over (first child, next sibling) is exact:
        neither step can raise the product when each head's ranks are visited from most to least accurate.

        Args:
            accuracies: accuracies[k][i] is the probability that head k's i-th best token alone is right.
            num_nodes: size of the tree, root included, 1 to 256.

        Raises:
            ValueError: an accuracy outside [0, 1], or fewer possible paths than asked for.
        """
        rows = _checked_accuracies(accuracies)
        if not 1 <= num_nodes <= MAX_CHOICES + 1:
            raise ValueError(f"num_nodes: expected 1 to {MAX_CHOICES + 1} (root included), got {num_nodes}")
        order = [_best_first(row) for row in rows]
        choices: list[list[int]] = []
        frontier: list[tuple[float, tuple[int, ...]]] = (
            [(-rows[0][order[0][0]], (0,))] if rows and num_nodes > 1 else []
        )
        while len(choices) < num_nodes - 1:
            if not frontier:
                raise ValueError(f"num_nodes: expected at most {len(choices) + 1} with these heads, got {num_nodes}")
            negative, places = heapq.heappop(frontier)
            head, place = len(places) - 1, places[-1]
            choices.append([order[k][p] for k, p in enumerate(places)])
            before = math.prod(rows[k][order[k][p]] for k, p in enumerate(places[:-1]))
            if place + 1 < len(rows[head]):
                heapq.heappush(frontier, (-before * rows[head][order[head][place + 1]], (*places[:-1], place + 1)))
            if head + 1 < len(rows):
                heapq.heappush(frontier, (negative * rows[head + 1][order[head + 1][0]], (*places, 0)))
        return cls(choices)

    @classmethod
    def load(cls, path: str | Path) -> Tree:
        """Read a tree from JSON: either `{"choices": [[0], ..], "lookup": 0}` or the bare list of paths."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: expected JSON with a list of paths, got {error}") from error
        choices = data.get("choices") if isinstance(data, dict) else data
        if not isinstance(choices, list):
            raise ValueError(f'{path}: expected {{"choices": [[0], ..]}} or a list of paths, got {type(data).__name__}')
        return cls(choices, data.get("lookup", 0) if isinstance(data, dict) else 0)

    def with_lookup(self, length: int) -> Tree:
        """The same tree with a copied branch of another length; 0 for none."""
        return Tree(self.choices, length)

    def save(self, path: str | Path) -> None:
        """Write the tree as JSON; the file appears whole or not at all."""
        path = Path(path)
        scratch = path.with_name(path.name + ".partial")
        scratch.write_text(
            json.dumps({"choices": self.choices} | ({"lookup": self.lookup} if self.lookup else {})) + "\n",
            encoding="utf-8",
        )
        scratch.replace(path)

    def expected_tokens(self, accuracies: Sequence[Sequence[float]]) -> float:
        """Expected tokens a step, root included, if heads are right independently (Medusa paper, section 2.3.3).

        A copied branch is not counted.
        """
        rows = _checked_accuracies(accuracies)
        self.check_fits(len(rows), max((len(row) for row in rows), default=0))
        for path in self.choices:
            if path[-1] >= len(rows[len(path) - 1]):
                raise ValueError(
                    f"accuracies: expected one for every rank in path {path}, got {len(rows[len(path) - 1])}"
                )
        return 1.0 + sum(math.prod(rows[k][rank] for k, rank in enumerate(path)) for path in self.choices)

    def check_fits(self, num_heads: int, top_k: int) -> None:
        """Raise `ValueError`, naming the path, unless `num_heads` heads with `top_k` guesses each can fill the tree."""
        for path in self.choices:
            if len(path) > num_heads:
                raise ValueError(f"tree: path {path} has depth {len(path)}, expected at most {num_heads} (the heads)")
            if max(path) >= top_k:
                raise ValueError(f"tree: path {path} has rank {max(path)}, expected below {top_k} (the heads' top-k)")

    def plot(self, accuracies: Sequence[Sequence[float]] | None = None, path: str | Path | None = None) -> Any:
        """Draw the tree as the paper's figure 6 does: by depth, likelier nodes darker.

        Args:
            accuracies: accuracies[k][i] is the probability that head k's i-th best token alone is right; without them,
                all nodes look alike.
            path: an image file to write as well; its ending says which kind.

        Returns:
            A matplotlib Figure.

        Raises:
            ValueError: matplotlib is not installed, or accuracies for too few heads or ranks.
        """
        from medusa_decoding.tuning.drawing import as_figure, path_shares, save_figure

        figure = as_figure(self, None if accuracies is None else path_shares(self, accuracies))
        if path is not None:
            save_figure(figure, path)
        return figure

    @property
    def top_k(self) -> int:
        """How many guesses a head the tree needs: its largest rank plus one."""
        return max((max(path) for path in self.choices), default=-1) + 1

    def __eq__(self, other: object) -> bool:
        """Trees are equal when their choices and copied branches are."""
        return isinstance(other, Tree) and (self.choices, self.lookup) == (other.choices, other.lookup)

    def __hash__(self) -> int:
        """Hash by choices."""
        return hash((tuple(map(tuple, self.choices)), self.lookup))

    def __repr__(self) -> str:
        """Say size and depth."""
        lookup = f", lookup={self.lookup}" if self.lookup else ""
        return f"Tree(num_nodes={self.num_nodes}, depth={self.depth}{lookup})"


def _ordered(choices: Iterable[Sequence[int]]) -> list[list[int]]:
    paths: list[tuple[int, ...]] = []
    for path in choices:
        if isinstance(path, (str, bytes)) or not isinstance(path, Sequence):
            raise ValueError(f"choices: expected paths (lists of ranks), got {path!r}")
        if not path or not all(isinstance(rank, int) and not isinstance(rank, bool) and rank >= 0 for rank in path):
            raise ValueError(f"choices: expected a non-empty path of ranks of at least 0, got {list(path)}")
        paths.append(tuple(path))
    if len(paths) > MAX_CHOICES:
        raise ValueError(f"choices: expected at most {MAX_CHOICES} paths, got {len(paths)}")
    known = set(paths)
    for path in paths:
        if len(path) > 1 and path[:-1] not in known:
            raise ValueError(f"choices: path {list(path)} needs its prefix {list(path[:-1])}, which is missing")
    if len(known) < len(paths):
        repeated = next(path for i, path in enumerate(paths) if path in paths[:i])
        raise ValueError(f"choices: path {list(repeated)} is given twice")
    return [list(path) for path in sorted(paths, key=lambda p: (len(p), p))]


def _best_first(row: list[float]) -> list[int]:
    return sorted(range(len(row)), key=lambda rank: (-row[rank], rank))


def _checked_accuracies(accuracies: Sequence[Sequence[float]]) -> list[list[float]]:
    rows = [[float(value) for value in row] for row in accuracies]
    for k, row in enumerate(rows):
        if not row:
            raise ValueError(f"accuracies: expected at least one rank for head {k}, got none")
        for value in row:
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"accuracies: expected values in [0, 1], got {value} for head {k}")
    return rows
