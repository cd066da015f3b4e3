"""The paper's figure 3b: Medusa's speed over plain decoding by category of questions, such as MT-Bench's eight.

Medusa, our plain loop and transformers' `generate` answer each question's turns (see `medusa_decoding.evaluation`); a
turn follows the plain loop's answer to the previous one. The tree is the checkpoint's own unless `--tree` or `--nodes`
asks for another. The paper's bars are ratios to transformers' eager loop.
"""

from __future__ import annotations

import argparse
from typing import Any, Literal

import torch

from benchmarks import harness
from benchmarks.ablations import measuring, setup, writing
from medusa_decoding.checkpoints.accuracies import find_accuracies
from medusa_decoding.checkpoints.reading import fetch_folder
from medusa_decoding.cli import _arguments
from medusa_decoding.evaluation import evaluate, read_prompts
from medusa_decoding.model import MedusaModel
from medusa_decoding.options import TURNS
from medusa_decoding.trees.tree import Tree

PAPER = {
    "humanities": 2.58, "reasoning": 2.58, "roleplay": 2.70, "writing": 2.72, "stem": 2.77, "math": 3.01,
    "coding": 3.29, "extraction": 3.62,
}  # fmt: skip
"""Vicuna-7B with Medusa-2, over transformers' eager loop."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    setup.add_arguments(parser, limit=10, files=True)
    positive = _arguments.at_least_one
    parser.add_argument("--turns", type=positive, default=TURNS, metavar="N", help="default: %(default)s")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--tree", type=_arguments.tree, metavar="TREE", help="as for medusa eval")
    words = "the best tree of so many nodes by the accuracies stored with the heads"
    shape.add_argument("--nodes", type=positive, metavar="N", help=words)
    parser.set_defaults(tree=None)


def run(args: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load and measure."""
    _arguments.resolve_device(args)
    prompts = read_prompts(args.prompts, categories=args.categories, limit=args.limit, turns=args.turns, distinct=True)
    tokenizer = _arguments.load_tokenizer(args)
    with _arguments.load_model(args) as model:
        tree = args.tree if args.nodes is None else best_tree(args, model)
        described = setup.described_model(args, model) | {"prompts": len(prompts), "batch": 1}
        described["prompts_from"] = [path.rsplit("/", 1)[-1] for path in args.prompts]
        return described, measure(model, tokenizer, prompts, args.max_new_tokens, args.template, tree)


def best_tree(args: argparse.Namespace, model: MedusaModel) -> Tree:
    """Return the best tree of `--nodes` by what was counted of these heads, here or by their trainer.

    Raises:
        ValueError: nothing was.
    """
    folder = fetch_folder(_arguments.heads_of(args), None)
    heads = setup.heads_of(model)
    found = find_accuracies(folder, heads)
    if found is None:
        raise ValueError(f"--nodes: expected calibration.json or measured.json in {folder.name}, got neither")
    return Tree.optimal(found.by_rank, args.nodes)


def measure(
    model: MedusaModel,
    tokenizer: Any,
    prompts: list[Any],
    new_tokens: int,
    template: str | None = None,
    tree: Tree | Literal["auto"] | None = None,
) -> dict[str, Any]:
    """Measure every category.

    Raises:
        OtherTextError: in float32, a text that is not the plain loop's.
    """
    found = evaluate(model, tokenizer, prompts, max_new_tokens=new_tokens, template=template, tree=tree, progress=True)
    others = [one for one in found.different if one["baseline"] == "plain"]
    if others and model.backbone.dtype == torch.float32:
        first = others[0]
        raise measuring.OtherTextError(
            f"medusa: expected the text of plain in {first['where'].rsplit('/', 1)[-1]}, turn {first['turn']}, got "
            f"another from new token {first['token']} on"
        )
    said = found.to_json()
    for one in (*said["different"], *said["left_out"]):
        one["where"] = one["where"].rsplit("/", 1)[-1]
    for figures in (said["overall"], *said["categories"].values()):
        figures.pop("head_accuracy")
        figures["speedup"] = {way: measuring.rounded(over) for way, over in figures["speedup"].items()}
        figures["tokens_per_step"] = measuring.rounded(figures["tokens_per_step"])
    wanted = ("overall", "categories", "settings", "different", "left_out")
    return {name: said[name] for name in wanted} | {"paper": PAPER}


def draw(plt: Any, record: dict[str, Any]) -> Any:
    """Draw a pair of bars per category, those with the least gain first, with their tokens per step."""
    named = sorted(record["categories"].items(), key=lambda item: item[1]["speedup"]["plain"]["value"])
    named.append(("all", record["overall"]))
    figure, panel = plt.subplots(figsize=(9, 3.8), layout="constrained")
    width = 0.4
    for offset, way, colour, words in (
        (-width / 2, "plain", writing.COLOURS[1], "over our plain loop"),
        (width / 2, "transformers", writing.COLOURS[0], "over transformers' generate"),
    ):
        values, errors = writing.spread([one["speedup"] for _, one in named], way)
        places = [place + offset for place in range(len(named))]
        panel.bar(
            places, values, width, yerr=errors, color=colour, capsize=2, label=words, error_kw={"elinewidth": 0.7}
        )
        for place, value, above in zip(places, values, errors[1], strict=True):
            panel.text(place, value + above, f"{value:.2f}", ha="center", va="bottom", fontsize=7)
    panel.axhline(1.0, color="0.4", linewidth=0.8)
    labels = [f"{name}\n{one['tokens_per_step']['value']:.2f} t/step" for name, one in named]
    panel.set_xticks(range(len(named)), labels, fontsize=8)
    panel.set_ylabel("tokens per second, ratio")
    panel.legend(loc="upper left")
    return figure


def as_text(record: dict[str, Any]) -> str:
    """Return the figures as a Markdown table."""
    lines = [["category", "prompts", "tokens per step", "times our plain loop", "times transformers"]]
    for name, one in (*record["categories"].items(), ("all", record["overall"])):
        told = [writing.as_text(value) for value in (one["tokens_per_step"], *one["speedup"].values())]
        lines.append([name, one["prompts"], *told])
    return harness.markdown(lines)
