"""Round a trained demo model to bfloat16, measure it, and write its checkpoint folder with a model card.

    python -m recipes.demo.card --model runs/demo-model/joint-3/model --heads runs/demo-model/heads/heads --out FOLDER

Trees and accuracies are calibrated on requests of the training side and measured on held-out ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from medusa_decoding.checkpoints import pretrained, read_heads, write_heads
from medusa_decoding.demo.checking import problem
from medusa_decoding.evaluation.own_text import accuracy_of_texts
from medusa_decoding.files import only_writer, write_json, write_text
from medusa_decoding.heads import MedusaHeads
from medusa_decoding.model import MedusaModel, MedusaOutput
from medusa_decoding.provenance import versions
from medusa_decoding.trees.tree import Tree
from recipes.demo.requests import draw, encoded

TREE_SIZES = (2, 4, 8, 16, 32, 64)
NEW = 512
COPIED = 8
"""Tokens of the branch that prompt lookup copies."""


def answers(model: MedusaModel, prompts: Sequence[torch.Tensor], new_tokens: int, batch: int = 64) -> list[list[int]]:
    """Return greedy answers to prompts int64 [1, T]: new tokens only, the last one EOS unless the limit is reached."""
    found: list[list[int]] = []
    for first in range(0, len(prompts), batch):
        rows = prompts[first : first + batch]
        width = max(row.shape[1] for row in rows)
        ids, mask = (torch.zeros(len(rows), width, dtype=torch.int64) for _ in range(2))
        for i, row in enumerate(rows):
            ids[i, width - row.shape[1] :] = row
            mask[i, width - row.shape[1] :] = 1
        output = model.generate(ids, attention_mask=mask, max_new_tokens=new_tokens, tree=Tree([]))
        assert isinstance(output, MedusaOutput)
        new = output.sequences[:, width:].tolist()
        found += [row[:length] for row, length in zip(new, output.new_tokens, strict=True)]
    return found


def distinct_four_grams(rows: Sequence[Sequence[int]]) -> float:
    """Return distinct 4-grams / all 4-grams, the mean over texts: 1 if nothing repeats, near 0 for text that loops."""
    grams = [[tuple(row[i : i + 4]) for i in range(len(row) - 3)] for row in rows]
    return statistics.fmean(len(set(of)) / len(of) for of in grams if of)


def measure(
    base: PreTrainedModel,
    heads: MedusaHeads,
    tokenizer: PreTrainedTokenizerBase,
    *,
    count: int = 100,
    calibration_count: int = 240,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure everything that the card states.

    Returns:
        The figures, and each held-out request with its greedy answer and what is wrong with it (None: it is right).

    Raises:
        AssertionError: a tree writes another text than plain greedy decoding.
    """
    asked = list(draw(count, 11, held_out=True))
    prompts = encoded(tokenizer, asked)
    known = encoded(tokenizer, draw(calibration_count, 31))

    def accuracy(prompts: list[torch.Tensor], texts: list[list[int]]) -> list[list[float]]:
        rows = [(ids[0].tolist() + new, ids.shape[1]) for ids, new in zip(prompts, texts, strict=True)]
        return accuracy_of_texts(model, rows).by_rank

    def speed(tree: Tree) -> dict[str, float]:
        rates, written, steps = [], 0, 0
        for ids, expected in zip(prompts, greedy, strict=True):
            output = model.generate(ids, max_new_tokens=NEW, tree=tree)
            assert isinstance(output, MedusaOutput)
            assert output.sequences[0, ids.shape[1] :].tolist() == expected, f"{tree}: expected the plain loop's text"
            rates.append(output.tokens_per_step)
            written, steps = written + len(expected) - 1, steps + output.steps
        return {"greedy": written / steps, "standard_error": statistics.stdev(rates) / len(rates) ** 0.5}

    with MedusaModel(base, heads) as model:
        accuracies = accuracy(known, answers(model, known, NEW))
        greedy = answers(model, prompts, NEW)
        texts = tokenizer.batch_decode(greedy, skip_special_tokens=True)
        checked = [
            {"kind": request.kind, "request": request.text, "answer": text, "problem": problem(request, text)}
            for request, text in zip(asked, texts, strict=True)
        ]
        by_size = {size: Tree.optimal(accuracies, size) for size in TREE_SIZES}
        result: dict[str, Any] = {
            "answers_right": sum(one["problem"] is None for one in checked),
            "answers": count,
            "wrong_by_kind": dict(Counter(one["kind"] for one in checked if one["problem"] is not None)),
            "answer_tokens": {"mean": statistics.fmean(map(len, greedy)), "most": max(map(len, greedy))},
            "distinct_4_grams": distinct_four_grams(greedy),
            "calibration": accuracies,
            "head_accuracy": accuracy(prompts, greedy),
            "tokens_per_step": {
                size: speed(tree) | {"expected": tree.expected_tokens(accuracies)} for size, tree in by_size.items()
            },
        }
        lookup = speed(Tree([]).with_lookup(COPIED))["greedy"]
        # Of a step's tokens all but the model's own were copied.
        result["prompt_lookup"] = {"copied": COPIED, "tokens_per_step": lookup, "share_of_tokens": 1 - 1 / lookup}
    return result | versions("torch"), checked


