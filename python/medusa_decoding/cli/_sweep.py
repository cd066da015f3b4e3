"""Texts written with every tree that `medusa tune` had to choose from, and where the chosen ones stand."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from tqdm.auto import tqdm

from medusa_decoding.chat.template import PromptEncoder, prompt_encoder
from medusa_decoding.checkpoints.tuning_file import Case, Tuning
from medusa_decoding.checks import token_list
from medusa_decoding.cli import _arguments
from medusa_decoding.decode.runtime.steps import resolve_backend
from medusa_decoding.evaluation.interval import WORDS
from medusa_decoding.evaluation.prompts import Prompt
from medusa_decoding.evaluation.run import PROMPT_TOKENS
from medusa_decoding.files import append_line
from medusa_decoding.model import MedusaModel, MedusaOutput
from medusa_decoding.trees.tree import Tree
from medusa_decoding.tuning import record
from medusa_decoding.tuning.sweep import Swept, Verdict, Written, judge, sweep


def compare(args: argparse.Namespace, tuning: Tuning, model: MedusaModel, prompts: Sequence[Prompt]) -> None:
    """Write texts with every tree of the stored choice and print where the chosen ones stand.

    As in decoding, the choice for a text is that of the case whose prefix is nearest to its prompt's length.
    """
    tokenizer = _arguments.load_tokenizer(args)
    eos = token_list(model.backbone.causal.generation_config.eos_token_id)
    chat, as_it_stands = prompt_encoder(tokenizer, None, eos), PromptEncoder(tokenizer, eos)
    new_tokens, rounds = args.max_new_tokens or 128, args.rounds or 3
    asked = [encoded(prompt, as_it_stands if prompt.is_text else chat) for prompt in prompts]
    asked = [ids for ids in asked if len(ids) + new_tokens <= model.backbone.context_limit]
    if not asked:
        raise ValueError(
            f"--prompts: expected one that leaves room for {new_tokens} new tokens in the context, got none"
        )
    cases = [tuning.nearest(1, len(ids)) for ids in asked]
    sizes = {size.tree: size for case in cases for size in case.sizes}
    ends: dict[str, Any] = {"eos_token_id": chat.ends(eos)} if chat.ends(eos) else {}

    def write(text: int, tree: Tree) -> Written:
        prompt = torch.tensor([asked[text]])
        output = model.generate(prompt, max_new_tokens=new_tokens, tree=tree, metrics=True, **ends)
        assert isinstance(output, MedusaOutput)
        assert output.metrics is not None
        return Written(output.new_tokens[0] - 1, output.metrics.steps, output.metrics.decode_seconds)

    eager = resolve_backend(model.backend, model.backbone.device) == "eager"
    with tqdm(total=rounds * len(asked) * len(sizes), unit="text", disable=None) as bar:
        found = sweep(write, [*sizes], len(asked), rounds=rounds, warm_all=not eager, on_text=lambda: bar.update())
    verdict = judge([case.tree for case in cases], found)
    amounts = {
        "texts": len(asked), "left_out": len(prompts) - len(asked), "max_new_tokens": new_tokens, "rounds": rounds
    }  # fmt: skip
    expected = [sizes[one.tree].tokens for one in found]
    figures = amounts | as_json(cases, found, expected, verdict)
    if args.sweep_out is not None:
        of_model = {"model": args.model or "the embedded demo checkpoint", "shapes": record.shapes(model)}
        how = {
            "dtype": tuning.conditions.dtype,
            "backend": tuning.conditions.backend,
            "batch": 1,
            "weighed": tuning.weighed,
        }
        made = record.provenance(model.backbone.device)
        append_line(args.sweep_out, {"benchmark": "tune_sweep"} | of_model | how | figures | made)
    print(json.dumps(figures) if args.json else as_text(amounts, cases, found, expected, verdict))


def encoded(prompt: Prompt, conversation: PromptEncoder) -> list[int]:
    """Return the tokens of a prompt's first turn."""
    messages = [] if prompt.system is None else [{"role": "system", "content": prompt.system}]
    ids = conversation.encode([*messages, {"role": "user", "content": prompt.turns[0]}])
    return ids[:PROMPT_TOKENS] if prompt.is_text else ids


def as_json(
    cases: Sequence[Case], found: Sequence[Swept], expected: Sequence[float], verdict: Verdict
) -> dict[str, Any]:
    """Return a comparison as JSON has it."""
    texts = Counter(case.prefix for case in cases)
    different = {case.prefix: case for case in cases}
    return {
        "cases": [
            {
                "prefix": prefix,
                "texts": texts[prefix],
                "chosen_nodes": case.tree.num_nodes,
                "step_seconds": [{"nodes": size.nodes, "seconds": size.seconds} for size in case.sizes],
            }
            for prefix, case in sorted(different.items())
        ],
        "trees": [
            {
                "nodes": one.tree.num_nodes,
                "choices": one.tree.choices,
                "tokens_per_step": one.tokens_per_step,
                "expected_tokens": tokens,
                "tokens_per_second": one.rate,
                "slowest_round": one.low,
                "fastest_round": one.high,
            }
            for one, tokens in zip(found, expected, strict=True)
        ],
        "chosen_tokens_per_second": verdict.rate,
        "best_nodes": verdict.best.num_nodes,
        "rank": verdict.rank,
        "behind": verdict.behind,
        "chosen_over_best": None if verdict.of_best is None else verdict.of_best.to_json(),
    }


def as_text(
    amounts: dict[str, int],
    cases: Sequence[Case],
    found: Sequence[Swept],
    expected: Sequence[float],
    verdict: Verdict,
) -> str:
    """Return a comparison for a person."""
    trees = {case.prefix: case.tree for case in cases}
    left_out = amounts["left_out"]
    lines = [
        f"{amounts['texts']} texts of up to {amounts['max_new_tokens']} new tokens, {amounts['rounds']} rounds"
        + (f"; {left_out} prompts left out for want of room in the context" if left_out else ""),
        "chosen: " + ", ".join(f"{tree.num_nodes} nodes for prefix {prefix}" for prefix, tree in sorted(trees.items())),
        "   nodes  tokens a step  expected  tokens a second   slowest..fastest round",
    ]
    for one, tokens in zip(found, expected, strict=True):
        mark = "*" if one.tree in trees.values() else " "
        lines.append(
            f" {mark}{one.tree.num_nodes:6}{one.tokens_per_step:15.2f}{tokens:10.2f}{one.rate:17.1f}"
            f"{one.low:11.1f}..{one.high:.1f}"
        )
    chosen = [*dict.fromkeys(trees.values())]
    words = (
        f"the chosen tree of {chosen[0].num_nodes} nodes is" if len(chosen) == 1 else "the trees chosen by length are"
    )
    side = "behind" if verdict.behind >= 0 else "ahead of"
    lines.append(
        f"{words} number {verdict.rank} of {len(found)}, {100 * abs(verdict.behind):.1f} % {side} the fastest "
        f"({verdict.best.num_nodes} nodes)"
    )
    of_best = verdict.of_best
    if verdict.behind and of_best is not None and of_best.low is not None:
        lines.append(
            f"rate over that of the fastest: {of_best.value:.3f} ({of_best.low:.3f} to {of_best.high:.3f}; {WORDS}); "
            "which tree is the fastest was found on these very texts, so that a single chosen tree is at 1 at most "
            "and below it by chance too"
        )
    return "\n".join(lines)
