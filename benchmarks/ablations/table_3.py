"""The paper's table 3: what each technique adds, from plain decoding to Medusa-2, and then tuned and dynamic trees.

The techniques: every head's best draft token in a chain; a dense tree, with the same few candidates of each head; the
optimised tree of as many nodes (section 2.3.3); the optimised tree of the size with the most expected tokens per second
by step times measured on this device, as `medusa tune` chooses without a calibration; a dynamic tree of that size. They
are measured with the model's own heads, and with those of `--medusa-1` and `--medusa-2` (for the demo model
`benchmarks.variants` trains both on the same budget, and only these two show what Medusa-2 adds). Speeds are ratios to
the plain loop of the first model; texts are compared with the same model's plain text.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks import harness
from benchmarks.ablations import measuring, setup, writing
from medusa_decoding.cli import _arguments
from medusa_decoding.evaluation.own_text import RANKS
from medusa_decoding.model import MedusaModel
from medusa_decoding.trees.tree import Tree
from medusa_decoding.tuning.select import best_trees, expected_tokens, fastest, timed_trees
from medusa_decoding.tuning.step_timer import time_steps

CHAIN, DENSE, OPTIMISED, TUNED, DYNAMIC = "chain", "dense tree", "optimised tree", "tuned tree", "dynamic tree"
TUNED_SIZES = (1, 2, 4, 8, 16, 32, 64)
PAPER = {CHAIN: 1.5, DENSE: 1.9, OPTIMISED: 2.2, "medusa-2": 2.8}
"""Over transformers' eager loop, Vicuna-7B on an A100 (the paper's table 3, all of them approximate)."""


def widths(text: str) -> list[int]:
    """Parse widths of a dense tree, one per head, separated by commas."""
    found = [_arguments.at_least_one(part) for part in text.split(",")]
    try:
        Tree.cartesian(found)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    setup.add_arguments(parser, limit=60)
    parser.add_argument(
        "--dense", type=widths, default=[2, 2, 2], metavar="W,W", help="of the dense tree (default: 2,2,2: 15 nodes)"
    )
    parser.add_argument("--medusa-1", metavar="HEADS", help="heads on a frozen model, to compare with --medusa-2")
    parser.add_argument("--medusa-2", metavar="HEADS", help="heads trained together with their own model")


def run(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load all models and measure."""
    bench = setup.load(args)
    with ExitStack() as stack:
        models = {"own heads": stack.enter_context(bench.model)}
        described = dict(bench.described)
        for name in ("medusa-1", "medusa-2"):
            heads = getattr(args, name.replace("-", "_"))
            if heads is not None:
                other = argparse.Namespace(**{**vars(args), "model": heads, "base_model": None})
                models[name] = stack.enter_context(_arguments.load_model(other))
                described[name] = setup.described_model(other, models[name])["model"]
        return described, measure(bench, models, args.dense)


def tuned_tree(bench: setup.Bench, model: MedusaModel, accuracies: Sequence[Sequence[float]]) -> tuple[Tree, list[Any]]:
    """Return the tree with the most expected tokens per second here, and what it was chosen among."""
    sizes = [size for size in TUNED_SIZES if size <= setup.most_nodes(accuracies)]
    prefix = int(statistics.median(one.ids.shape[1] for one in bench.asked)) + bench.new_tokens // 2
    trees = best_trees(accuracies, sizes)
    weighed = timed_trees(trees, expected_tokens(trees, accuracies), time_steps(model, trees, prefix=prefix))
    return fastest(weighed).tree, [
        {
            "nodes": one.tree.num_nodes,
            "milliseconds": round(1e3 * one.seconds, 4),
            "expected_tokens": round(one.tokens, 4),
            "tokens_per_second": round(one.rate, 1),
        }
        for one in weighed
    ]


