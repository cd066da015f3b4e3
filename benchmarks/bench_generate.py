"""Whole generations on the embedded model: transformers' generate, our plain loop and Medusa, each at its best setting.

    python -m benchmarks.bench_generate --prompts 104

First every setting (dtype, eager or compiled step, tree size) is timed on requests of the training side; then the best
of each way answers held-out requests, in turn within this process. Answers end at the model's EOS, or after 256 tokens;
batch 1. The texts are compared: in float32 all three must be identical.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks import harness
from benchmarks.ablations import measuring
from benchmarks.ablations.measuring import Way
from benchmarks.ablations.setup import NEW, Asked, bench_of, prompts
from medusa_decoding.decode.runtime.steps import Backend
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.model import MedusaModel
from medusa_decoding.trees.tree import Tree

SIZES = (3, 4, 8, 16, 24)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def make_ways(backends: Sequence[Backend]) -> dict[str, dict[str, Way]]:
    """Return every way of decoding the demo model by group and name; models are loaded once per dtype and backend."""
    accuracies = json.loads((CHECKPOINT / "measured.json").read_text())["calibration"]
    groups: dict[str, dict[str, Way]] = {"transformers": {}, "plain": {}, "medusa": {}}
    for dtype in DTYPES:
        for backend in backends:
            model = MedusaModel.from_pretrained(CHECKPOINT / "heads", dtype=DTYPES[dtype], backend=backend)
            bench = bench_of(model, [], [], NEW)
            if backend == "eager":
                for cache, settings in (("dynamic", {}), ("static", {"cache_implementation": "static"})):
                    groups["transformers"][f"transformers {dtype} {cache} cache"] = measuring.transformers(
                        bench, **settings
                    )
            groups["plain"][f"plain {dtype} {backend}"] = measuring.ours(bench, Tree([]))
            for size in SIZES:
                tree = Tree.optimal(accuracies, size)
                groups["medusa"][f"medusa {dtype} {backend} {size} nodes"] = measuring.ours(bench, tree)
    return groups


def measure(count: int, tuning: int, backends: Sequence[Backend]) -> dict[str, Any]:
    """Choose the best setting of each way, then compare the three on `count` held-out prompts."""
    groups = make_ways(backends)
    everything = {name: way for group in groups.values() for name, way in group.items()}
    trial, asked = (
        [Asked(i, ids) for i, ids in enumerate(prompts(held_out=held_out, count=some, seed=seed))]
        for held_out, some, seed in ((False, tuning, 3), (True, count, 11))
    )
    for way in everything.values():
        way(trial[0])  # compiles and warms up
    tried = measuring.answer(everything, trial, rounds=2)
    rates = {name: harness.rate(measuring.timed(written)) for name, written in tried.items()}
    # One dtype throughout as well, where all texts must be the same.
    best, in_fp32 = (
        {group: max((n for n in names if text in n), key=rates.__getitem__) for group, names in groups.items()}
        for text in ("", "float32")
    )
    found = measuring.answer({name: everything[name] for name in (*best.values(), *in_fp32.values())}, asked)
    samples = {name: measuring.timed(written) for name, written in found.items()}
    texts = {name: [one.text for one in written] for name, written in found.items()}
    new_tokens = sum(map(len, texts[in_fp32["plain"]]))
    figures: dict[str, Any] = {"prompts": count, "max_new_tokens": NEW, "new_tokens": new_tokens, "batch": 1}
    for label, names in (("best", best), ("float32", in_fp32)):
        theirs, plain, medusa = (names[group] for group in groups)
        figures[label] = {
            "settings": names,
            "tokens_per_second": {group: harness.rate(samples[name]) for group, name in names.items()},
            "medusa_over_plain": harness.ratio(samples[medusa], samples[plain]),
            "medusa_over_transformers": harness.ratio(samples[medusa], samples[theirs]),
            "plain_over_transformers": harness.ratio(samples[plain], samples[theirs]),
            # The prefill gives a text's first token and is not a step.
            "tokens_per_step": sum(len(one.text) - 1 for one in found[medusa]) / sum(o.steps for o in found[medusa]),
            "same_text_as_transformers_float32": {
                group: sum(a == b for a, b in zip(texts[name], texts[in_fp32["transformers"]], strict=True))
                for group, name in names.items()
            },
        }
    figures["tuning"] = {name: round(value, 1) for name, value in rates.items()}
    return figures


def main() -> None:
    """Run the whole comparison, print it and append it to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=104, help="held-out requests (default: 104)")
    parser.add_argument(
        "--tuning-prompts", type=int, default=6, help="requests that settings are chosen on (default: 6)"
    )
    parser.add_argument("--eager-only", action="store_true", help="leave compiled steps out")
    args = parser.parse_args()
    backends: tuple[Backend, ...] = ("eager",) if args.eager_only else ("eager", "compiled")
    figures = measure(args.prompts, args.tuning_prompts, backends)
    print(json.dumps(figures, indent=1))
    print(harness.write_record("generate-demo", figures))


if __name__ == "__main__":
    main()
