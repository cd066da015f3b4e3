"""Trees of the published checkpoints, recomputed from the published accuracies by sorting all paths."""

import itertools
import math

import pytest

from medusa_decoding.trees.published import ACCURACIES, published_tree

# The training logs of the original project: thousandths of top-1 to top-5, cumulative, one row per head.
TOP = {
    "lmsys/vicuna-7b-v1.3": """
        560 672 727 760 780
        316 424 485 528 563
        201 288 348 383 417
        147 225 274 311 340
        118 187 235 272 300""",
    "lmsys/vicuna-13b-v1.3": """
        594 705 758 792 816
        340 440 507 546 580
        216 309 361 403 436
        150 232 288 323 354
        122 196 243 279 307""",
    "lmsys/vicuna-33b-v1.3": """
        605 716 765 798 822
        356 469 529 569 596
        225 320 379 421 446
        160 249 307 348 376
        137 207 262 298 326""",
}


def alone(name):
    """Thousandths of each rank alone."""
    rows = [[int(value) for value in row.split()] for row in TOP[name].split("\n") if row.strip()]
    return [[more - less for less, more in zip([0, *row], row, strict=False)] for row in rows]


@pytest.mark.parametrize("nodes", [16, 64])
@pytest.mark.parametrize("name", TOP)
def test_trees_hold_the_paths_of_the_largest_products(name, nodes):
    rows = alone(name)
    products = {
        # Whole numbers over a common denominator, so that equal products are equal.
        path: math.prod(rows[k][rank] for k, rank in enumerate(path)) * 1000 ** (5 - depth)
        for depth in range(1, 6)
        for path in itertools.product(range(5), repeat=depth)
    }
    tree = published_tree(name, nodes)
    assert tree.num_nodes == nodes
    taken = {tuple(path) for path in tree.choices}
    least = min(products[path] for path in taken)
    assert all(product <= least for path, product in products.items() if path not in taken)


@pytest.mark.parametrize("name", TOP)
def test_accuracies_are_those_of_the_training_logs(name):
    assert ACCURACIES[name.removeprefix("lmsys/")] == [[value / 1000 for value in row] for row in alone(name)]


def test_names_of_published_checkpoints():
    tree = published_tree("lmsys/vicuna-7b-v1.3")
    assert tree.num_nodes == 64
    for name in ("vicuna-7b-v1.3", "/models/Vicuna-7B-v1.3/", "C:\\models\\vicuna-7b-v1.3"):
        assert published_tree(name) == tree
    for name in (None, "", "lmsys/vicuna-7b-v1.5", "vicuna-7b-v1.3/heads", "lmsys"):
        assert published_tree(name) is None
    assert published_tree("lmsys/vicuna-33b-v1.3") != tree