def measure(bench: setup.Bench, models: dict[str, MedusaModel], dense: Sequence[int]) -> dict[str, Any]:
    """Measure every technique with each model's heads, all in turn on every prompt."""
    ways: dict[str, measuring.Way] = {measuring.PLAIN: measuring.ours(bench, Tree([]))}
    ways[measuring.TRANSFORMERS] = measuring.transformers(bench)
    same: dict[str, str] = {measuring.TRANSFORMERS: measuring.PLAIN}
    shapes: dict[str, dict[str, Any]] = {}
    for label, model in models.items():
        accuracies = setup.count_heads(bench, model)
        own = measuring.PLAIN if model is bench.model else f"{label}: {measuring.PLAIN}"
        ways[own] = measuring.ours(bench, Tree([]), model)
        for rung, tree in rungs(bench, model, accuracies, dense, shapes.setdefault(label, {})).items():
            name = f"{label}: {rung}"
            ways[name], same[name] = measuring.ours(bench, tree, model), own
    found = measuring.compare(bench, ways, same, before_block=lambda: [model.free() for model in models.values()])
    return {
        "plain": found[measuring.PLAIN].figures(),
        "transformers": found[measuring.TRANSFORMERS].figures(),
        "paper": PAPER,
        "ladders": {
            label: described
            | {
                "rungs": {
                    name.removeprefix(f"{label}: "): found[name].figures() | {"nodes": described["nodes"][rung]}
                    for name in found
                    if name.startswith(f"{label}: ")
                    for rung in [name.removeprefix(f"{label}: ")]
                }
            }
            for label, described in shapes.items()
        },
    }


def rungs(
    bench: setup.Bench,
    model: MedusaModel,
    accuracies: Sequence[Sequence[float]],
    dense: Sequence[int],
    described: dict[str, Any],
) -> dict[str, Any]:
    """Return the trees of all techniques by name; describe them in `described`."""
    num_heads = setup.heads_of(model).num_heads
    wide = Tree.cartesian(list(dense)[:num_heads])
    tuned, weighed = tuned_tree(bench, model, accuracies)
    size = tuned.num_nodes if tuned.num_nodes > 1 else wide.num_nodes
    found = {
        CHAIN: Tree.chain(num_heads),
        DENSE: wide,
        OPTIMISED: Tree.optimal(accuracies, wide.num_nodes),
        TUNED: tuned,
        DYNAMIC: Tree.dynamic(size, num_heads, min(RANKS, len(accuracies[0]))),
    }
    described["nodes"] = {measuring.PLAIN: 1} | {name: tree.num_nodes for name, tree in found.items()}
    described["tuning"] = weighed
    described["accuracies"] = [[round(value, 4) for value in row] for row in accuracies]
    return found


def draw(plt: Any, record: dict[str, Any]) -> Any:
    """Draw the speed of every rung as bars, a group of them for each model's heads."""
    rows = [
        (f"{label}: {rung}, {one['nodes']} nodes" if rung != measuring.PLAIN else f"{label}: plain", one, number)
        for number, (label, ladder) in enumerate(record["ladders"].items())
        for rung, one in ladder["rungs"].items()
    ]
    figure, panel = plt.subplots(figsize=(8, 0.32 * len(rows) + 1.4), layout="constrained")
    values, errors = writing.spread([one for _, one, _ in rows], "speedup")
    places = list(range(len(rows)))
    panel.barh(
        places, values, xerr=errors, color=[writing.COLOURS[number] for *_, number in rows], capsize=2,
        error_kw={"elinewidth": 0.7},
    )  # fmt: skip
    for place, (_, one, _), over in zip(places, rows, errors[1], strict=True):
        steps = one["tokens_per_step"]["value"]
        words = panel.text(
            values[place] + over, place, f"  {values[place]:.2f} ({steps:.2f} tokens per step)", va="center"
        )
        words.set_in_layout(False)
    panel.set_yticks(places, [name for name, *_ in rows])
    panel.invert_yaxis()
    panel.axvline(1.0, color="0.4", linewidth=0.8)
    panel.set_xlim(0, 1.5 * max(value + over for value, over in zip(values, errors[1], strict=True)))
    panel.set_xlabel("tokens per second / plain decoding")
    return figure


def as_text(record: dict[str, Any]) -> str:
    """Return the ladders as a Markdown table."""
    found = [("-", "transformers' generate", record["transformers"] | {"nodes": 1})]
    found += [(label, *rung) for label, ladder in record["ladders"].items() for rung in ladder["rungs"].items()]
    lines = [
        [label, rung, one["nodes"], writing.as_text(one["tokens_per_step"]), writing.as_text(one["speedup"])]
        for label, rung, one in found
    ]
    return harness.markdown([["heads", "technique", "nodes", "tokens per step", "times plain"], *lines])
