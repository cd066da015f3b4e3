"""Tree: which combinations of the heads' drafts one forward pass verifies (Medusa paper, section 2.1.2).

A tree is a set of paths of child ranks. The path (r1, .., rd) is the candidate "head 1's r1-th best token, ..,
head d's rd-th best token" after the root, the model's own next token. The root is implied and is node 0; the other
nodes are ordered by (path length, path). This module knows shapes only: no tokens, no models, no caches.

Beyond the paper, a tree may be dynamic: its paths are candidates, and each step verifies the most likely ones by the
probabilities that the heads give at that step (`Tree.dynamic`).
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_decoding.checks import shown
from medusa_decoding.files import read_json, write_json

if TYPE_CHECKING:
    import torch

MAX_CHOICES = 255
"""Most nodes per step without the root; also the longest path."""
MAX_RANKS, MAX_CANDIDATES = 32, 8192
"""Most ranks of a head, and most candidates of a dynamic tree with its root, as in the kernels."""
FILE_BYTES = 2**21
"""Largest file that is read; the largest trees need a tenth of it."""


class Tree:
    """A prefix-closed set of paths of child ranks.

    Args:
        choices: paths of child ranks in any order, at most 255 (256 nodes with the root). `Tree([])` is the root
            alone: plain decoding.
        lookup: length of an additional branch, a chain below the root whose tokens are copied from the text instead of
            proposed by heads (see `decode.lookup`). Its nodes come last.
        keep: None for a static tree, of which every node is verified. A number makes the tree dynamic: choices are
            candidates (at most 8,191 with the copied branch), and each step verifies `keep` nodes, the root and the
            candidates with the most likely paths at that step, and also the copied branch. 1 to
            min(256 - lookup, 1 + candidates).

    Attributes:
        choices: list of paths (lists of int), ordered by (length, path); node i + 1 is `choices[i]`.
        lookup: nodes of the copied branch.
        keep: nodes that a step of a dynamic tree verifies, without the copied branch; None for a static tree.
        num_nodes: N, nodes that a step verifies, root included.
        depth: length of the longest path, copied branch included.
        parents: int32 [M], parent node of each node; -1 for the root. M is N, or 1 + len(choices) + lookup for a
            dynamic tree.
        depths: int32 [M], path length of each node; 0 for the root.
        ranks: int32 [M], rank of each node among its head's predictions; -1 for the root and the copied branch.
        ancestors: int64 [M, W], W = ceil(M / 64): bit j % 64 of word j // 64 is set iff node j is an ancestor of the
            node or the node itself.
        paths: int32 [M, depth + 1], the nodes from the root to each node, padded with the node itself.

    Raises:
        ValueError: there are too many choices, or a path is empty, repeated or malformed or lacks its prefix; the
            message names the path.
    """

    def __init__(self, choices: Iterable[Sequence[int]], lookup: int = 0, keep: int | None = None) -> None:
        limit = MAX_CHOICES if keep is None else MAX_CANDIDATES - 1
        self.choices = _ordered(choices, limit)
        if keep is not None:
            most = min(MAX_CHOICES + 1, 1 + len(self.choices))
            if not _is_whole(keep) or not 1 <= keep <= most:
                raise ValueError(f"keep: expected 1 to {most} with {len(self.choices)} choices, got {shown(keep)}")
        room = min(MAX_CHOICES + 1 - (keep or 1 + len(self.choices)), limit - len(self.choices))
        if not _is_whole(lookup) or not 0 <= lookup <= room:
            beside = f"{len(self.choices)} choices" if keep is None else f"{keep} nodes of {len(self.choices)} choices"
            raise ValueError(f"lookup: expected 0 to {room} with {beside}, got {shown(lookup)}")
        self.lookup, self.keep = lookup, keep
        index: dict[tuple[int, ...], int] = {(): 0} | {tuple(path): i + 1 for i, path in enumerate(self.choices)}
        # Copied tokens have no rank: their paths are made of -1.
        index |= {(-1,) * (i + 1): len(self.choices) + 1 + i for i in range(lookup)}
        self.num_nodes = len(index) if keep is None else keep + lookup
        self.depth = max((len(path) for path in index), default=0)
        self._lineage = [[index[path[:d]] for d in range(len(path) + 1)] for path in index]
        self._ranks = [path[-1] if path else -1 for path in index]

    # Tensors are made at first use: the command line reads trees before it imports torch.

    @functools.cached_property
    def parents(self) -> torch.Tensor:
        """See the class."""
        return _int32([line[-2] if len(line) > 1 else -1 for line in self._lineage])

    @functools.cached_property
    def depths(self) -> torch.Tensor:
        """See the class."""
        return _int32([len(line) - 1 for line in self._lineage])

    @functools.cached_property
    def ranks(self) -> torch.Tensor:
        """See the class."""
        return _int32(self._ranks)

    @functools.cached_property
    def paths(self) -> torch.Tensor:
        """See the class."""
        return _int32([line + [line[-1]] * (self.depth + 1 - len(line)) for line in self._lineage])

    @functools.cached_property
    def ancestors(self) -> torch.Tensor:
        """See the class."""
        import torch

        from medusa_kernels import ancestor_words

        visible = torch.zeros(len(self.paths), len(self.paths), dtype=torch.bool)
        return ancestor_words(visible.scatter_(1, self.paths.long(), torch.ones_like(self.paths, dtype=torch.bool)))

    @classmethod
    def chain(cls, length: int) -> Tree:
        """Return the single path of every head's best token: `length` nodes below the root."""
        if not _is_whole(length) or not 0 <= length <= MAX_CHOICES:
            raise ValueError(f"length: expected at least 0 and at most {MAX_CHOICES}, got {shown(length)}")
        return cls([[0] * d for d in range(1, length + 1)])

    @classmethod
    def cartesian(cls, widths: Sequence[int]) -> Tree:
        """Return all combinations of the first widths[k] draft tokens of each head k (Medusa paper, section 2.1.2)."""
        if not isinstance(widths, Sequence) or not all(_is_whole(width) and width >= 1 for width in widths):
            raise ValueError(f"widths: expected at least 1 for every head, got {shown(widths)}")
        choices: list[list[int]] = []
        level: list[list[int]] = [[]]
        for width in widths:
            if len(choices) + len(level) * width > MAX_CHOICES:
                raise ValueError(f"widths: expected at most {MAX_CHOICES} choices in all, {shown(widths)} gives more")
            level = [[*path, rank] for path in level for rank in range(width)]
            choices += level
        return cls(choices)

    @classmethod
    def optimal(cls, accuracies: Sequence[Sequence[float]], num_nodes: int = 64) -> Tree:
        """Return the tree of `num_nodes` nodes with the longest expected acceptance (Medusa paper, section 2.3.3).

        A node's expected contribution is the product of the accuracies along its path, so the best tree takes the
        `num_nodes - 1` paths with the largest products.

        Args:
            accuracies: `accuracies[k][i]` is the probability that head k's i-th best token alone is right.
            num_nodes: size of the tree, root included, 1 to 256.

        Raises:
            ValueError: an accuracy is outside [0, 1], or `num_nodes` is more than the heads can fill.
        """
        rows = _checked_accuracies(accuracies)
        return cls.best_first(
            [len(row) for row in rows],
            num_nodes,
            lambda path: (-math.prod(rows[head][rank] for head, rank in enumerate(path)),),
        )

    @classmethod
    def best_first(
        cls, widths: Sequence[int], num_nodes: int, key: Callable[[tuple[int, ...]], tuple[float, ...]]
    ) -> Tree:
        """Return the tree of the paths with the least keys, and among equal ones the first.

        Best-first search is exact if no path has a smaller key than its beginning.

        Args:
            widths: candidates of each head.
            num_nodes: size of the tree, root included, 1 to 256.
            key: of a path of ranks.

        Raises:
            ValueError: `num_nodes` is out of range, or more than the heads can fill.
        """
        if not _is_whole(num_nodes) or not 1 <= num_nodes <= MAX_CHOICES + 1:
            raise ValueError(f"num_nodes: expected 1 to {MAX_CHOICES + 1} (root included), got {shown(num_nodes)}")
        choices: list[tuple[int, ...]] = []
        frontier: list[tuple[tuple[float, ...], tuple[int, ...]]] = []
        path: tuple[int, ...] = ()
        while True:
            for rank in range(widths[len(path)] if len(path) < len(widths) else 0):
                child = (*path, rank)
                heapq.heappush(frontier, (key(child), child))
            if len(choices) == num_nodes - 1:
                return cls(choices)
            if not frontier:
                raise ValueError(f"num_nodes: expected at most {len(choices) + 1} with these heads, got {num_nodes}")
            path = heapq.heappop(frontier)[1]
            choices.append(path)

    @classmethod
    def dynamic(cls, num_nodes: int, depth: int, top_k: int = 10) -> Tree:
        """Return a tree that verifies the `num_nodes` most probable nodes of each step, by the heads' probabilities.

        It is the greedy search for a static tree (Medusa paper, section 2.3.3) with the probabilities of one step in
        place of accuracies. Its candidates are all paths that can be among the most probable: a path with no higher
        rank anywhere is at least as probable, and so are its prefixes, so a path with too many of these is left out. If
        draft tokens depend on their parent, this only holds among siblings, and a few likely paths may be missed.

        Args:
            num_nodes: N, root included, 1 to 256.
            depth: length of the longest path, at most the number of heads; 0 only with one node.
            top_k: draft tokens per head, 1 to 32.

        Raises:
            ValueError: a value is out of range, there are fewer paths than nodes, or more than 8,191 candidates.
        """
        for name, value, least, most in (
            ("num_nodes", num_nodes, 1, MAX_CHOICES + 1),
            ("depth", depth, 0 if _is_whole(num_nodes) and num_nodes == 1 else 1, MAX_CHOICES),
            ("top_k", top_k, 1, MAX_RANKS),
        ):
            if not _is_whole(value) or not least <= value <= most:
                raise ValueError(f"{name}: expected {least} to {most}, got {shown(value)}")
        choices: list[list[int]] = []
        # A path, how many paths of its length are at least as probable, and how many paths of any length are.
        open_ones: list[tuple[list[int], int, int]] = [([], 1, 0)] if depth else []
        while open_ones:
            path, alike, above = open_ones.pop()
            for rank in range(min(top_k, (num_nodes - 1 - above) // alike)):
                found = [*path, rank]
                choices.append(found)
                if len(choices) >= MAX_CANDIDATES:
                    raise ValueError(
                        f"num_nodes, depth, top_k: expected at most {MAX_CANDIDATES - 1} candidates, got more with "
                        f"{num_nodes}, {depth} and {top_k}"
                    )
                if len(found) < depth:
                    open_ones.append((found, alike * (rank + 1), above + alike * (rank + 1)))
        if len(choices) < num_nodes - 1:
            raise ValueError(
                f"num_nodes: expected at most {len(choices) + 1} with depth {depth} and {top_k} drafts a head, "
                f"got {num_nodes}"
            )
        return cls(choices, keep=num_nodes)

    @classmethod
    def load(cls, path: str | Path) -> Tree:
        """Read a tree from JSON: `{"choices": [[0], ..], "lookup": 0, "keep": null}`, or the bare list of paths.

        Raises:
            ValueError: it is not such a file, or holds no valid tree (see the class).
            OSError: it cannot be read.
        """
        if not isinstance(path, (str, Path)):
            raise ValueError(f"path: expected a file's name, got {shown(path)}")
        data = read_json(path, FILE_BYTES)
        stated = data if isinstance(data, dict) else {"choices": data}
        if not isinstance(stated.get("choices"), list):
            raise ValueError(f'{path}: expected {{"choices": [[0], ..]}} or a list of paths, got {type(data).__name__}')
        try:
            return cls(stated["choices"], stated.get("lookup", 0), stated.get("keep"))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    def with_lookup(self, length: int) -> Tree:
        """Return the same tree with a copied branch of another length; 0 for none."""
        return Tree(self.choices, length, self.keep)

    def save(self, path: str | Path) -> None:
        """Write the tree as JSON; the file appears whole or not at all."""
        parts = {"choices": self.choices, "lookup": self.lookup or None, "keep": self.keep}
        stated = {name: value for name, value in parts.items() if value is not None}
        write_json(path, stated, indent=None)

    def expected_tokens(self, accuracies: Sequence[Sequence[float]]) -> float:
        """Return the expected tokens per step, root included, for independent heads (Medusa paper, section 2.3.3).

        A copied branch is not counted.

        Raises:
            ValueError: there are accuracies for too few heads or ranks, or the tree is dynamic.
        """
        if self.keep is not None:
            raise ValueError("tree: expected a static one, got a dynamic one, which has no fixed nodes")
        rows = _checked_accuracies(accuracies)
        self.check_fits(len(rows), max((len(row) for row in rows), default=0))
        for path in self.choices:
            if path[-1] >= len(rows[len(path) - 1]):
                raise ValueError(
                    f"accuracies: expected one for every rank in path {path}, got {len(rows[len(path) - 1])}"
                )
        return 1.0 + sum(math.prod(rows[k][rank] for k, rank in enumerate(path)) for path in self.choices)

    def check_fits(self, num_heads: int, top_k: int) -> None:
        """Raise `ValueError`, naming the path, unless `num_heads` heads with `top_k` draft tokens fill the tree."""
        if self.choices and not num_heads:
            raise ValueError(
                "tree: expected plain decoding (root) or copied tokens alone (root+lookup:8), because the model has no "
                f"heads, got draft tokens of heads (path {self.choices[0]})"
            )
        for path in self.choices:
            if len(path) > num_heads:
                raise ValueError(f"tree: path {path} has depth {len(path)}, expected at most {num_heads} (the heads)")
            if max(path) >= top_k:
                raise ValueError(f"tree: path {path} has rank {max(path)}, expected below {top_k} (the heads' top-k)")

    @property
    def top_k(self) -> int:
        """Number of draft tokens per head that the tree needs: its largest rank plus one."""
        return max((max(path) for path in self.choices), default=-1) + 1

    def __eq__(self, other: object) -> bool:
        mine = (self.choices, self.lookup, self.keep)
        return isinstance(other, Tree) and mine == (other.choices, other.lookup, other.keep)

    def __hash__(self) -> int:
        return hash((tuple(map(tuple, self.choices)), self.lookup, self.keep))

    def __repr__(self) -> str:
        lookup = f", lookup={self.lookup}" if self.lookup else ""
        candidates = "" if self.keep is None else f", candidates={len(self.choices)}"
        return f"Tree(num_nodes={self.num_nodes}, depth={self.depth}{lookup}{candidates})"


def most_nodes(widths: Iterable[int]) -> int:
    """Return the nodes of the largest tree that heads with these numbers of candidates can fill, at most 256."""
    return min(MAX_CHOICES + 1, sum(itertools.accumulate(widths, operator.mul, initial=1)))


def _int32(values: list[Any]) -> torch.Tensor:
    import torch

    return torch.tensor(values, dtype=torch.int32)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _ordered(choices: Iterable[Sequence[int]], most: int) -> list[list[int]]:
    paths: list[tuple[int, ...]] = []
    if not isinstance(choices, Iterable) or hasattr(choices, "dtype"):
        raise ValueError(f"choices: expected a list of paths, got {shown(choices)}")
    for path in choices:
        if isinstance(path, (str, bytes)) or not isinstance(path, Sequence):
            raise ValueError(f"choices: expected paths (lists of ranks), got {shown(path)}")
        if len(path) > MAX_CHOICES:
            raise ValueError(f"choices: expected paths of at most {MAX_CHOICES} ranks, got one of {len(path):,}")
        if not path or not all(_is_whole(rank) and 0 <= rank < 2**31 for rank in path):
            raise ValueError(f"choices: expected a non-empty path of ranks of at least 0, got {shown(path)}")
        if len(paths) == most:
            raise ValueError(f"choices: expected at most {most} paths, got {most + 1} or more")
        paths.append(tuple(path))
    known = set(paths)
    for path in paths:
        if len(path) > 1 and path[:-1] not in known:
            raise ValueError(f"choices: path {list(path)} needs its prefix {list(path[:-1])}, which is missing")
    if len(known) < len(paths):
        repeated = next(path for path in paths if paths.count(path) > 1)
        raise ValueError(f"choices: path {list(repeated)} is given twice")
    return [list(path) for path in sorted(paths, key=lambda p: (len(p), p))]


def _checked_accuracies(accuracies: Sequence[Sequence[float]]) -> list[list[float]]:
    try:
        rows = [[float(value) for value in row] for row in accuracies]
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise ValueError(f"accuracies: expected a list of numbers for each head, got {shown(accuracies)}") from error
    for k, row in enumerate(rows):
        if not row:
            raise ValueError(f"accuracies: head {k} has no rank; give at least one")
        for value in row:
            if not 0.0 <= value <= 1.0:
                raise ValueError(f"accuracies: expected values in [0, 1], got {value} for head {k}")
    return rows
