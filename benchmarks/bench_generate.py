"""Whole generations on the embedded model: transformers' generate, our plain loop and Medusa, each at its best setting.

    python -m benchmarks.bench_generate --prompts 104

First every setting (dtype, eager or compiled step, tree size) is timed on requests of the training side; then the best
of each way answers held-out requests, in turn within this process. Answers end at the model's EOS, or after 256 tokens;
batch 1. The texts are compared: in float32 all three must be identical.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch

from benchmarks import harness
from medusa_decoding.checkpoints import pretrained
from medusa_decoding.decode.runtime.steps import Backend
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.model import MedusaModel, MedusaOutput
from medusa_decoding.trees.tree import Tree
from recipes.demo.requests import draw, encoded

NEW = 256
"""Most new tokens of an answer."""
SIZES = (3, 4, 8, 16, 24)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Way = Callable[[torch.Tensor], list[int]]


class Ways:
    """Every way of decoding the demo model, by name; models are loaded once a dtype and backend."""

    def __init__(self, backends: tuple[Backend, ...]) -> None:
        accuracies = json.loads((CHECKPOINT / "measured.json").read_text())["calibration"]
        trees = {size: Tree.optimal(accuracies, size) for size in SIZES}
        self.steps: dict[str, tuple[int, int]] = {}
        self.groups: dict[str, dict[str, Way]] = {"transformers": {}, "plain": {}, "medusa": {}}
        for dtype in DTYPES:
            for backend in backends:
                model = MedusaModel.from_pretrained(CHECKPOINT / "heads", dtype=DTYPES[dtype], backend=backend)
                if backend == "eager":
                    # A model of its own, not the swapped one.
                    base = pretrained.load_model(CHECKPOINT / "base", dtype=DTYPES[dtype])
                    for cache in ("dynamic", "static"):
                        name = f"transformers {dtype} {cache} cache"
                        self.groups["transformers"][name] = self._transformers(base, cache)
                self.groups["plain"][f"plain {dtype} {backend}"] = self._ours(model, Tree([]), "")
                for size, tree in trees.items():
                    name = f"medusa {dtype} {backend} {size} nodes"
                    self.groups["medusa"][name] = self._ours(model, tree, name)

    def _transformers(self, base: Any, cache: str) -> Way:
        settings: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False}
        if cache == "static":
            settings["cache_implementation"] = "static"

        def way(ids: torch.Tensor) -> list[int]:
            out = base.generate(ids, attention_mask=torch.ones_like(ids), **settings)
            return out[0, ids.shape[1] :].tolist()

        return way

    def _ours(self, model: MedusaModel, tree: Tree, name: str) -> Way:
        def way(ids: torch.Tensor) -> list[int]:
            output = model.generate(ids, max_new_tokens=NEW, tree=tree)
            assert isinstance(output, MedusaOutput)
            committed, steps = self.steps.get(name, (0, 0))
            self.steps[name] = (committed + output.new_tokens[0] - 1, steps + output.steps)
            return output.sequences[0, ids.shape[1] :].tolist()

        return way


def prompts(held_out: bool, count: int, seed: int) -> list[torch.Tensor]:
    """Draw requests of one side as the model's prompts, int64 [1, T] each; the kinds of request take turns."""
    return encoded(pretrained.load_tokenizer(CHECKPOINT / "base"), draw(count, seed, held_out=held_out))


def measure(count: int, tuning: int, backends: tuple[Backend, ...]) -> dict[str, Any]:
    """Choose the best setting of each way, then compare the three on `count` held-out prompts."""
    ways = Ways(backends)
    texts: dict[str, list[list[int]]] = {}

    def counted(name: str, way: Way) -> Callable[[torch.Tensor], int]:
        def run(ids: torch.Tensor) -> int:
            text = way(ids)
            texts.setdefault(name, []).append(text)
            return len(text)

        return run

    everything = {name: way for group in ways.groups.values() for name, way in group.items()}
    trial = prompts(held_out=False, count=tuning, seed=3)
    for way in everything.values():
        way(trial[0])  # compiles and warms up
    tried = harness.interleaved({name: counted(name, way) for name, way in everything.items()}, trial, rounds=2)
    rates = {name: harness.rate(samples) for name, samples in tried.items()}
    best = {group: max(names, key=lambda name: rates[name]) for group, names in ways.groups.items()}
    # One dtype throughout as well, where all texts must be the same.
    in_fp32 = {
        group: max((n for n in names if "float32" in n), key=lambda name: rates[name])
        for group, names in ways.groups.items()
    }
    chosen = {name: everything[name] for name in (*best.values(), *in_fp32.values())}
    texts.clear()
    ways.steps.clear()
    samples = harness.interleaved(
        {name: counted(name, way) for name, way in chosen.items()}, prompts(held_out=True, count=count, seed=11)
    )
    written = sum(map(len, texts[in_fp32["plain"]]))
    figures: dict[str, Any] = {"prompts": count, "max_new_tokens": NEW, "new_tokens": written, "batch": 1}
    for label, names in (("best", best), ("float32", in_fp32)):
        medusa = names["medusa"]
        committed, steps = ways.steps[medusa]
        figures[label] = {
            "settings": names,
            "tokens_per_second": {group: harness.rate(samples[name]) for group, name in names.items()},
            "medusa_over_plain": harness.ratio(samples[medusa], samples[names["plain"]]),
            "medusa_over_transformers": harness.ratio(samples[medusa], samples[names["transformers"]]),
            "plain_over_transformers": harness.ratio(samples[names["plain"]], samples[names["transformers"]]),
            "tokens_per_step": committed / steps,
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
