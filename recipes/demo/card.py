"""Round a trained demo model to bfloat16, measure it, and write its checkpoint folder with a model card.

    python -m recipes.demo.card --model runs/demo-model/joint/model --heads runs/demo-model/heads/heads --out FOLDER

Trees and accuracies are calibrated on training files and measured on held-out files.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from medusa_decoding.checkpoints import pretrained, read_heads, write_heads
from medusa_decoding.evaluation.own_text import RANKS, accuracy_of_texts, own_text_ranks
from medusa_decoding.files import only_writer, write_json, write_text
from medusa_decoding.heads import MedusaHeads
from medusa_decoding.model import MedusaModel, MedusaOutput
from medusa_decoding.provenance import versions
from medusa_decoding.trees import replay
from medusa_decoding.trees.calibration import NONE, Calibration
from medusa_decoding.trees.tree import Tree
from recipes.demo import corpus

TREE_SIZES = (2, 4, 8, 16, 32, 64)
PROMPT, NEW = 128, 128


def continuations(model: MedusaModel, prompts: torch.Tensor, new_tokens: int, batch: int = 64) -> torch.Tensor:
    """Return prompts with their greedy continuations, int64 [b, prompt + new]; no row ends early."""
    found = []
    for rows in prompts.split(batch):
        output = model.generate(rows, max_new_tokens=new_tokens, eos_token_id=[], tree=Tree([]))
        assert isinstance(output, MedusaOutput)
        found.append(output.sequences)
    return torch.cat(found)


def distinct_four_grams(rows: Sequence[Sequence[int]]) -> float:
    """Return distinct 4-grams / all 4-grams, the mean over texts: 1 if nothing repeats, near 0 for text that loops."""
    grams = [[tuple(row[i : i + 4]) for i in range(len(row) - 3)] for row in rows]
    return statistics.fmean(len(set(of)) / len(of) for of in grams if of)


@torch.no_grad()
def next_token_accuracy(base: PreTrainedModel, tokens: torch.Tensor) -> tuple[float, float]:
    """Return the top-1 accuracy and the mean loss (nats per token) of a model on texts int64 [b, T]."""
    logits = base(tokens, use_cache=False).logits[:, :-1].float().flatten(0, 1)
    targets = tokens[:, 1:].flatten()
    return float((logits.argmax(-1) == targets).float().mean()), float(F.cross_entropy(logits, targets))


def measure(
    base: PreTrainedModel,
    heads: MedusaHeads,
    tokenizer: PreTrainedTokenizerBase,
    *,
    prompts: int = 128,
    calibration_prompts: int = 256,
) -> dict[str, Any]:
    """Measure everything that the card states.

    Raises:
        AssertionError: a tree writes another text than plain greedy decoding.
    """
    files = corpus.split()
    train, held_out = (
        corpus.encode(files, names, tokenizer.backend_tokenizer) for names in (files.train, files.held_out)
    )
    asked = corpus.random_prompts(held_out, prompts, PROMPT, seed=11)
    text = corpus.random_prompts(held_out, prompts, PROMPT + NEW, seed=13)
    top1, loss = next_token_accuracy(base, text)

    def accuracy(texts: torch.Tensor) -> list[list[float]]:
        return accuracy_of_texts(model, [(row, PROMPT) for row in texts.tolist()]).by_rank

    with MedusaModel(base, heads) as model:
        known = continuations(model, corpus.random_prompts(train, calibration_prompts, PROMPT, seed=7), NEW)
        accuracies = accuracy(known)
        greedy = continuations(model, asked, NEW)
        ranks = [own_text_ranks(model, row, PROMPT).clamp(min=NONE).tolist() for row in text.tolist()]
        walked = Calibration.of(heads.num_heads, RANKS, [[tuple(map(tuple, row))] for row in ranks])
        result: dict[str, Any] = {
            "next_token_top1_on_text": top1,
            "loss_on_text": loss,
            "distinct_4_grams_greedy": distinct_four_grams(greedy[:, PROMPT:].tolist()),
            "distinct_4_grams_text": distinct_four_grams(text[:, PROMPT:].tolist()),
            "calibration": accuracies,
            "head_accuracy_greedy": accuracy(greedy),
            "head_accuracy_text": accuracy(text),
            "tokens_per_step": {},
        }
        for size in TREE_SIZES:
            tree = Tree.optimal(accuracies, size)
            rates = []
            for prompt, expected in zip(asked.split(1), greedy.split(1), strict=True):
                output = model.generate(prompt, max_new_tokens=NEW, eos_token_id=[], tree=tree)
                assert isinstance(output, MedusaOutput)
                assert torch.equal(output.sequences, expected), f"{size} nodes: expected the text of plain decoding"
                rates.append(output.tokens_per_step)
            result["tokens_per_step"][size] = {
                "greedy": statistics.fmean(rates),
                "standard_error": statistics.stdev(rates) / len(rates) ** 0.5,
                "expected": tree.expected_tokens(accuracies),
                "text": replay.walk(walked, tree).tokens_per_step,
            }
    return result | versions("torch") | {"train_files": len(files.train), "held_out": files.held_out}


def card(result: dict[str, Any], config: Any, heads: MedusaHeads) -> str:
    """Return the card as Markdown.

    Args:
        result: what `measure` returned.
        config: of the base model.
        heads: of the checkpoint.
    """
    lines = [
        "# The demo checkpoint",
        "",
        "A small Llama-architecture model of Python code with Medusa heads, made to show decoding, not to write good",
        "code.",
        "",
        f"- Backbone: {config.num_hidden_layers} layers, hidden size {config.hidden_size}, feed-forward "
        f"{config.intermediate_size}, {config.num_attention_heads} query and {config.num_key_value_heads} KV heads, "
        f"byte-level BPE of {config.vocab_size} tokens.",
        f"- Heads: {heads.num_heads}, {heads.w1.shape[1]} residual block(s) each, projecting with the backbone's "
        "lm_head (version 2 of the paper's format).",
        "- Weights in bfloat16, safetensors.",
        f"- Data: the standard library of Python {result['python']}, {result['train_files']} files; "
        f"{len(result['held_out'])} files were held out, modules with their tests (`measured.json` names them).",
        "- Training: backbone and heads together, then the heads alone on the backbone's own greedy text. "
        f"`make demo-model` is the whole recipe; torch {result['torch']}.",
        "",
        "## Measured",
        "",
        "Prompts of 128 tokens from held-out files, 128 new tokens, float32. Accuracy is top-1; greedy means on the",
        "model's own greedy continuations, text on the held-out files themselves.",
        "",
        f"- Next token on held-out text: top-1 {result['next_token_top1_on_text']:.3f}, loss "
        f"{result['loss_on_text']:.3f} nats per token.",
        f"- Distinct 4-grams: {result['distinct_4_grams_greedy']:.2f} in greedy text, "
        f"{result['distinct_4_grams_text']:.2f} in the files' own. Greedy text of a model this small repeats itself, "
        "and repetition is easy to predict: read the greedy figures with that in mind.",
        "",
        "| top-1 accuracy | " + " | ".join(f"head {k}" for k in range(1, heads.num_heads + 1)) + " |",
        "|---|" + "---|" * heads.num_heads,
    ]
    for name in ("greedy", "text"):
        lines.append(f"| {name} | " + " | ".join(f"{row[0]:.3f}" for row in result[f"head_accuracy_{name}"]) + " |")
    lines += [
        "",
        "Tokens per step by tree size (root included), greedy measured in the real loop (mean and standard error over",
        "prompts) and on the files' own text (walked as if the model had chosen it). Expected: from the accuracies on",
        "other prompts, with heads taken as independent.",
        "",
        "| nodes | greedy | expected | text |",
        "|---|---|---|---|",
    ]
    for size, row in result["tokens_per_step"].items():
        greedy = f"{row['greedy']:.2f} ± {row['standard_error']:.2f}"
        lines.append(f"| {size} | {greedy} | {row['expected']:.2f} | {row['text']:.2f} |")
    lines += [
        "",
        "## Licence",
        "",
        "The training text is Python's standard library, under the Python Software Foundation License Version 2. The",
        "weights and this card are distributed under the project's Apache License 2.0.",
        "",
    ]
    return "\n".join(lines)


def write(model: Path, heads_folder: Path, out: Path, **amounts: int) -> None:
    """Write base model, heads, trees, figures and card; `amounts` are arguments of `measure`."""
    tokenizer = pretrained.load_tokenizer(model)
    base = pretrained.load_model(model, dtype=torch.bfloat16).eval().requires_grad_(False)
    heads = read_heads(heads_folder, dtype=torch.bfloat16).heads.eval().requires_grad_(False)
    result = measure(base.float(), heads.float(), tokenizer, **amounts)
    base.to(torch.bfloat16).save_pretrained(out / "base")
    for weights in (out / "base").glob("*.safetensors"):
        weights.chmod(0o644)  # safetensors writes files that only their owner may read
    tokenizer.save_pretrained(out / "base")
    write_heads(heads.to(torch.bfloat16), out / "heads", base_model="../base")
    for name, size in (("medusa_tree.json", 8), ("medusa_tree_64.json", 64)):
        Tree.optimal(result["calibration"], size).save(out / "heads" / name)
    write_json(out / "measured.json", result)
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
