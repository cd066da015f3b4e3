"""What a branch copied from the text is worth: on real answers by category, and in generation by kind of request.

    python -m benchmarks.bench_lookup --prompts 120                      # generation on the demo model
    python -m benchmarks.bench_lookup --replay dev.jsonl.gz --tokenizer-text train.jsonl.gz

Generation: the demo model answers held-out requests, with every tree with and without copied branches, in turn within
this process; figures are by kind of request, as some answers repeat more names than others. It has no request that
asks for an edit of given code: the replay has those.

Replay: the answers of chat models (ShareGPT form) are taken as the text to be written, and only lookup drafts:
tokens per step with a copied branch alone, where plain decoding has 1. Tokens are those of a byte-pair encoding trained
on the second file. Prompts that ask for a summary, for an edit and for code are told apart by words.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from benchmarks import harness
from benchmarks.ablations import measuring, setup
from benchmarks.ablations.setup import NEW
from medusa_decoding.checkpoints import pretrained
from medusa_decoding.decode.lookup import Text, look_up
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.model import MedusaModel
from medusa_decoding.trees.tree import Tree
from recipes.demo.requests import draw, encoded

LENGTHS = (2, 4, 8, 16)
CATEGORIES = {
    "summarise": r"summar|tl;dr",
    "edit": r"\b(rewrite|re-write|edit|proofread|correct the|fix|rephrase|paraphrase)\b",
    "code": r"\b(code|function|python|javascript|sql|html|java)\b",
}


def generation(count: int) -> dict[str, Any]:
    """Run the demo model on each kind of request, with and without copied branches."""
    accuracies = json.loads((CHECKPOINT / "measured.json").read_text())["calibration"]
    bases = {"plain": Tree([]), "4 nodes": Tree.optimal(accuracies, 4), "8 nodes": Tree.optimal(accuracies, 8)}
    trees = {
        f"{name}, copied {length}" if length else name: tree.with_lookup(length)
        for name, tree in bases.items()
        for length in (0, *LENGTHS)
    }
    figures: dict[str, Any] = {
        "prompts": count, "max_new_tokens": NEW, "batch": 1, "dtype": "float32", "backend": "eager"
    }  # fmt: skip
    tokenizer, kinds = pretrained.load_tokenizer(CHECKPOINT / "base"), defaultdict(list)
    for request in draw(count, 21, held_out=True):
        kinds[request.kind].append(request)
    with MedusaModel.from_pretrained(CHECKPOINT / "heads", dtype=torch.float32) as model:
        for kind, requests in kinds.items():
            bench = setup.bench_of(model, encoded(tokenizer, requests), [], NEW)
            ways = {name: measuring.ours(bench, tree) for name, tree in trees.items()}
            found = measuring.compare(bench, ways, dict.fromkeys(trees.keys() - {"plain"}, "plain"))
            timed = {name: [(len(one.text), one.seconds) for one in of.written] for name, of in found.items()}
            figures[kind] = {
                name: {
                    "tokens_per_step": sum(one.committed for one in of.written) / sum(one.steps for one in of.written),
                    "over_plain": harness.ratio(timed[name], timed["plain"]),
                    "over_same_tree_without": harness.ratio(timed[name], timed[name.split(",")[0]]),
                }
                for name, of in found.items()
            } | {"same_text_as_plain": True, "prompts": len(requests)}
    return figures


def conversations(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the first question and answer of each conversation of a ShareGPT file."""
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            turns = json.loads(line)["conversations"]
            yield turns[0]["value"], turns[1]["value"]


def byte_pairs(path: Path, vocab_size: int, texts: int) -> Tokenizer:
    """Train a byte-level byte-pair encoding on the first texts of a file."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    both = (text for _, pair in zip(range(texts), conversations(path), strict=False) for text in pair)
    tokenizer.train_from_iterator(both, trainer)
    return tokenizer


def replayed(question: list[int], answer: list[int], length: int) -> int:
    """Return the steps that writing an answer takes when only a copied branch drafts."""
    held = Text.allocate(1, len(question) + len(answer), len(answer), torch.device("cpu"))
    held.begin([torch.tensor(question)])
    output = torch.tensor([answer])
    written, steps = 1, 0
    while written < len(answer):
        copied = look_up(held, output, torch.tensor([written]), length)[0].tolist()
        accepted = 0
        while accepted < length and written + accepted < len(answer) and copied[accepted] == answer[written + accepted]:
            accepted += 1
        written += accepted + 1
        steps += 1
    return steps


def replay(chat: Path, text: Path, limit: int) -> dict[str, Any]:
    """Replay up to `limit` answers a category."""
    tokenizer = byte_pairs(text, 16384, 15000)
    groups: dict[str, list[tuple[list[int], list[int]]]] = {name: [] for name in (*CATEGORIES, "other")}
    for question, answer in conversations(chat):
        asked = [name for name, words in CATEGORIES.items() if re.search(words, question.lower())] or ["other"]
        ids = tokenizer.encode(question).ids, tokenizer.encode(answer).ids
        if len(ids[1]) > 1:
            for name in asked:
                groups[name].append(ids)
    chooser = random.Random(0)
    figures: dict[str, Any] = {"tokenizer": "byte pairs, 16384", "text": "answers as given"}
    for name, pairs in groups.items():
        chosen = chooser.sample(pairs, min(limit, len(pairs)))
        tokens = sum(len(answer) - 1 for _, answer in chosen)
        figures[name] = {"answers": len(chosen), "tokens": tokens} | {
            f"tokens_per_step, copied {length}": tokens / sum(replayed(q, a, length) for q, a in chosen)
            for length in LENGTHS
        }
    return figures


def main() -> None:
    """Run one of the two, print it and append it to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=120, help="requests in generation, of all kinds (default: 120)")
    parser.add_argument("--replay", type=Path, help="chats whose answers are replayed, .jsonl.gz")
    parser.add_argument("--tokenizer-text", type=Path, help="chats that the tokenizer is trained on, .jsonl.gz")
    parser.add_argument("--answers", type=int, default=200, help="answers a category in the replay (default: 200)")
    args = parser.parse_args()
    if args.replay:
        figures = replay(args.replay, args.tokenizer_text or args.replay, args.answers)
        name = "lookup-replay"
    else:
        figures, name = generation(args.prompts), "lookup-demo"
    print(json.dumps(figures, indent=1))
    print(harness.write_record(name, figures))


if __name__ == "__main__":
    main()
