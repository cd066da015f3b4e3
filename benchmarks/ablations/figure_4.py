"""The paper's figure 4: tokens per step and speed against the size of the tree, random dense trees and optimised ones.

A dense tree is the cartesian product of the first drafts of each head (section 2.1.2). The paper samples such trees
at random without saying how: here each is drawn evenly among all products whose size falls between two sizes of
`--nodes`. An optimised tree has the paths of the largest products of accuracies (section 2.3.3), which are counted on
other prompts. Sizes include the root, which the paper's "candidate tokens" may or may not.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.ablations import measuring, setup, writing
from medusa_decoding.cli import _arguments
from medusa_decoding.evaluation.own_text import RANKS
from medusa_decoding.trees.tree import Tree

NODES = (4, 8, 16, 32, 64, 128)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    setup.add_arguments(parser, limit=24)
    parser.add_argument(
        "--nodes", type=setup.sizes, default=list(NODES), metavar="N,N", help="default: 4,8,16,32,64,128; up to 256"
    )
    parser.add_argument(
        "--dense", type=_arguments.at_least_one, default=3, metavar="N", help="dense trees a size (default: 3)"
    )


def products(num_heads: int, ranks: int, low: int, high: int) -> list[tuple[int, ...]]:
    """Return the widths of all cartesian products of more than `low` and at most `high` nodes, root included."""

    def extend(widths: tuple[int, ...], nodes: int, level: int) -> Iterator[tuple[int, ...]]:
        if low < nodes <= high:
            yield widths
        if len(widths) < num_heads:
            for width in range(1, ranks + 1):
                if nodes + level * width > high:
                    break
                yield from extend((*widths, width), nodes + level * width, level * width)

    return [widths for widths in extend((), 1, 1) if widths]


def sample_dense(num_heads: int, ranks: int, sizes: Sequence[int], count: int, seed: int) -> list[tuple[int, ...]]:
    """Draw widths of dense trees: up to `count` different ones whose size is above one size and at most the next."""
    chooser = random.Random(seed)
    found: list[tuple[int, ...]] = []
    for low, high in itertools.pairwise((1, *sizes)):
        possible = products(num_heads, ranks, low, high)
        found += chooser.sample(possible, min(count, len(possible)))
    return found


def run(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load and measure."""
    bench = setup.load(args)
    with bench.model:
        return bench.described, measure(bench, args.nodes, args.dense)


def measure(bench: setup.Bench, nodes: Sequence[int], dense: int) -> dict[str, Any]:
    """Measure trees of both kinds and plain decoding."""
    accuracies = setup.count_heads(bench)
    sizes = setup.fitting(nodes, accuracies)
    ranks = min(RANKS, len(accuracies[0]))
    widths = sample_dense(bench.num_heads, ranks, sizes, dense, bench.seed)
    trees = {measuring.dense_name("x".join(map(str, one))): Tree.cartesian(one) for one in widths}
    trees |= {measuring.sparse_name(size): Tree.optimal(accuracies, size) for size in sizes}
    ways = {measuring.PLAIN: measuring.ours(bench, Tree([]))}
    ways |= {name: measuring.ours(bench, tree) for name, tree in trees.items()}
    found = measuring.compare(bench, ways, dict.fromkeys(trees, measuring.PLAIN), before_block=bench.model.free)
    points = [
        {
            "name": name,
            "kind": "dense" if name.startswith("dense") else "optimised",
            "nodes": tree.num_nodes,
            "depth": tree.depth,
            "expected_tokens": round(tree.expected_tokens(accuracies), 4),
        }
        | found[name].figures()
        for name, tree in trees.items()
    ]
    return {"plain": found[measuring.PLAIN].figures(), "accuracies": rounded(accuracies), "trees": points}


def rounded(accuracies: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return accuracies with four digits."""
    return [[round(value, 4) for value in row] for row in accuracies]


def of_kind(record: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """Return the trees of one kind, the smallest first."""
    return sorted((one for one in record["trees"] if one["kind"] == kind), key=lambda one: one["nodes"])


def draw(plt: Any, record: dict[str, Any]) -> Any:
    """Draw both panels of the figure."""
    return writing.by_nodes(plt, {
        "dense trees": ("o", writing.COLOURS[0], of_kind(record, "dense")),
        "optimised trees": ("*-", writing.COLOURS[1], of_kind(record, "optimised")),
    })  # fmt: skip


def as_text(record: dict[str, Any]) -> str:
    """Return the figures for a person."""
    return "\n".join(
        f"{one['name']:18} {one['nodes']:4} nodes  {one['tokens_per_step']['value']:.2f} tokens per step  "
        f"{one['speedup']['value']:.2f} times plain"
        for one in [*of_kind(record, "dense"), *of_kind(record, "optimised")]
    )
