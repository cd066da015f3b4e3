"""What a branch copied from the text is worth in generation, by kind of request.

    python -m benchmarks.bench_lookup --prompts 120

The demo model answers held-out requests, with every tree with and without copied branches, in turn within this
process; figures are by kind of request, as some answers repeat more names than others. No request asks for an edit.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from typing import Any

import torch

from benchmarks import harness
from benchmarks.ablations import measuring, setup
from benchmarks.ablations.setup import NEW
from medusa_decoding.checkpoints import pretrained
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.model import MedusaModel
from medusa_decoding.trees.tree import Tree
from recipes.demo.requests import draw, encoded

LENGTHS = (2, 4, 8, 16)


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
            timed = {name: measuring.timed(of.written) for name, of in found.items()}
            figures[kind] = {
                name: {
                    "tokens_per_step": sum(one.committed for one in of.written) / sum(one.steps for one in of.written),
                    "over_plain": harness.ratio(timed[name], timed["plain"]),
                    "over_same_tree_without": harness.ratio(timed[name], timed[name.split(",")[0]]),
                }
                for name, of in found.items()
            } | {"same_text_as_plain": True, "prompts": len(requests)}
    return figures


def main() -> None:
    """Run it, print it and append it to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=120, help="requests, of all kinds (default: 120)")
    figures = generation(parser.parse_args().prompts)
    print(json.dumps(figures, indent=1))
    print(harness.write_record("lookup-demo", figures))


if __name__ == "__main__":
    main()
