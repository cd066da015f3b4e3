"""Choose the tree with the most tokens per second: expected tokens of a step over the step's duration on this device.

Expected tokens come from the heads' accuracies (Medusa paper, section 2.3.3). If a calibration has texts, trees are
searched and weighed by walking along them instead, as steps do. A tree is chosen only if the durations can tell it from
plain decoding. This module does not know how durations were measured.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from medusa_decoding.checkpoints.accuracies import (
    CALIBRATION,
    Accuracies,
    default_accuracies,
    find_accuracies,
    load_accuracies,
    max_ranks,
)
from medusa_decoding.checkpoints.tuning_file import Case, Conditions, TimedTree, Tuning, fastest, step_time_names
from medusa_decoding.decode.adaptive.acceptance import padded
from medusa_decoding.decode.adaptive.step_times import KEPT, StepTimes
from medusa_decoding.evaluation import interval
from medusa_decoding.heads import MedusaHeads
from medusa_decoding.provenance import LIBRARIES, versions
from medusa_decoding.trees.tree import Tree
from medusa_decoding.tuning.calibration import Calibration
from medusa_decoding.tuning.replay import walk
from medusa_decoding.tuning.search import walked_tree
from medusa_decoding.tuning.step_timer import Latency


def load_knowledge(
    file: Path | None, folder: Path, heads: MedusaHeads, base_model: str
) -> tuple[Accuracies, Calibration | None]:
    """Return how often heads are right, and the calibration that says so, if one does.

    Args:
        file: of `medusa calibrate`, or None for what is stored next to the heads.
        folder: of the heads.
        heads: as loaded.
        base_model: the fingerprint of the base model as loaded.
    """
    if file is not None:
        accuracies = load_accuracies(file, CALIBRATION, folder, heads, base_model)
    else:
        accuracies = find_accuracies(folder, heads, base_model) or default_accuracies(heads)
    if accuracies.calibration is None:
        return accuracies, None
    file, ranks = folder / accuracies.calibration.path, max_ranks(heads)  # an absolute path stays what it is
    texts = Calibration.load(file)
    if texts.ranks > ranks:
        raise ValueError(f"{file}: expected at most {ranks} ranks, as these heads have, got {texts.ranks}")
    return accuracies, texts


def best_trees(
    accuracies: Sequence[Sequence[float]], sizes: Sequence[int], texts: Calibration | None = None
) -> list[Tree]:
    """Return the best tree of each size (nodes, root included), `Tree([])` for size 1.

    They are searched by walking along `texts`, or, without texts, by `accuracies` (a list per head, one per rank) as if
    heads were independent.
    """

    def search(size: int) -> Tree:
        return walked_tree(texts, size) if texts is not None else Tree.optimal(accuracies, size)

    return [search(size) if size > 1 else Tree([]) for size in sizes]


def expected_tokens(
    trees: Sequence[Tree], accuracies: Sequence[Sequence[float]], texts: Calibration | None = None
) -> list[float]:
    """Return the expected tokens per step of each tree, with arguments as in `best_trees`.

    Ranks and heads without an accuracy count as never right.
    """
    if texts is not None:
        return [walk(texts, tree).tokens_per_step for tree in trees]
    return [tree.expected_tokens(padded(accuracies, tree)) for tree in trees]


def timed_trees(trees: Sequence[Tree], tokens: Sequence[float], measured: Sequence[Latency]) -> list[TimedTree]:
    """Join trees with their expected tokens and the durations of their steps, all in the same order."""
    return [
        TimedTree(tree, expected, one.typical, one.median, *one.quartiles, len(one.seconds))
        for tree, expected, one in zip(trees, tokens, measured, strict=True)
    ]


def new_case(trees: Sequence[Tree], tokens: Sequence[float], measured: Sequence[Latency]) -> Case:
    """Choose a tree for the batch and the prefix that steps were timed with.

    The fastest tree is chosen if its 95 % interval over plain decoding (bootstrap over rounds) is above 1, and plain
    decoding if it is below 1. Otherwise the durations do not tell, and the case's tree is "auto".

    Args:
        trees: trees of which one is plain decoding.
        tokens: expected tokens of each.
        measured: durations of each, timed in the same rounds.
    """
    timed = sorted(timed_trees(trees, tokens, measured), key=lambda one: one.nodes)
    first, latency = measured[0], dict(zip(trees, measured, strict=True))
    others = [one for one in timed if one.nodes > 1]
    if not others:
        return Case(first.batch, first.prefix, first.rows, Tree([]), tuple(timed))
    best = fastest(others)
    rounds = zip(latency[Tree([])].rounds, latency[best.tree].rounds, strict=True)
    found = interval.ratio([(best.tokens * plain, tree) for plain, tree in rounds])
    if found is None or found.low is None or found.high is None:
        return Case(first.batch, first.prefix, first.rows, "auto", tuple(timed))
    tree: Tree | Literal["auto"] = best.tree if found.low > 1 else Tree([]) if found.high < 1 else "auto"
    return Case(first.batch, first.prefix, first.rows, tree, tuple(timed), gain=(found.value, found.low, found.high))


def new_tuning(
    conditions: Conditions, accuracies: Accuracies, cases: Iterable[Case], measured: Iterable[Latency]
) -> Tuning:
    """Put together the content of a tuning file from one case per batch and prefix, and all measured durations."""
    times = StepTimes(*step_time_names(conditions))
    for one in measured:
        for seconds in _thinned(one.seconds):
            times.profile(one.batch, one.rows).add(one.nodes, seconds)
    return Tuning(
        conditions,
        accuracies,
        tuple(sorted(cases, key=lambda case: (case.batch, case.prefix))),
        times.to_json(),
        versions(*LIBRARIES),
    )


def _thinned(seconds: Sequence[float]) -> list[float]:
    """Return as many durations as `StepTimes` keeps: evenly spaced quantiles, so that the median is that of all."""
    if len(seconds) <= KEPT:
        return list(seconds)
    return statistics.quantiles(seconds, n=KEPT + 1, method="inclusive")[:KEPT]
