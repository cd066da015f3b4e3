"""The paper's figure 5: thresholds of typical acceptance against greedy decoding and sampling, acceptance and quality.

epsilon runs from 0.01 to 0.25, delta is its square root, the temperature 0.7 (section 3.3.2), the tree optimised.
Greedy decoding and sampling with the same tree are lossless: their texts are those of the plain loop, with the same
seed where tokens are drawn, up to rounding; how many are the same is counted. The paper has GPT-4 mark the texts; no
judge is at hand here. Instead there are the perplexity that the base model itself gives the new tokens (at temperature
1, after the prompt) and the share of 4-grams that occur once. Neither is quality: text that repeats itself has a low
perplexity, noise has distinct 4-grams. They say how far a way of decoding moves from what the model finds likely.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks.ablations import measuring, setup, writing
from medusa_decoding.cli import _arguments
from medusa_decoding.evaluation import interval
from medusa_decoding.trees.tree import Tree
from recipes.demo.card import distinct_four_grams

PAPER = tuple(round(0.01 * step, 2) for step in range(1, 26))
TEMPERATURE = 0.7
GREEDY, DRAWN, DRAWN_PLAIN = "greedy", "sampling", "sampling, plain"


def thresholds(text: str) -> list[float]:
    """Parse different thresholds above 0 and below 1, separated by commas, into ascending order."""
    found = sorted({float(part) for part in text.split(",")})
    if not (found[0] > 0 and found[-1] < 1):
        raise argparse.ArgumentTypeError(f"expected thresholds above 0 and below 1, got {text}")
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    setup.add_arguments(parser, limit=32)
    parser.add_argument(
        "--thresholds", type=thresholds, default=list(PAPER), metavar="E,E", help="default: 0.01,0.02,..,0.25"
    )
    parser.add_argument(
        "--nodes", type=_arguments.at_least_one, default=16, metavar="N", help="of the tree (default: 16)"
    )
    parser.add_argument(
        "--temperature", type=_arguments.factor, default=TEMPERATURE, metavar="T", help="default: %(default)s"
    )


def run(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load and measure."""
    bench = setup.load(args)
    with bench.model:
        return bench.described, measure(bench, args.thresholds, args.nodes, args.temperature)


def measure(bench: setup.Bench, epsilons: Sequence[float], nodes: int, temperature: float) -> dict[str, Any]:
    """Measure all thresholds and greedy decoding and sampling."""
    accuracies = setup.count_heads(bench)
    [nodes] = setup.fitting([nodes], accuracies)
    tree = Tree.optimal(accuracies, nodes)
    drawn = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    ways = {
        measuring.PLAIN: measuring.ours(bench, Tree([])),
        DRAWN_PLAIN: measuring.ours(bench, Tree([]), **drawn),
        GREEDY: measuring.ours(bench, tree),
        DRAWN: measuring.ours(bench, tree, **drawn),
    }
    for epsilon in epsilons:
        ways[f"typical {epsilon:g}"] = measuring.ours(
            bench, tree, acceptance="typical", temperature=temperature, posterior_threshold=epsilon,
            posterior_alpha=math.sqrt(epsilon),
        )  # fmt: skip
    found = measuring.compare(bench, ways, {GREEDY: measuring.PLAIN}, before_block=bench.model.free)
    pairs = zip(found[DRAWN].written, found[DRAWN_PLAIN].written, strict=True)
    found[DRAWN].same = sum(a.text == b.text for a, b in pairs)
    figures = {name: one.figures() | quality(bench, [w.text for w in one.written]) for name, one in found.items()}
    return {
        "nodes": nodes,
        "temperature": temperature,
        "ways": {name: figures[name] for name in (measuring.PLAIN, DRAWN_PLAIN, GREEDY, DRAWN)},
        "typical": [{"epsilon": epsilon} | figures[f"typical {epsilon:g}"] for epsilon in epsilons],
    }


@torch.no_grad()
def surprise(base: Any, ids: torch.Tensor, text: Sequence[int]) -> float:
    """Return the sum of -log p in nats that a model gives new tokens after a prompt int64 [1, T], at temperature 1."""
    whole = torch.cat([ids, torch.tensor([list(text)])], dim=1).to(base.device)
    logits = base(whole, use_cache=False).logits[0, ids.shape[1] - 1 : -1].float()
    return float(F.cross_entropy(logits.double(), whole[0, ids.shape[1] :], reduction="sum"))


def quality(bench: setup.Bench, texts: Sequence[list[int]]) -> dict[str, Any]:
    """Return perplexity under the base model and distinct 4-grams of texts, one per prompt."""
    base = bench.model.backbone.causal_lm
    sums = [
        (surprise(base, asked.ids, text), len(text)) for asked, text in zip(bench.asked, texts, strict=True) if text
    ]
    long = [text for text in texts if len(text) > 3]
    return {
        "perplexity": measuring.rounded(interval.bootstrap(sums, lambda total: np.exp(total[0] / total[1]))),
        "distinct_4_grams": round(distinct_four_grams(long), 4) if long else None,
    }


def draw(plt: Any, record: dict[str, Any]) -> Any:
    """Draw acceptance, perplexity and distinct 4-grams against epsilon."""
    figure, panels = plt.subplots(1, 3, figsize=(10, 3.4), layout="constrained")
    points = record["typical"]
    epsilons = [point["epsilon"] for point in points]
    marks = ((GREEDY, "*", writing.COLOURS[1]), (DRAWN, "o", writing.COLOURS[2]))
    for panel, name, words in zip(
        panels,
        ("tokens_per_step", "perplexity", "distinct_4_grams"),
        ("tokens per step", "perplexity of the text (base model)", "distinct 4-grams"),
        strict=True,
    ):
        if name == "distinct_4_grams":
            panel.plot(epsilons, [point[name] for point in points], ".-", color=writing.COLOURS[0], label="typical")
        else:
            values, errors = writing.spread(points, name)
            panel.errorbar(
                epsilons, values, errors, fmt=".-", color=writing.COLOURS[0], elinewidth=0.6, capsize=2,
                label="typical acceptance (lossy)",
            )  # fmt: skip
        for way, mark, colour in marks:
            value = record["ways"][way][name]
            value = value["value"] if isinstance(value, dict) else value
            panel.plot([0.0], [value], mark, color=colour, markersize=9, label=f"{way} (lossless)")
            panel.axhline(value, color=colour, linewidth=0.6, linestyle=":")
        panel.set_xlabel("epsilon (delta: its square root)")
        panel.set_ylabel(words)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
    panels[0].legend(fontsize=7)
    return figure


def as_text(record: dict[str, Any]) -> str:
    """Return the figures for a person."""
    rows = list(record["ways"].items())
    rows += [(f"typical, epsilon {point['epsilon']:g}", point) for point in record["typical"]]
    return "\n".join(
        f"{name:24} {one['tokens_per_step']['value']:.2f} tokens per step  {one['speedup']['value']:.2f} times plain  "
        f"perplexity {one['perplexity']['value']:.2f}  distinct 4-grams {one['distinct_4_grams']}"
        for name, one in rows
    )
