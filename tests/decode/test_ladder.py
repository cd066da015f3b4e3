"""The trees of a tree set, and whether the acceptance model converges to the heads' true accuracy."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence

import pytest
from simulation import GOOD

from medusa_decoding import Tree
from medusa_decoding.decode.adaptive.acceptance import AcceptanceModel, TreeSet

# The tree set


def test_the_tree_set_is_plain_decoding_and_the_optimal_trees():
    tree_set = TreeSet(GOOD)
    assert [tree.num_nodes for tree in tree_set.trees] == [1, 4, 8, 16, 32, 64]
    for tree in tree_set.trees[1:]:
        assert tree == Tree.optimal(GOOD, tree.num_nodes)


@pytest.mark.parametrize(
    ("accuracies", "sizes"),
    [([], [1]), ([[0.5]], [1, 2]), ([[0.3] * 2, [0.2] * 2], [1, 4]), ([[0.2] * 3, [0.2] * 2], [1, 4, 8])],
)
def test_only_trees_that_the_heads_can_fill(accuracies, sizes):
    assert [tree.num_nodes for tree in TreeSet(accuracies).trees] == sizes


# The acceptance model


def scaled(model: AcceptanceModel, first: float, deeper: float) -> list[list[float]]:
    """Probability of continuing, by tree and depth, with the tree set's odds times two factors."""
    found = []
    for odds_against in model.tree_set.odds_against:
        odds = [(first if depth == 0 else deeper) / against for depth, against in enumerate(odds_against)]
        found.append([value / (1 + value) for value in odds])
    return found


def draw(chances: Sequence[float], draws: random.Random) -> int:
    count = 1
    for chance in chances:
        if draws.random() >= chance:
            break
        count += 1
    return count


@pytest.mark.parametrize(("first", "deeper"), [(0.3, 2.0), (2.5, 0.4), (1.0, 1.0)])
def test_one_tree_informs_all_others_and_the_error_shrinks_with_memory(first, deeper):
    errors = {}
    for memory in (10, 1000):
        model = AcceptanceModel(TreeSet(GOOD), memory=memory)
        chances = scaled(model, first, deeper)
        truth = [1 + sum(math.prod(row[: d + 1]) for d in range(len(row))) for row in chances]
        draws, found = random.Random(1), []
        for step in range(6000):
            model.observe(4, [draw(chances[4], draws)])
            if step >= 3000:
                found.append([got / wanted - 1 for got, wanted in zip(model.tokens, truth, strict=True)])
        errors[memory] = max(math.sqrt(statistics.mean(row[i] ** 2 for row in found)) for i in range(len(truth)))
        bias = max(abs(statistics.mean(row[i] for row in found)) for i in range(len(truth)))
        assert bias < 0.05, memory
    assert errors[1000] < 0.03
    assert errors[10] > 3 * errors[1000]
