"""Writes the embedded checkpoint's model card from what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def write_card(path: Path, result: dict[str, Any]) -> None:
    """Write the card as Markdown.

    Args:
        path: file to write.
        result: what `train.finish` measured (also kept beside the card as `measured.json`).
    """
    pretrain, distill = result["pretrain"], result["distill"]
    lines = [
        "# The demo checkpoint",
        "",
        "A small Llama-architecture model of Python code with Medusa heads, made to show decoding, not to write good",
        "code.",
        "",
        f"- Backbone: {pretrain['num_layers']} layers, hidden size {pretrain['hidden_size']}, feed-forward "
        f"{pretrain['intermediate_size']}, {pretrain['num_attention_heads']} query and {pretrain['num_kv_heads']} KV "
        f"heads of size {pretrain['hidden_size'] // pretrain['num_attention_heads']}, byte-level BPE of "
        f"{pretrain['vocab_size']} tokens, trained on crops of up to {pretrain['context']} tokens.",
        f"- Heads: {pretrain['num_heads']}, {distill['head_layers']} residual block(s) each, projecting with the "
        "backbone's lm_head (version 2 of the paper's format).",
        "- Weights in bfloat16, safetensors.",
        f"- Data: the standard library of Python {result['python']}, {result['train_files']} files; "
        f"{len(result['held_out'])} files were held out, modules with their tests (`measured.json` names them).",
        f"- Training: backbone and heads together on {result['pretrain_tokens'] / 1e6:.1f}M tokens in "
        f"{pretrain['minutes']:.0f} minutes on two CPU cores; then the heads alone on the backbone's own greedy text, "
        f"{distill['prompts']} prompts of {distill['prompt_tokens']} tokens continued by {distill['new_tokens']}, "
        f"{distill['epochs']} epochs. `train.py` in the folder above is the whole recipe; torch {result['torch']}.",
        "",
        "## Measured",
        "",
        "Prompts of 128 tokens from held-out files, 128 new tokens, float32. Accuracy is top-1; greedy means on the",
        "model's own greedy continuations, text on the held-out files themselves.",
        "",
        f"- Next token on held-out text: top-1 {result['next_token_top1_on_text']:.3f}, loss "
        f"{result['loss_on_text']:.3f} nats a token.",
        f"- Distinct 4-grams: {result['distinct_4_grams_greedy']:.2f} in greedy text, "
        f"{result['distinct_4_grams_text']:.2f} in the files' own. Greedy text of a model this small repeats itself, "
        "and repetition is easy to guess: read the greedy figures with that in mind.",
        "",
        "| top-1 accuracy | " + " | ".join(f"head {k + 1}" for k in range(pretrain["num_heads"])) + " |",
        "|---|" + "---|" * pretrain["num_heads"],
    ]
    for name in ("greedy", "text"):
        row = " | ".join(f"{head[0]:.3f}" for head in result[f"head_accuracy_{name}"])
        lines.append(f"| {name} | {row} |")
    lines += [
        "",
        "Tokens a step by tree size (root included), greedy measured in the real loop over 128 prompts (mean, standard",
        "error over prompts) and on the files' own text (walked as if the model had chosen it). Expected: from the",
        "accuracies of other prompts, taking heads as independent.",
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
    path.write_text("\n".join(lines), encoding="utf-8")
