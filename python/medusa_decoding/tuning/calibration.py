"""Calibration: how often the heads' draft tokens are right on the user's own prompts, alone and along whole paths.

At each position of a text, every head ranks its candidates; the ranks of the actual next tokens form one path of ranks.
Counts of these paths give the accuracy of each rank (Medusa paper, section 2.3.3) and of each whole path, without
assuming that heads are independent. A position only counts if the text continues for at least K tokens, so that all
shares refer to the same positions.

Counts lose the order of the positions, and decoding does not start a step at all of them: an accepted path skips some.
So the paths of each text are also kept in order (see `replay.walk`).
"""

from __future__ import annotations

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
RankPath = tuple[int, ...]
Text = tuple[RankPath, ...]
"""The path of ranks at each position of a text at which a step may start: one fewer than the text has tokens."""
FORMAT = 2
"""Of the file."""


@dataclass(frozen=True)
class Calibration:
    """Ranks of the tokens of texts among the heads' candidates.

    Args:
        num_heads: K.
        ranks: R, counted candidates per head, 1 to 10.
        texts: of each prompt, in order.
        made: what was measured and how, by name: fingerprints, prompts, settings, versions, texts, tokens.

    Raises:
        ValueError: ranks outside of 1 to 10, a path of another length or with a rank that is not below `ranks` (or that
            is known beyond its text's end), no text as long as the heads reach.
    """

    num_heads: int
    ranks: int
    texts: Sequence[Sequence[Text]]
    made: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_count("num_heads", self.num_heads)
        object.__setattr__(self, "texts", tuple(map(tuple, self.texts)))
        if type(self.ranks) is not int or not 1 <= self.ranks <= MOST_RANKS:
            raise ValueError(f"ranks: expected a whole number from 1 to {MOST_RANKS}, got {self.ranks!r}")
        for text in (text for texts in self.texts for text in texts):
            for left, path in zip(range(len(text), 0, -1), text, strict=True):
                known = len(path) == self.num_heads and all(NONE <= rank < self.ranks for rank in path)
                if not known or any(rank != NONE for rank in path[left:]):
                    raise ValueError(
                        f"texts: expected {self.num_heads} ranks below {self.ranks} (or {NONE}, which they are beyond "
                        f"the text's end) a position, got {list(path)} with {left} tokens to come"
                    )
        if not self.paths:
            raise ValueError(f"texts: expected one of more than {self.num_heads} tokens, as far as the heads reach")

    @cached_property
    def paths(self) -> Counter[RankPath]:
        """How many positions have each path of ranks, of length K; NONE if a token is not among the candidates."""
        return counted(self.texts, self.num_heads)

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

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form; `python -m benchmarks.simulator --accuracies` reads its `accuracy`."""
        return {
            "format": FORMAT,
            "made": dict(self.made),
            "accuracy": {"hits": self.hits, "total": [self.positions] * self.num_heads},
            "ranks": self.ranks,
            "texts": [[*map(text_name_of, texts)] for texts in self.texts],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Calibration:
        """Read what `to_json` returned.

        Raises:
            ValueError: it is something else, or its counts contradict each other.
        """
        if values.get("format") != FORMAT:
            raise ValueError(f"format: expected {FORMAT}, got {values.get('format')!r}; run `medusa calibrate` again")
        try:
            hits, total = values["accuracy"]["hits"], values["accuracy"]["total"]
            texts = [[text_of(name, len(hits)) for name in names] for names in values["texts"]]
            found = cls(len(hits), values["ranks"], texts, dict(values["made"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"calibration: expected made, accuracy, ranks and texts, got {error!r}") from error
        sums = found.hits, [found.positions] * found.num_heads
        if sums != (hits, total):
            raise ValueError(f"calibration: expected hits and totals that the texts add up to, {sums}, got others")
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


def text_name_of(text: Text) -> str:
    """Return the paths of a text as one string: one character per rank, with a dash for NONE."""
    return "".join("-" if rank == NONE else str(rank) for path in text for rank in path)


def text_of(name: str, num_heads: int) -> Text:
    """Inverse of `text_name_of`."""
    if len(name) % num_heads:
        raise ValueError(f"texts: expected {num_heads} ranks a position, got {len(name)} in all")
    ranks = [NONE if rank == "-" else int(rank) for rank in name]
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


def shared_prompts(one: Any, other: Any) -> int:
    """Count the prompts of one set that are also in another one; both are `prompts` of what `Writer.describe` returned.

    A set of a file that does not name its prompts counts as empty.
    """
    first, second = (prompts.get("each") or [] if isinstance(prompts, dict) else [] for prompts in (one, other))
    return sum(name in second for name in first)
