"""Generate with every tree that `medusa tune` chose among, to see whether the chosen one is the fastest.

Each text is written with every tree, in an order shuffled for each text and round. A tree's rate is its tokens over the
time of its steps, with the median of the rounds for each text. Prefills are left out, because they are the same for all
trees. This module does not know models or tokenizers.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from medusa_decoding.checks import check_count
from medusa_decoding.evaluation import interval
from medusa_decoding.evaluation.interval import Interval
from medusa_decoding.trees.tree import Tree


@dataclass(frozen=True)
class Written:
    """One text: tokens from its steps, number of steps, and the duration of the steps."""

    tokens: int
    steps: int
    seconds: float


@dataclass(frozen=True)
class Swept:
    """The result of one tree.

    Attributes:
        texts: tokens of each text, and the median of its rounds' seconds.
        low, high: the rates of the slowest and the fastest round.
        tokens_per_step: over all texts.
    """

    tree: Tree
    texts: tuple[tuple[int, float], ...]
    low: float
    high: float
    tokens_per_step: float

    @property
    def rate(self) -> float:
        """Tokens per second over all texts."""
        return _rate(self.texts)


@dataclass(frozen=True)
class Verdict:
    """The chosen trees in comparison with all trees.

    Attributes:
        rank: 1 if no tree is faster.
        behind: share of the fastest tree's rate that the chosen ones lack; below 0 if trees chosen per text are faster
            than any single one.
        best: the fastest tree.
        rate: tokens per second with the chosen trees.
        of_best: their rate over the fastest tree's, with a 95 % interval (bootstrap over texts); None if it is not
            finite. The fastest tree is found on the same texts: if one tree was chosen for all of them, the ratio is at
            most 1 by construction, and below 1 by chance also if trees are equally fast.
    """

    rank: int
    behind: float
    best: Tree
    rate: float
    of_best: Interval | None


def sweep(
    write: Callable[[int, Tree], Written],
    trees: Sequence[Tree],
    texts: int,
    *,
    rounds: int = 3,
    warm_all: bool = False,
    on_text: Callable[[], object] = lambda: None,
) -> list[Swept]:
    """Write texts with every tree.

    Args:
        write: writes the text with this index with a tree.
        trees: what to compare.
        texts: number of texts.
        rounds: how often each text is written with each tree.
        warm_all: write every text once with each tree before anything counts, instead of the first text only. Needed if
            steps are made at the first use of a shape.
        on_text: called after each text that counts, for a progress bar.

    Returns:
        One result per tree, in the order of `trees`.

    Raises:
        ValueError: no trees, texts or rounds, or no text with a step.
    """
    for name, value in (("trees", len(trees)), ("texts", texts), ("rounds", rounds)):
        check_count(name, value)
    for text in range(texts if warm_all else 1):
        for tree in trees:
            write(text, tree)
    shuffler, order = random.Random(0), list(range(len(trees)))
    found: list[list[list[Written]]] = [[[] for _ in range(rounds)] for _ in trees]
    for number in range(rounds):
        for text in range(texts):
            shuffler.shuffle(order)
            for index in order:
                found[index][number].append(write(text, trees[index]))
                on_text()
    return [_summed(tree, written) for tree, written in zip(trees, found, strict=True)]


def _summed(tree: Tree, rounds: Sequence[Sequence[Written]]) -> Swept:
    tokens, steps = (sum(getattr(one, name) for one in rounds[0]) for name in ("tokens", "steps"))
    if not steps:
        raise ValueError("texts: none has more than one new token")
    texts = tuple(
        (text[0].tokens, statistics.median(one.seconds for one in text)) for text in zip(*rounds, strict=True)
    )
    rates = [tokens / sum(one.seconds for one in written) for written in rounds]
    return Swept(tree, texts, min(rates), max(rates), tokens / steps)


def judge(chosen: Sequence[Tree], found: Sequence[Swept]) -> Verdict:
    """Compare the trees chosen, one per text, with the results of all trees.

    Raises:
        ValueError: a tree that is not among those found, or another number of trees than texts.
    """
    by_tree = {one.tree: one.texts for one in found}
    for tree in chosen:
        if tree not in by_tree:
            raise ValueError(f"chosen: expected one of the trees that were compared, got {tree}")
    if len(chosen) != len(found[0].texts):
        raise ValueError(f"chosen: expected a tree for each of {len(found[0].texts)} texts, got {len(chosen)}")
    texts = [by_tree[tree][index] for index, tree in enumerate(chosen)]
    rate, best = _rate(texts), max(found, key=lambda one: one.rate)
    of_best = interval.ratio_of_rates([(*own, *other) for own, other in zip(texts, best.texts, strict=True)])
    return Verdict(1 + sum(one.rate > rate for one in found), 1.0 - rate / best.rate, best.tree, rate, of_best)


def _rate(texts: Sequence[tuple[int, float]]) -> float:
    return sum(tokens for tokens, _ in texts) / sum(seconds for _, seconds in texts)