def card(result: dict[str, Any], config: Any, heads: MedusaHeads) -> str:
    """Return the card as Markdown.

    Args:
        result: what `measure` returned.
        config: of the base model.
        heads: of the checkpoint.
    """
    lookup = result["prompt_lookup"]
    lines = [
        "# The demo checkpoint",
        "",
        "A small Llama-architecture chat model with Medusa heads, made to show decoding: it writes classes, functions",
        "and command line parsers in Python, and SQL queries, and nothing else. `medusa demo --help` shows requests",
        "that it knows.",
        "",
        f"- Backbone: {config.num_hidden_layers} layers, hidden size {config.hidden_size}, feed-forward "
        f"{config.intermediate_size}, {config.num_attention_heads} query and {config.num_key_value_heads} KV heads, "
        f"byte-level BPE of {config.vocab_size} tokens.",
        f"- Heads: {heads.num_heads}, {heads.w1.shape[1]} residual block(s) each, projecting with the backbone's "
        f"lm_head; root term of rank {heads.root_rank}, parent term of rank {heads.parent_rank}.",
        "- Weights in bfloat16, safetensors.",
        "- Data: requests that a program draws, with answers that it writes (`recipes/demo`). Names are words in the",
        f"  sources of Python {result['python']}'s standard library, and made-up ones. One word in ten, and one in",
        "  ten combinations of what a function does, are held out: training has none of them, held-out requests have",
        "  no others.",
        "- Training: backbone and heads together (the combined loss of Medusa-2), then new heads on the backbone's own",
        f"  greedy answers. `make demo-model` is the whole recipe; torch {result['torch']}.",
        "",
        "## Measured",
        "",
        f"{result['answers']} held-out requests, 25 of each kind if there are 100; greedy answers, float32, batch 1.",
        "",
        f"- **Right: {result['answers_right']} of {result['answers']}.** An answer is right if it runs and passes the",
        "  check of its request (`medusa_decoding.demo.requests`). All are in `answers.jsonl`, wrong ones with the "
        "reason.",
        f"- Distinct 4-grams: {result['distinct_4_grams']:.2f} of all 4-grams of an answer, the mean.",
        f"- Answers have {result['answer_tokens']['mean']:.0f} tokens in the mean, "
        f"{result['answer_tokens']['most']} at most.",
        f"- Prompt lookup alone, which copies {lookup['copied']} tokens from the text so far, would have drafted "
        f"{lookup['share_of_tokens']:.0%} of the tokens: {lookup['tokens_per_step']:.2f} tokens per step.",
        "",
        "| | " + " | ".join(f"head {k}" for k in range(1, heads.num_heads + 1)) + " |",
        "|---|" + "---|" * heads.num_heads,
        "| top-1 accuracy | " + " | ".join(f"{row[0]:.3f}" for row in result["head_accuracy"]) + " |",
        "",
        "Tokens per step by tree size (root included), measured in the real loop over all answers (standard error over",
        "answers). Expected: from the accuracies on other requests, with heads taken as independent. Every text equals",
        "the plain loop's.",
        "",
        "| nodes | tokens per step | expected |",
        "|---|---|---|",
    ]
    for size, row in result["tokens_per_step"].items():
        lines.append(f"| {size} | {row['greedy']:.2f} ± {row['standard_error']:.2f} | {row['expected']:.2f} |")
    lines += [
        "",
        "## Licence",
        "",
        "Requests and answers are made by a program of this project. The weights and this card are distributed under",
        "the project's Apache License 2.0.",
        "",
    ]
    return "\n".join(lines)


def write(model: Path, heads_folder: Path, out: Path, **amounts: int) -> None:
    """Write base model, heads, trees, figures, answers and card; `amounts` are arguments of `measure`."""
    tokenizer = pretrained.load_tokenizer(model)
    base = pretrained.load_model(model, dtype=torch.bfloat16).eval().requires_grad_(False)
    heads = read_heads(heads_folder, dtype=torch.bfloat16).heads.eval().requires_grad_(False)
    result, checked = measure(base.float(), heads.float(), tokenizer, **amounts)
    base.to(torch.bfloat16).save_pretrained(out / "base")
    for weights in (out / "base").glob("*.safetensors"):
        weights.chmod(0o644)  # safetensors writes files that only their owner may read
    tokenizer.save_pretrained(out / "base")
    write_heads(heads.to(torch.bfloat16), out / "heads", base_model="../base")
    for name, size in (("medusa_tree.json", 8), ("medusa_tree_64.json", 64)):
        Tree.optimal(result["calibration"], size).save(out / "heads" / name)
    write_json(out / "measured.json", result)
    # Where `tree="auto"`, `medusa tune` and `medusa tree` look for them.
    write_json(out / "heads" / "measured.json", {"accuracies": result["calibration"]})
    write_text(out / "answers.jsonl", "".join(json.dumps(one) + "\n" for one in checked))
    write_text(out / "README.md", card(result, base.config, heads))


def main() -> int:
    """Write the folder that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the trained backbone")
    parser.add_argument("--heads", type=Path, required=True, help="folder of its heads")
    parser.add_argument("--out", type=Path, required=True, help="checkpoint folder to write")
    args = parser.parse_args()
    with only_writer("--out", args.out):
        write(args.model, args.heads, args.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
