"""Run `medusa demo`: see `cli.parsers.demo` for its arguments."""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from transformers import TextStreamer
from transformers.utils.logging import disable_progress_bar

from medusa_decoding.checkpoints import pretrained
from medusa_decoding.cli._arguments import torch_dtype
from medusa_decoding.decode.runtime.steps import resolve_backend
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.model import MedusaModel, MedusaOutput
from medusa_decoding.trees.tree import Tree

PROMPTS = (
    'class Stack:\n    """A last-in, first-out stack."""\n\n    def __init__(self):\n',
    'import os\nimport sys\n\n\ndef read_lines(path):\n    """Return the lines of a text file."""\n',
    "class TestQueue(unittest.TestCase):\n    def setUp(self):\n        self.queue = Queue()\n\n    def test_get",
)


def run(args: argparse.Namespace) -> int:
    """Stream an answer, then measure and print; return 1 if the texts differ in float32."""
    disable_progress_bar()  # loading takes 9 MB
    tokenizer = pretrained.load_tokenizer(CHECKPOINT / "base")
    prompts = [tokenizer(text, return_tensors="pt").input_ids for text in ([args.prompt] if args.prompt else PROMPTS)]
    if prompts[0].numel() == 0:
        raise ValueError("--prompt: expected some text, got none")
    with MedusaModel.from_pretrained(
        CHECKPOINT / "heads", dtype=torch_dtype(args.dtype), tree=args.tree, backend=args.backend
    ) as model:
        if not args.json:
            parts = [part for part in (model.backbone.causal_lm, model.heads) if part is not None]
            size = sum(weights.numel() for part in parts for weights in part.parameters())
            print(f"A {size / 1e6:.1f}M-parameter model of Python code continues:\n")
            model.generate(prompts[0], max_new_tokens=args.max_new_tokens, streamer=TextStreamer(tokenizer))
            print()
        base = pretrained.load_model(CHECKPOINT / "base", dtype=torch_dtype(args.dtype))
        result = compare(model, base, prompts, args.max_new_tokens, args.rounds)
        backend = resolve_backend(args.backend, model.backbone.device)
    result |= {"dtype": args.dtype, "backend": backend, "threads": torch.get_num_threads()}
    if args.json:
        print(json.dumps(result))
    else:
        print_table(result)
    if not result["identical"] and args.dtype == "float32":
        print("medusa: the texts differ, which must not happen in float32: please report it", file=sys.stderr)
        return 1
    return 0


def compare(model: MedusaModel, base: Any, prompts: list[torch.Tensor], new_tokens: int, rounds: int) -> dict[str, Any]:
    """Run the three methods in turn; return their speed and whether their texts are identical.

    `base` is the same base model as transformers loads it, without swapped attention; prompts are int64 [1, T] each.
    """
    accept_lengths: list[int] = []

    def transformers(ids: torch.Tensor) -> list[int]:
        out = base.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
        return out[0, ids.shape[1] :].tolist()

    def ours(ids: torch.Tensor, tree: Tree | None = None) -> list[int]:
        output = model.generate(ids, max_new_tokens=new_tokens, tree=tree)
        assert isinstance(output, MedusaOutput)
        if tree is None:
            accept_lengths.extend(output.accept_lengths[0])
        return output.sequences[0, ids.shape[1] :].tolist()

    methods: dict[str, Callable[[torch.Tensor], list[int]]] = {
        "transformers": transformers, "plain": functools.partial(ours, tree=Tree([])), "medusa": ours
    }  # fmt: skip
    # Not timed: it compiles and warms up.
    texts = {name: [method(ids) for ids in prompts] for name, method in methods.items()}
    accept_lengths.clear()
    rates: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(rounds):
        for ids in prompts:
            for name, method in methods.items():
                start = time.perf_counter()
                tokens = len(method(ids))
                rates[name].append(tokens / (time.perf_counter() - start))
    histogram = Counter(accept_lengths)
    steps = len(accept_lengths)
    return {
        "tokens_per_second": {name: statistics.median(values) for name, values in rates.items()},
        "tokens_per_step": (sum(accept_lengths) + steps) / steps if steps else None,
        "accepted_length_histogram": {str(n): histogram[n] for n in sorted(histogram)},
        "tree_nodes": model.tree.num_nodes if isinstance(model.tree, Tree) else None,
        "prompts": len(prompts),
        "new_tokens": sum(map(len, texts["medusa"])),
        "rounds": rounds,
        "identical": texts["medusa"] == texts["plain"] == texts["transformers"],
    }


def print_table(result: dict[str, Any]) -> None:
    """Print the comparison as a table."""
    rates = result["tokens_per_second"]
    names = {
        "transformers": "transformers generate",
        "plain": "our plain loop",
        "medusa": f"Medusa, {result['tree_nodes']} nodes" if result["tree_nodes"] else "Medusa, adaptive tree",
    }
    print(f"{'':24}{'tokens/s':>10}{'x generate':>12}{'x plain loop':>14}")
    for name, label in names.items():
        rate = rates[name]
        print(f"{label:24}{rate:10.0f}{rate / rates['transformers']:12.2f}{rate / rates['plain']:14.2f}")
    if result["tokens_per_step"] is not None:
        print(f"\ntokens per step: {result['tokens_per_step']:.2f}; accepted draft tokens per step:")
        total = sum(result["accepted_length_histogram"].values())
        for length, count in result["accepted_length_histogram"].items():
            print(f"  {length}  {'#' * round(40 * count / total):40} {count / total:6.1%}")
    same = "identical" if result["identical"] else "DIFFERENT"
    print(
        f"texts of all three: {same} ({result['new_tokens']} tokens of {result['prompts']} prompts); "
        f"{result['dtype']}, {result['backend']}, {result['threads']} threads, median of {result['rounds']} rounds"
    )
