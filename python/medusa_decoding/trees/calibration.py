"""Calibration: which of the heads' drafts are right on the user's own prompts, one by one and along whole paths.

At each position of a text every head has a list of candidates; the places of the true tokens in these lists are one
path of ranks. Counts of paths hold all that a tree can be weighed with: how often each rank is right (Medusa paper,
section 2.3.3), and how often a whole path is, without taking heads as independent. A position counts if the text goes
on for as long as the heads reach, so that every share is one of the same positions: the last K tokens of a text are
targets only.

What counts do not hold is the order of the positions, and steps of decoding do not land on all of them: those that an
accepted path passes over start no step. So each text's paths are kept in order as well, up to its end (see `walk`).

This module knows counts; it does not know where they come from (see `calibrate`) nor which tree is best (see `search`).
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

from medusa_decoding.files import read_json_object, write_json
from medusa_decoding.trees.tree import Tree

NONE = -1
"""The rank of a token that is not among a head's candidates."""
MOST_RANKS = 10
"""A rank is a character of the file."""
Z = 1.959963984540054
"""Half the width of a normal distribution's 95 % interval, in standard deviations."""
RankPath = tuple[int, ...]
Text = tuple[RankPath, ...]
"""The path of ranks at each position of a text at which a step may start: one fewer than it has tokens."""
FORMAT = 2
"""Of the file. Files without `format` (1) have no texts."""


def wilson(hits: int, total: int) -> tuple[float, float]:
    """Return the 95 % score interval of a share (Wilson, 1927), taking trials as independent; (0, 1) without any."""
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
        ranks: R, candidates of a head that were looked at, 1 to 10.
        paths: how many positions have each path of ranks, of length K; NONE where a head did not name the token.
        made: what was measured and how, by name: fingerprints, prompts, settings, versions, texts, tokens.
        texts: the texts of each prompt, position by position; a rank beyond a text's end is NONE. None in files that
            were written before these were kept.

    Raises:
        ValueError: no heads, ranks out of bounds, a path of another length or with other ranks, a count below 1, no
            path at all, texts that have other paths than were counted.
    """

    num_heads: int
    ranks: int
    paths: Mapping[RankPath, int]
    made: Mapping[str, Any] = field(default_factory=dict)
    texts: tuple[tuple[Text, ...], ...] | None = None

    def __post_init__(self) -> None:
        for name, value, fits in (
            ("num_heads", self.num_heads, "from 1"),
            ("ranks", self.ranks, f"from 1 to {MOST_RANKS}"),
        ):
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not whole or value < 1 or (name == "ranks" and value > MOST_RANKS):
                raise ValueError(f"{name}: expected a whole number {fits}, got {value!r}")
        for path, count in self.paths.items():
            if len(path) != self.num_heads or not all(rank == NONE or 0 <= rank < self.ranks for rank in path):
                raise ValueError(
                    f"paths: expected {self.num_heads} ranks below {self.ranks} (or {NONE}) each, got {list(path)}"
                )
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"paths: expected a count from 1 for {list(path)}, got {count!r}")
        if not self.paths:
            raise ValueError("paths: expected at least one, got none")
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
        """Count the paths of texts.

        Args:
            num_heads: K.
            ranks: R.
            texts: of each prompt.
            made: see the class.

        Raises:
            ValueError: see the class.
        """
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
        """Positions at which the token is among the n likeliest of each head, n from 1: a row of R a head."""
        return [list(accumulate(row)) for row in self._alone]

    @property
    def accuracies(self) -> list[list[float]]:
        """Share of positions at which each head's n-th best alone is right: what `Tree.optimal` takes."""
        return [[count / self.positions for count in row] for row in self._alone]

    def count(self, path: Sequence[int]) -> int:
        """Return at how many positions a whole path of ranks from the root is right."""
        return self._beginnings[tuple(path)]

    def shares(self, tree: Tree) -> list[float]:
        """Return how likely each of a tree's choices is right, its ancestors included.

        Raises:
            ValueError: a tree that the heads cannot fill, or with ranks that were not looked at.
        """
        tree.check_fits(self.num_heads, self.ranks)
        return [self.count(path) / self.positions for path in tree.choices]

    def expected_tokens(self, tree: Tree) -> float:
        """Return the expected tokens a step, root included, at a position drawn at random; no independence is assumed.

        Real steps commit fewer: one that accepts much passes over easy positions, so that steps land on hard ones more
        often (docs/trees.md has figures); `walk.walk` follows them. A copied branch is not counted.

        Raises:
            ValueError: a tree that the heads cannot fill, with ranks that were not looked at, or dynamic.
        """
        if tree.keep is not None:
            raise ValueError("tree: expected a static one, got a dynamic one, whose nodes are another step's others")
        return 1.0 + sum(self.shares(tree))

    def to_json(self) -> dict[str, Any]:
        """Return all as JSON has it; `accuracy` is what `medusa simulate --accuracies` reads as well."""
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
            ValueError: anything else, or counts that contradict each other.
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
            paths = {ranks_of(name): count for name, count in values["paths"].items()}
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
            ValueError: another file; it is named.
            OSError: it cannot be read.
        """
        try:
            return cls.from_json(read_json_object(path))
        except ValueError as error:
            raise ValueError(f"{path}: expected a file that `medusa calibrate` wrote, got: {error}") from error


def name_of(path: Iterable[int]) -> str:
    """Return a path as text: its ranks, and a dash where there is none."""
    return " ".join("-" if rank == NONE else str(rank) for rank in path)


def ranks_of(name: str) -> RankPath:
    """Return the path that `name_of` has made text of."""
    return tuple(NONE if rank == "-" else int(rank) for rank in name.split(" "))


def text_name_of(text: Text) -> str:
    """Return a text's paths as text: a character a rank, a dash where there is none, position behind position."""
    return "".join("-" if rank == NONE else str(rank) for path in text for rank in path)


def text_of(name: str, num_heads: int) -> Text:
    """Return the text that `text_name_of` has made text of."""
    ranks = [NONE if rank == "-" else int(rank) for rank in name]
    if len(ranks) % num_heads:
        raise ValueError(f"texts: expected {num_heads} ranks a position, got {len(ranks)} in all")
    return tuple(tuple(ranks[start : start + num_heads]) for start in range(0, len(ranks), num_heads))


def alone(paths: Mapping[RankPath, int], num_heads: int, ranks: int) -> list[list[int]]:
    """Count how often each rank of each head alone is right: [K][R]."""
    counts = [[0] * ranks for _ in range(num_heads)]
    for path, count in paths.items():
        for head, rank in enumerate(path):
            if rank != NONE:
                counts[head][rank] += count
    return counts


def beginnings(paths: Mapping[RankPath, int]) -> Counter[RankPath]:
    """Count the beginnings of paths, the empty one too, up to the first unknown rank."""
    counts: Counter[RankPath] = Counter()
    for path, count in paths.items():
        known = path[: path.index(NONE)] if NONE in path else path
        for length in range(len(known) + 1):
            counts[known[:length]] += count
    return counts


def counted(texts: Iterable[Iterable[Text]], num_heads: int) -> Counter[RankPath]:
    """Count the paths of those positions behind which a text goes on for as long as the heads reach."""
    counts: Counter[RankPath] = Counter()
    for text in (text for of_prompt in texts for text in of_prompt):
        counts.update(text[: max(0, len(text) - num_heads + 1)])
    return counts
