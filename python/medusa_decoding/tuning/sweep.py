"""Every tree that was to choose from, in real generations: whether the chosen one is the fastest.

Texts are written with each tree in turn, in an order shuffled anew for each text and round. A tree's rate is its tokens
over its steps' time, of each text the median of its rounds; prefills, which are the same for all trees, are left out.
This module does not know models or tokenizers.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from medusa_decoding.evaluation import interval
from medusa_decoding.evaluation.interval import Interval
from medusa_decoding.trees.tree import Tree


@dataclass(frozen=True)
class Written:
    """One text: tokens committed by steps, steps, and the time of the steps."""

    tokens: int
    steps: int
    seconds: float


@dataclass(frozen=True)
class Swept:
    """What one tree gave.

    Attributes:
        tree: the tree.
        rate: tokens a second over all texts.
        low, high: the slowest and the fastest round's rate.
        tokens_per_step: over all texts.
        texts: of each text its tokens and the median of its rounds' seconds.
    """

    tree: Tree
    rate: float
    low: float
    high: float
    tokens_per_step: float
    texts: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Verdict:
    """Where the chosen tree stands among all.

    Attributes:
        rank: 1 if no tree is faster.
        behind: share of the fastest tree's rate that it lacks; below 0 where trees chosen text by text are faster than
            any one of them.
        best: the fastest tree.
        rate: tokens a second with the chosen tree, or the chosen trees.
        of_best: their rate over the fastest tree's, with a 95 % interval (bootstrap over texts); None where texts were
            not kept apart. The fastest tree is the one that came out fastest here: where one tree was chosen for all
            texts, the ratio is at most 1 by construction, and below 1 also where trees are equally fast but for chance.
    """

    rank: int
    behind: float
    best: Tree
    rate: float
    of_best: Interval | None = None


def sweep(
    write: Callable[[int, Tree], Written],
    trees: Sequence[Tree],
    texts: int,
    *,
    rounds: int = 3,
    warm_all: bool = False,
    seed: int = 0,
    on_text: Callable[[], object] = lambda: None,
) -> list[Swept]:
    """Write texts with every tree.

    Args:
        write: writes the text of this number with a tree.
        trees: what to compare.
        texts: how many texts there are.
        rounds: times that each text is written with each tree.
        warm_all: write every text once with each tree before anything counts (for steps that are made at first use and
            for one shape), instead of the first one alone.
        seed: of the orders.
        on_text: called behind each text that counts, for a progress bar.

    Returns:
        What each tree gave, in the order of `trees`.

    Raises:
        ValueError: no trees, texts or rounds, or texts in which no step committed anything.
    """
    for name, value in (("trees", len(trees)), ("texts", texts), ("rounds", rounds)):
        if value < 1:
            raise ValueError(f"{name}: expected at least 1, got {value}")
    for text in range(texts if warm_all else 1):
        for tree in trees:
            write(text, tree)
    shuffler, order = random.Random(seed), list(range(len(trees)))
    found: list[list[list[Written]]] = [[[] for _ in range(rounds)] for _ in trees]
    for number in range(rounds):
        for text in range(texts):
            shuffler.shuffle(order)
            for place in order:
                found[place][number].append(write(text, trees[place]))
                on_text()
    return [_added(tree, written) for tree, written in zip(trees, found, strict=True)]


def _added(tree: Tree, rounds: Sequence[Sequence[Written]]) -> Swept:
    tokens, steps = (sum(getattr(one, name) for one in rounds[0]) for name in ("tokens", "steps"))
    if not steps:
        raise ValueError("texts: expected some of more than one new token, got none")
    texts = tuple(
        (text[0].tokens, statistics.median(one.seconds for one in text)) for text in zip(*rounds, strict=True)
    )
    rates = [tokens / sum(one.seconds for one in written) for written in rounds]
    seconds = sum(seconds for _, seconds in texts)
    return Swept(tree, tokens / seconds, min(rates), max(rates), tokens / steps, texts)


def judge(chosen: Tree | Sequence[Tree], found: Sequence[Swept]) -> Verdict:
    """Say where a tree stands, or a choice of one for each text.

    Args:
        chosen: one tree for all texts, or each text's.
        found: what every tree gave.

    Raises:
        ValueError: a tree that is not among those found, or a choice for other texts.
    """
    own = _chosen([chosen] if isinstance(chosen, Tree) else chosen, found)
    fastest = max(found, key=lambda one: one.rate)
    rank = 1 + sum(one.rate > own.rate for one in found)
    columns = [(*a, *b) for a, b in zip(own.texts, fastest.texts, strict=True)]
    of_best = interval.ratio_of_rates(columns) if columns else None
    return Verdict(rank, 1.0 - own.rate / fastest.rate, fastest.tree, own.rate, of_best)


@dataclass(frozen=True)
class _Chosen:
    rate: float
    texts: tuple[tuple[int, float], ...]


def _chosen(trees: Sequence[Tree], found: Sequence[Swept]) -> _Chosen:
    """Put together what the chosen trees gave."""
    for tree in trees:
        if all(one.tree != tree for one in found):
            raise ValueError(f"chosen: expected one of the trees that were compared, got {tree}")
    first = next(one for one in found if one.tree == trees[0])
    if all(tree == trees[0] for tree in trees):
        return _Chosen(first.rate, first.texts)
    if len(trees) != len(first.texts):
        raise ValueError(f"chosen: expected a tree for each of {len(first.texts)} texts, got {len(trees)}")
    texts = tuple(next(one for one in found if one.tree == tree).texts[place] for place, tree in enumerate(trees))
    return _Chosen(sum(tokens for tokens, _ in texts) / sum(seconds for _, seconds in texts), texts)
