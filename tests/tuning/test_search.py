"""Tree searches, compared with all possible trees and with a sort of all paths."""

import itertools
import math
import random

import pytest
from calibrations import with_counts
from hypothesis import given, settings
from hypothesis import strategies as st

from medusa_decoding import Tree
from medusa_decoding.trees.tree import most_nodes
from medusa_decoding.tuning.calibration import NONE, Calibration
from medusa_decoding.tuning.expected import PATHS, PRODUCTS, WALK, search_trees
from medusa_decoding.tuning.search import joint_tree


def every_tree(heads, ranks, size):
    """All prefix-closed sets of `size` paths."""
    paths = [path for d in range(1, heads + 1) for path in itertools.product(range(ranks), repeat=d)]
    for subset in itertools.combinations(paths, size):
        chosen = set(subset)
        if all(len(path) == 1 or path[:-1] in chosen for path in chosen):
            yield chosen


def steps_tokens(paths, choices):
    """Mean tokens per step, position by position: the root, then as deep as the tree contains the text."""
    tokens = 0
    for path, count in paths.items():
        depth = 0
        while depth < len(path) and path[: depth + 1] in choices:
            depth += 1
        tokens += count * (1 + depth)
    return tokens / sum(paths.values())


@st.composite
def counts(draw):
    heads, ranks = draw(st.sampled_from([(1, 4), (2, 2), (2, 3), (3, 2)]))
    rank = st.integers(NONE, ranks - 1)
    paths = draw(st.dictionaries(st.tuples(*[rank] * heads), st.integers(1, 20), min_size=1, max_size=12))
    return with_counts(paths, ranks)


@given(counts(), st.integers(0, 4))
@settings(max_examples=60, deadline=None)
def test_joint_tree_is_the_best_of_all_trees(calibration, size):
    heads, ranks = calibration.num_heads, calibration.ranks
    size = min(size, sum(ranks**depth for depth in range(1, heads + 1)))
    best = max(steps_tokens(calibration.paths, chosen) for chosen in every_tree(heads, ranks, size))
    tree = joint_tree(calibration, size + 1)
    assert tree.num_nodes == size + 1
    assert steps_tokens(calibration.paths, {*map(tuple, tree.choices)}) == pytest.approx(best, abs=1e-12)
    assert 1 + sum(calibration.shares(tree)) == pytest.approx(best, abs=1e-12)


@given(st.integers(0, 10_000), st.sampled_from([(2, 3), (3, 2), (1, 5)]), st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_products_search_is_the_best_of_all_trees(seed, shape, size):
    """Accuracies may rise with the rank, and be zero."""
    drawn = random.Random(seed)
    heads, ranks = shape
    accuracies = [[drawn.choice([0.0, drawn.random()]) for _ in range(ranks)] for _ in range(heads)]
    size = min(size, sum(ranks**depth for depth in range(1, heads + 1)))
    best = max(
        1 + sum(math.prod(accuracies[k][rank] for k, rank in enumerate(path)) for path in chosen)
        for chosen in every_tree(heads, ranks, size)
    )
    tree = Tree.optimal(accuracies, size + 1)
    found = sum(math.prod(accuracies[k][rank] for k, rank in enumerate(path)) for path in tree.choices)
    assert 1 + found == pytest.approx(best, abs=1e-12)
    assert (tree.num_nodes, tree.expected_tokens(accuracies)) == (size + 1, pytest.approx(best, abs=1e-12))


def test_unseen_paths_are_ordered_by_their_product():
    # [0, 0] is seen; of the rest, all equal, the likeliest by product is [1, 0]: 0.25 * 0.5.
    calibration = with_counts({(0, 0): 2, (1, NONE): 1, (NONE, 1): 1})
    assert joint_tree(calibration, 4).choices == [[0], [1], [0, 0]]
    # 0.5 * 0.25 beats 0.25 * 0.5 by its place alone, and both beat 0.25 * 0.25.
    assert joint_tree(calibration, 6).choices == [[0], [1], [0, 0], [0, 1], [1, 0]]


def test_comparison_of_texts_has_a_third_tree():
    """If the draft token is right at every second position only, all steps but the first start at the others."""
    right, wrong = (0, NONE), (1, NONE)
    text = (right, right, wrong) * 10
    found = Calibration(2, 2, [(text,)])
    ((products, paths, walked),) = search_trees(found, [2])
    assert [one.by for one in (products, paths, walked)] == [PRODUCTS, PATHS, WALK]
    # Rank 0 is right at two of three positions; but its steps start at 0, 2, 3, 5, ..: two steps for three tokens.
    assert paths.tree == Tree([[0]])
    assert paths.expected.walked.value == pytest.approx(30 / 20)
    assert walked.expected.walked.value >= paths.expected.walked.value
    assert paths.expected.paths.value > 1.6


def test_the_number_of_nodes_is_limited():
    assert [most_nodes([width] * heads) for heads, width in ((0, 10), (1, 10), (2, 3), (3, 6), (5, 10))] == [
        1, 11, 13, 256, 256
    ]  # fmt: skip


@pytest.mark.parametrize(("nodes", "words"), [(0, "1 to 256"), (257, "1 to 256"), (8, "at most 7 with these heads")])
def test_impossible_sizes_are_refused(nodes, words):
    with pytest.raises(ValueError, match=rf"num_nodes: expected {words}.*, got {nodes}"):
        joint_tree(with_counts({(0, 0): 1}), nodes)
