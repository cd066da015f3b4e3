"""`medusa tune --sweep`: generate with every stored tree and rank the chosen ones among them."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from medusa_decoding.checkpoints.tuning_file import Case, Tuning
from medusa_decoding.cli import _arguments
from medusa_decoding.decode.runtime.steps import resolve_backend
from medusa_decoding.evaluation.interval import WORDS
from medusa_decoding.evaluation.prompts import Conversations, Prompt
from medusa_decoding.files import append_line
from medusa_decoding.model import MedusaModel, MedusaOutput
from medusa_decoding.progress import Progress
from medusa_decoding.provenance import medusa_command, provenance
from medusa_decoding.trees.tree import Tree
from medusa_decoding.tuning.sweep import Swept, Verdict, Written, judge, sweep


def compare(args: argparse.Namespace, tuning: Tuning, model: MedusaModel, prompts: Sequence[Prompt]) -> None:
    """Generate with every tree of a tuning and print the rank of the chosen ones.

    The tree chosen for a text is that of the case with the prefix nearest to its prompt's length, as in decoding. For a
    case that the times could not decide, it is the one that seemed the fastest.
    """
    new_tokens, rounds = args.max_new_tokens or 128, args.rounds or 3
    conversations = Conversations(model, _arguments.load_tokenizer(args))
    asked = [(prompt, conversations.encode(prompt)) for prompt in prompts]
    asked = [(prompt, ids) for prompt, ids in asked if len(ids) + new_tokens <= model.backbone.context_limit]
    if not asked:
        raise ValueError(f"--prompts: none leaves room for {new_tokens} new tokens in the context")
    cases = [tuning.nearest(1, len(ids)) for _, ids in asked]
    chosen = [case.chosen or case.fastest for case in cases]
    expected = {size.tree: size.tokens for case in cases for size in case.sizes}

    def write(text: int, tree: Tree) -> Written:
        prompt, ids = asked[text]
        ending = conversations.ending(prompt)
        output = model.generate(torch.tensor([ids]), max_new_tokens=new_tokens, tree=tree, metrics=True, **ending)
        assert isinstance(output, MedusaOutput)
        assert output.metrics is not None
        return Written(output.new_tokens[0] - 1, output.metrics.steps, output.metrics.decode_seconds)

    eager = resolve_backend(model.backend, model.backbone.device) == "eager"
    with Progress(rounds * len(asked) * len(expected), "text") as bar:
        found = sweep(write, [*expected], len(asked), rounds=rounds, warm_all=not eager, on_text=bar.update)
    verdict = judge([one.tree for one in chosen], found)
    figures = {
        "texts": len(asked), "left_out": len(prompts) - len(asked), "max_new_tokens": new_tokens, "rounds": rounds,
        **as_json(cases, found, expected, verdict),
    }  # fmt: skip
    if args.sweep_out is not None:
        conditions = tuning.conditions
        record = {
            "benchmark": "tune_sweep",
            "model": args.model or "the embedded demo checkpoint",
            "shapes": shapes(model),
            "dtype": conditions.dtype,
            "backend": conditions.backend,
            "batch": 1,
            "weighed": tuning.weighed,
        }
        append_line(args.sweep_out, record | figures | provenance(medusa_command(), model.backbone.device))
    print(json.dumps(figures) if args.json else as_text(figures, {one.tree for one in chosen}, verdict))


def shapes(model: MedusaModel) -> dict[str, Any]:
    """Return the sizes of a base model and its heads."""
    config, heads = model.backbone.config, model.heads
    assert heads is not None
    return {
        "class": type(model.backbone.causal_lm).__name__,
        "hidden_size": config.hidden_size,
        "layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "heads": heads.num_heads,
        "blocks": heads.num_layers,
        "candidates": heads.num_candidates,
    }


def as_json(
    cases: Sequence[Case], found: Sequence[Swept], expected: dict[Tree, float], verdict: Verdict
) -> dict[str, Any]:
    """Return a comparison as JSON values."""
    texts = Counter(case.prefix for case in cases)
    return {
        "cases": [
            {
                "prefix": prefix,
                "texts": texts[prefix],
                "chosen_nodes": (case.chosen or case.fastest).nodes,
                "undecided": case.chosen is None,
                "step_seconds": [{"nodes": size.nodes, "seconds": size.seconds} for size in case.sizes],
            }
            for prefix, case in sorted({case.prefix: case for case in cases}.items())
        ],
        "trees": [
            {
                "nodes": one.tree.num_nodes,
                "choices": one.tree.choices,
                "tokens_per_step": one.tokens_per_step,
                "expected_tokens": expected[one.tree],
                "tokens_per_second": one.rate,
                "slowest_round": one.low,
                "fastest_round": one.high,
            }
            for one in found
        ],
        "chosen_tokens_per_second": verdict.rate,
        "best_nodes": verdict.best.num_nodes,
        "rank": verdict.rank,
        "behind": verdict.behind,
        "chosen_over_best": None if verdict.of_best is None else asdict(verdict.of_best),
    }


def as_text(figures: dict[str, Any], chosen: set[Tree], verdict: Verdict) -> str:
    """Return a comparison as a table for a terminal."""
    left_out = figures["left_out"]
    lines = [
        f"{figures['texts']} texts of up to {figures['max_new_tokens']} new tokens, {figures['rounds']} rounds"
        + (f"; {left_out} prompts left out for want of room in the context" if left_out else ""),
        "chosen: "
        + ", ".join(
            f"{one['chosen_nodes']} nodes for prefix {one['prefix']}" + " (undecided)" * one["undecided"]
            for one in figures["cases"]
        ),
        "   nodes tokens per step  expected tokens per second   slowest..fastest round",
    ]
    for one in figures["trees"]:
        mark = "*" if Tree(one["choices"]) in chosen else " "
        lines.append(
            f" {mark}{one['nodes']:6}{one['tokens_per_step']:16.2f}{one['expected_tokens']:10.2f}"
            f"{one['tokens_per_second']:18.1f}{one['slowest_round']:11.1f}..{one['fastest_round']:.1f}"
        )
    words = "the trees chosen by length are"
    if len(chosen) == 1:
        words = f"the chosen tree of {next(iter(chosen)).num_nodes} nodes is"
    side = "behind" if verdict.behind >= 0 else "ahead of"
    lines.append(
        f"{words} number {verdict.rank} of {len(figures['trees'])}, {100 * abs(verdict.behind):.1f} % {side} the "
        f"fastest ({verdict.best.num_nodes} nodes)"
    )
    of_best = verdict.of_best
    if verdict.behind and of_best is not None and of_best.low is not None:
        lines.append(
            f"rate over that of the fastest: {of_best.value:.3f} ({of_best.low:.3f} to {of_best.high:.3f}; {WORDS}). "
            "The fastest tree was found on the same texts, so a single chosen tree is at most at 1, and below it by "
            "chance too"
        )
    return "\n".join(lines)
