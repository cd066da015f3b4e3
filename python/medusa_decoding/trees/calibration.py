"""Calibration: how often the heads' draft tokens are right on the user's own prompts, alone and along whole paths.

At each position of a text, every head ranks its candidates; the ranks of the actual next tokens form one path of ranks.
Counts of these paths give the accuracy of each rank (Medusa paper, section 2.3.3) and of each whole path, without
assuming that heads are independent. A position only counts if the text continues for at least K tokens, so that all
shares refer to the same positions.

Counts lose the order of the positions, and decoding does not start a step at all of them: an accepted path skips some.
So the paths of each text are also kept in order (see `replay.walk`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from medusa_decoding.checks import check_count
from medusa_decoding.files import read_json_object, write_json
from medusa_decoding.trees.tree import Tree

NONE = -1
"""Rank of a token that is not among a head's candidates."""
MOST_RANKS = 10
"""Each rank is one character in the file."""
Z = 1.959963984540054
"""Half the width of a normal distribution's 95 % interval, in standard deviations."""
RankPath = tuple[int, ...]
Text = tuple[RankPath, ...]
"""The path of ranks at each position of a text at which a step may start: one fewer than the text has tokens."""
FORMAT = 2
"""Of the file. Files without `format` (1) have no texts."""


def wilson(hits: int, total: int) -> tuple[float, float]:
    """Return the 95 % score interval of a share of independent trials (Wilson, 1927); (0, 1) without trials."""
    if not total:
        return 0.0, 1.0
    share, square = hits / total, Z * Z / total
    middle = (share + square / 2) / (1 + square)
    half = Z / (1 + square) * math.sqrt(share * (1 - share) / total + square / (4 * total))
    # At the ends the two are equal but for rounding.
    low, high = 0.0 if hits == 0 else middle - half, 1.0 if hits == total else middle + half
    return max(0.0, low), min(1.0, high)


