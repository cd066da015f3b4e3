"""Trees chosen anew before each step, by what the heads say at that very place, against the optimised tree.

Both have the same number of nodes. The optimised tree is searched once, by how often heads are right on average
(section 2.3.3); a dynamic tree has the likeliest nodes by this step's own probabilities, which goes beyond the paper.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from benchmarks.ablations import measuring, setup, writing
from medusa_decoding.evaluation import interval
from medusa_decoding.evaluation.own_text import RANKS
from medusa_decoding.trees.tree import Tree

NODES = (4, 8, 16, 32, 64)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    setup.add_arguments(parser, limit=60)
    parser.add_argument("--nodes", type=setup.sizes, default=list(NODES), metavar="N,N", help="default: 4,8,16,32,64")


def run(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load and measure."""
    bench = setup.load(args)
    with bench.model:
        return bench.described, measure(bench, args.nodes)


def measure(bench: setup.Bench, nodes: Sequence[int]) -> dict[str, Any]:
    """Measure both kinds of every size and plain decoding."""
    accuracies = setup.count_heads(bench)
    sizes = setup.fitting(nodes, accuracies)
    ranks = min(RANKS, len(accuracies[0]))
    ways = {measuring.PLAIN: measuring.ours(bench, Tree([]))}
    for size in sizes:
        ways[measuring.sparse_name(size)] = measuring.optimised(bench, accuracies, size)
        ways[measuring.dynamic_name(size)] = measuring.ours(bench, Tree.dynamic(size, bench.num_heads, ranks))
    same = {name: measuring.PLAIN for name in ways if name != measuring.PLAIN}
    found = measuring.compare(bench, ways, same, before_block=bench.model.free)
    return {
        "plain": found[measuring.PLAIN].figures(),
        "sizes": [
            {
                "nodes": size,
                "optimised": found[measuring.sparse_name(size)].figures(),
                "dynamic": found[measuring.dynamic_name(size)].figures(),
            }
            | over(found[measuring.dynamic_name(size)], found[measuring.sparse_name(size)])
            for size in sizes
        ],
    }


def over(dynamic: measuring.Found, static: measuring.Found) -> dict[str, Any]:
    """Return the dynamic tree's tokens per step and tokens per second over the other's, prompt by prompt."""
    pairs = list(zip(dynamic.written, static.written, strict=True))
    speeds = [(len(a.text), a.seconds, len(b.text), b.seconds) for a, b in pairs]
    steps = [(a.committed, a.steps, b.committed, b.steps) for a, b in pairs]
    return {
        "tokens_per_step_over": measuring.rounded(interval.ratio_of_rates(steps)),
        "tokens_per_second_over": measuring.rounded(interval.ratio_of_rates(speeds)),
    }


def draw(plt: Any, record: dict[str, Any]) -> Any:
    """Draw tokens per step and speed by size."""
    kinds = {"optimised": ("*-", writing.COLOURS[1]), "dynamic": ("s-", writing.COLOURS[2])}
    of = {kind: [one[kind] | {"nodes": one["nodes"]} for one in record["sizes"]] for kind in kinds}
    return writing.by_nodes(plt, {kind: (*looks, of[kind]) for kind, looks in kinds.items()})


def as_text(record: dict[str, Any]) -> str:
    """Return the figures for a person."""
    lines = []
    for one in record["sizes"]:
        static, dynamic = one["optimised"], one["dynamic"]
        steps, speed = (writing.as_text(one[f"tokens_per_{unit}_over"]) for unit in ("step", "second"))
        lines.append(
            f"{one['nodes']:4} nodes: tokens per step {static['tokens_per_step']['value']:.2f} -> "
            f"{dynamic['tokens_per_step']['value']:.2f}, {steps} times; over plain "
            f"{static['speedup']['value']:.2f} -> {dynamic['speedup']['value']:.2f}, {speed} times"
        )
    return "\n".join(lines)
