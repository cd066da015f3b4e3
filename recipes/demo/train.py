"""The recipe of the embedded checkpoint: corpus, backbone and heads together, heads distilled, measured, written.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m recipes.demo.train pretrain --work DIR --minutes 80
    python -m recipes.demo.train finish --work DIR --out python/medusa_decoding/demo/checkpoint

`pretrain` runs on as many processes as torchrun starts (gloo on the CPU; one process on a GPU); `finish` distils,
measures and writes the checkpoint with its model card. Each stage leaves its result in DIR and is skipped when it is
there, so that a stopped run goes on where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from medusa_decoding.checkpoints import write_heads
from medusa_decoding.files import only_writer
from medusa_decoding.heads import MedusaHeads
from medusa_decoding.model import MedusaModel, MedusaOutput
from medusa_decoding.trees.tree import Tree
from recipes.demo import corpus, measure
from recipes.demo.card import write_card
from recipes.demo.distill import (
    DistillSettings,
    HeadData,
    continuations,
    hidden_states,
    random_prompts,
    train_heads,
)
from recipes.demo.pretrain import BackboneWithHeads, PretrainSettings, pretrain, save_atomically

TREE_SIZES = (2, 4, 8, 16, 32, 64)
HELD_OUT_PROMPTS = 128
CALIBRATION_PROMPTS = 256


def prepare(work: Path, vocab_size: int) -> tuple[Tokenizer, np.ndarray, np.ndarray]:
    """Return tokenizer, training tokens and held-out tokens, made once a working folder."""
    tokenizer_file, train_file, held_file = (work / name for name in ("tokenizer.json", "train.npy", "held_out.npy"))
    if not held_file.is_file():
        files = corpus.split()
        tokenizer = corpus.train_tokenizer(files, vocab_size)
        tokenizer.save(str(tokenizer_file))
        np.save(train_file, corpus.encode(files, files.train, tokenizer))
        np.save(held_file, corpus.encode(files, files.held_out, tokenizer))
        listing = {"python": platform.python_version(), "held_out": files.held_out, "train_files": len(files.train)}
        (work / "corpus.json").write_text(json.dumps(listing, indent=1))
    return Tokenizer.from_file(str(tokenizer_file)), np.load(train_file), np.load(held_file)


def run_pretrain(work: Path, settings: PretrainSettings) -> None:
    """Stage 1, in this process's share."""
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if not dist.is_initialized() or dist.get_rank() == 0:
        prepare(work, settings.vocab_size)
    if dist.is_initialized():
        dist.barrier()
    _, train, held_out = prepare(work, settings.vocab_size)
    pretrain(train, held_out, work, settings, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def load_trained(work: Path) -> BackboneWithHeads:
    """Return stage 1's model in fp32, its weights rounded to bfloat16 as they will be shipped."""
    saved = torch.load(work / "pretrain.pt", map_location="cpu", weights_only=True)
    model = BackboneWithHeads(PretrainSettings(**saved["settings"]))
    model.load_state_dict(saved["model"])
    return model.to(torch.bfloat16).float().eval().requires_grad_(False)


def distil(work: Path, model: BackboneWithHeads, train: np.ndarray, settings: DistillSettings) -> MedusaHeads:
    """Stage 2: greedy text of the backbone, then the heads fitted to it; the heads are kept in `work`."""
    base = model.backbone
    config = base.config
    heads = MedusaHeads(
        config.hidden_size, config.vocab_size, len(model.w1), settings.head_layers, shared_projection=True
    )
    kept = work / "heads.pt"
    if kept.is_file():
        heads.load_state_dict(torch.load(kept, weights_only=True))
        return heads
    text_file = work / "greedy.npy"
    if not text_file.is_file():
        prompts = random_prompts(train, settings.prompts, settings.prompt_tokens, settings.seed)
        rows = continuations(base, prompts, settings.new_tokens, settings.generate_batch)
        np.save(text_file, torch.cat(list(rows)).numpy().astype(np.uint16))
    text = torch.from_numpy(np.load(text_file).astype(np.int64))
    data = HeadData.of(base, list(text.split(32)), settings.prompt_tokens - 1, heads.num_heads)
    with torch.no_grad():
        assert heads.b1 is not None
        heads.w1[:, 0].copy_(model.w1)
        heads.b1[:, 0].copy_(model.b1)
    train_heads(heads, base.lm_head, data, settings, work / "distill.jsonl")
    save_atomically(kept, heads.state_dict())
    return heads


def measured(model: BackboneWithHeads, heads: MedusaHeads, train: np.ndarray, held_out: np.ndarray) -> dict:
    """Everything the model card states; trees are calibrated on training-side prompts, measured on held-out ones."""
    base = model.backbone
    start, new = 127, 128
    calibration = list(continuations(base, random_prompts(train, CALIBRATION_PROMPTS, 128, seed=7), new, 64))
    accuracies = measure.head_accuracies(heads, base.lm_head, HeadData.of(base, calibration, start, heads.num_heads))
    prompts = random_prompts(held_out, HELD_OUT_PROMPTS, 128, seed=11)
    greedy = list(continuations(base, prompts, new, 64))
    text = [random_prompts(held_out, HELD_OUT_PROMPTS, 256, seed=13)]
    top1_on_text, loss_on_text = measure.next_token_accuracy(base, text[0])
    result: dict = {
        "next_token_top1_on_text": top1_on_text,
        "loss_on_text": loss_on_text,
        "distinct_4_grams_greedy": measure.distinct_four_grams(torch.cat(greedy)[:, 128:].tolist()),
        "distinct_4_grams_text": measure.distinct_four_grams(text[0][:, 128:].tolist()),
        "calibration": accuracies,
    }
    for name, rows in (("greedy", greedy), ("text", text)):
        data = HeadData.of(base, rows, start, heads.num_heads)
        result[f"head_accuracy_{name}"] = measure.head_accuracies(heads, base.lm_head, data)
    drafts = heads_on_text(model, heads, text[0])
    result["tokens_per_step"] = {}
    with MedusaModel(base, heads) as medusa:
        for size in TREE_SIZES:
            tree = Tree.optimal(accuracies, size)
            rates = []
            for prompt, expected in zip(prompts.split(1), torch.cat(greedy).split(1), strict=True):
                output = medusa.generate(prompt, max_new_tokens=new, eos_token_id=[], tree=tree)
                assert isinstance(output, MedusaOutput)
                if not torch.equal(output.sequences, expected):
                    raise AssertionError(f"the text with {size} nodes differs from plain greedy decoding")
                rates.append(output.tokens_per_step)
            counts = [
                measure.tokens_per_step_on_text(tree, rows[127:], tokens[127:])
                for rows, tokens in zip(drafts, text[0].tolist(), strict=True)
            ]
            result["tokens_per_step"][size] = {
                "greedy": sum(rates) / len(rates),
                "standard_error": measure.standard_error(rates),
                "expected": tree.expected_tokens(accuracies),
                "text": sum(c for c, _ in counts) / sum(s for _, s in counts),
            }
    return result


@torch.no_grad()
def heads_on_text(model: BackboneWithHeads, heads: MedusaHeads, text: torch.Tensor) -> list[list[list[list[int]]]]:
    """Return drafts[row][t][k]: the heads' best tokens at every position of a text int64 [b, T]."""
    found = []
    for tokens in text.split(16):
        states = hidden_states(model.backbone, tokens)
        for row in states:
            found.append(heads.propose(row, measure.RANKS, model.backbone.lm_head)[1].tolist())
    return found


def finish(work: Path, out: Path, settings: DistillSettings) -> None:
    """Stages 2 and 3: distil, measure, and write the checkpoint folder."""
    model = load_trained(work)
    tokenizer, train, held_out = prepare(work, model.settings.vocab_size)
    heads = distil(work, model, train, settings)
    heads = heads.to(torch.bfloat16).float().eval().requires_grad_(False)
    result = measured(model, heads, train, held_out)
    result |= {"pretrain": asdict(model.settings), "distill": asdict(settings)}
    result |= json.loads((work / "corpus.json").read_text())
    log = [json.loads(line) for line in (work / "pretrain.jsonl").read_text().splitlines()]
    result["pretrain_tokens"] = max(row.get("tokens", 0) for row in log)
    result["torch"] = torch.__version__
    (work / "measured.json").write_text(json.dumps(result, indent=1))
    write(out, model, heads, tokenizer, result)


def write(out: Path, model: BackboneWithHeads, heads: MedusaHeads, tokenizer: Tokenizer, result: dict) -> None:
    """Write base model, heads, trees and card; weights in bfloat16."""
    base: Any = model.backbone
    base.to(torch.bfloat16)
    base.generation_config.eos_token_id = base.generation_config.bos_token_id = 0
    base.save_pretrained(out / "base")
    for weights in (out / "base").glob("*.safetensors"):
        weights.chmod(0o644)  # safetensors writes files that only their owner may read
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=corpus.END_OF_TEXT, bos_token=corpus.END_OF_TEXT
    )
    wrapped.save_pretrained(out / "base")
    write_heads(heads.to(torch.bfloat16), out / "heads", base_model="../base")
    accuracies = result["calibration"]
    Tree.optimal(accuracies, 8).save(out / "heads" / "medusa_tree.json")
    Tree.optimal(accuracies, 64).save(out / "heads" / "medusa_tree_64.json")
    (out / "measured.json").write_text(json.dumps(result, indent=1) + "\n")
    write_card(out / "README.md", result)


def main() -> int:
    """Parse the command line and run one stage."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=["pretrain", "finish"])
    parser.add_argument("--work", type=Path, required=True, help="folder of intermediate results")
    parser.add_argument("--out", type=Path, help="checkpoint folder to write (finish)")
    parser.add_argument("--minutes", type=float, default=PretrainSettings.minutes, help="budget of pretrain")
    parser.add_argument("--prompts", type=int, default=DistillSettings.prompts, help="greedy texts to distil on")
    parser.add_argument("--epochs", type=int, default=DistillSettings.epochs, help="passes over the greedy texts")
    args = parser.parse_args()
    if args.stage == "finish" and args.out is None:
        parser.error("finish needs --out")
    args.work.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        if os.environ.get("RANK", "0") == "0":
            held.enter_context(only_writer("--work", args.work, inside=True))
        if args.stage == "pretrain":
            run_pretrain(args.work, PretrainSettings(minutes=args.minutes))
        else:
            held.enter_context(only_writer("--out", args.out))
            finish(args.work, args.out, DistillSettings(prompts=args.prompts, epochs=args.epochs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