@dataclass(frozen=True)
class Calibration:
    """Counts of paths.

    Args:
        num_heads: K.
        ranks: R, counted candidates per head, 1 to 10.
        paths: number of positions for each path of ranks, of length K; NONE if the token is not among the candidates.
        made: what was measured and how, by name: fingerprints, prompts, settings, versions, texts, tokens.
        texts: the texts of each prompt, position by position; a rank after the end of the text is NONE. None if the
            file has format 1.

    Raises:
        ValueError: there are no heads or no paths, ranks are out of bounds, a path has another length, a count is below
            1, or the texts have other paths than `paths`.
    """

    num_heads: int
    ranks: int
    paths: Mapping[RankPath, int]
    made: Mapping[str, Any] = field(default_factory=dict)
    texts: tuple[tuple[Text, ...], ...] | None = None

    def __post_init__(self) -> None:
        check_count("num_heads", self.num_heads)
        if type(self.ranks) is not int or not 1 <= self.ranks <= MOST_RANKS:
            raise ValueError(f"ranks: expected a whole number from 1 to {MOST_RANKS}, got {self.ranks!r}")
        for path, count in self.paths.items():
            if len(path) != self.num_heads or not all(rank == NONE or 0 <= rank < self.ranks for rank in path):
                raise ValueError(
                    f"paths: expected {self.num_heads} ranks below {self.ranks} (or {NONE}) each, got {list(path)}"
                )
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"paths: expected a count from 1 for {list(path)}, got {count!r}")
        if not self.paths:
            raise ValueError("paths: give at least one")
        if self.texts is None:
            return
        for text in (text for texts in self.texts for text in texts):
            for left, path in zip(range(len(text), 0, -1), text, strict=True):
                known = len(path) == self.num_heads and all(NONE <= rank < self.ranks for rank in path)
                if not known or any(rank != NONE for rank in path[left:]):
                    raise ValueError(
                        f"texts: expected {self.num_heads} ranks below {self.ranks} (or {NONE}, which they are beyond "
                        f"the text's end) a position, got {list(path)} with {left} tokens to come"
                    )
        if counted(self.texts, self.num_heads) != self.paths:
            raise ValueError("texts: expected the very paths that were counted, got others")

    @classmethod
    def of(
        cls, num_heads: int, ranks: int, texts: Iterable[Iterable[Text]], made: Mapping[str, Any] | None = None
    ) -> Calibration:
        """Count the paths of the texts of each prompt; arguments and errors as in the class."""
        kept = tuple(tuple(of_prompt) for of_prompt in texts)
        return cls(num_heads, ranks, dict(counted(kept, num_heads)), made or {}, kept)

    @cached_property
    def positions(self) -> int:
        """How many positions were counted."""
        return sum(self.paths.values())

    @cached_property
    def _alone(self) -> list[list[int]]:
        return alone(self.paths, self.num_heads, self.ranks)

    @cached_property
    def _beginnings(self) -> Counter[RankPath]:
        return beginnings(self.paths)

    @property
    def hits(self) -> list[list[int]]:
        """Positions at which the token is among the top n candidates, n from 1: one row of R counts per head."""
        return [list(accumulate(row)) for row in self._alone]

    @property
    def accuracies(self) -> list[list[float]]:
        """Accuracy of each rank of each head, as `Tree.optimal` takes it."""
        return [[count / self.positions for count in row] for row in self._alone]

    def count(self, path: Sequence[int]) -> int:
        """Return the number of positions at which a whole path of ranks is right."""
        return self._beginnings[tuple(path)]

    def shares(self, tree: Tree) -> list[float]:
        """Return the share of positions at which each of a tree's choices is right, including its ancestors.

        Raises:
            ValueError: the heads cannot fill the tree, or it has ranks that were not counted.
        """
        tree.check_fits(self.num_heads, self.ranks)
        return [self.count(path) / self.positions for path in tree.choices]

    def expected_tokens(self, tree: Tree) -> float:
        """Return the expected tokens per step, root included, at a random position, without assuming independence.

        Real steps give fewer: a step that accepts a long path skips easy positions, so steps start at hard ones more
        often (docs/trees.md has figures). `replay.walk` accounts for that. A copied branch is not counted.

        Raises:
            ValueError: the heads cannot fill the tree, it has ranks that were not counted, or it is dynamic.
        """
        if tree.keep is not None:
            raise ValueError("tree: expected a static one, got a dynamic one, which has no fixed nodes")
        return 1.0 + sum(self.shares(tree))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form; `python -m benchmarks.simulator --accuracies` reads its `accuracy`."""
        hits, total = self.hits, self.positions
        intervals = [[[round(end, 6) for end in wilson(count, total)] for count in row] for row in hits]
        # Known ranks first, so that the order is the same whatever the order of counting was.
        order = sorted(self.paths, key=lambda path: [rank if rank != NONE else self.ranks for rank in path])
        values = {
            "made": dict(self.made),
            "accuracy": {"hits": hits, "total": [total] * self.num_heads, "intervals": intervals},
            "ranks": self.ranks,
            "paths": {name_of(path): self.paths[path] for path in order},
        }
        if self.texts is not None:
            values = {"format": FORMAT} | values | {"texts": [[*map(text_name_of, texts)] for texts in self.texts]}
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Calibration:
        """Read what `to_json` returned.

        Raises:
            ValueError: it is something else, or its counts contradict each other.
        """
        if values.get("format", 1) not in (1, FORMAT):
            raise ValueError(f"format: expected 1 or {FORMAT}, got {values['format']}")
        try:
            accuracy, ranks, made = values["accuracy"], values["ranks"], values["made"]
            hits, total = accuracy["hits"], accuracy["total"]
            if not hits or not isinstance(made, dict):
                raise ValueError(
                    f"calibration: expected hits of at least one head and named fields in made, got {hits!r:.40} and "
                    f"{made!r:.40}"
                )
            paths = {ranks_of(name.split(" ")): count for name, count in values["paths"].items()}
            texts = None
            if "format" in values:
                texts = tuple(tuple(text_of(name, len(hits)) for name in names) for names in values["texts"])
            found = cls(len(hits), ranks, paths, made, texts)
            sums = found.hits, [found.positions] * found.num_heads
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"calibration: expected made, accuracy, ranks and paths, got {error!r}") from error
        if sums != (hits, total):
            raise ValueError(f"calibration: expected hits and totals that the paths add up to, {sums}, got others")
        return found

    def save(self, path: str | Path) -> None:
        """Write as JSON; the file appears whole or not at all."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """Read a file that `save` wrote.

        Raises:
            ValueError: it is another file; the message names it.
            OSError: it cannot be read.
        """
        try:
            return cls.from_json(read_json_object(path))
        except ValueError as error:
            raise ValueError(f"{path}: expected a file that `medusa calibrate` wrote, got: {error}") from error


def name_of(ranks: Iterable[int], between: str = " ") -> str:
    """Return ranks as text, with a dash for NONE."""
    return between.join("-" if rank == NONE else str(rank) for rank in ranks)


def ranks_of(names: Iterable[str]) -> RankPath:
    """Return ranks from their names, a dash for NONE."""
    return tuple(NONE if name == "-" else int(name) for name in names)


def text_name_of(text: Text) -> str:
    """Return the paths of a text as one string: one character per rank, with a dash for NONE."""
    return name_of((rank for path in text for rank in path), "")


def text_of(name: str, num_heads: int) -> Text:
    """Inverse of `text_name_of`."""
    ranks = ranks_of(name)
    if len(ranks) % num_heads:
        raise ValueError(f"texts: expected {num_heads} ranks a position, got {len(ranks)} in all")
    return tuple(ranks[start : start + num_heads] for start in range(0, len(ranks), num_heads))


def alone(paths: Mapping[RankPath, int], num_heads: int, ranks: int) -> list[list[int]]:
    """Count how often each rank of each head alone is right: [K][R]."""
    counts = [[0] * ranks for _ in range(num_heads)]
    for path, count in paths.items():
        for head, rank in enumerate(path):
            if rank != NONE:
                counts[head][rank] += count
    return counts


def beginnings(paths: Mapping[RankPath, int]) -> Counter[RankPath]:
    """Count all beginnings of paths, including the empty one, up to the first NONE."""
    counts: Counter[RankPath] = Counter()
    for path, count in paths.items():
        known = path[: path.index(NONE)] if NONE in path else path
        for length in range(len(known) + 1):
            counts[known[:length]] += count
    return counts


def counted(texts: Iterable[Iterable[Text]], num_heads: int) -> Counter[RankPath]:
    """Count the paths of the positions after which a text has at least `num_heads` tokens."""
    counts: Counter[RankPath] = Counter()
    for text in (text for of_prompt in texts for text in of_prompt):
        counts.update(text[: max(0, len(text) - num_heads + 1)])
    return counts


def shared_prompts(one: Any, other: Any) -> int | None:
    """Count the prompts of one set that are also in another one; None if a set does not tell.

    Both are `prompts` of what `Writer.describe` returned, or any other value that a file has there.
    """
    if not (isinstance(one, dict) and isinstance(other, dict) and one and other):
        return None
    if one == other:
        return int(one.get("count", 1))
    first, second = one.get("each"), other.get("each")
    if not (isinstance(first, list) and isinstance(second, list)):  # older files do not have these
        return None
    known = set(map(str, second))
    return sum(str(name) in known for name in first)
