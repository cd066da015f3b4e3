"""Measure what `tree="auto"` costs with useless heads, and how near it comes to the best fixed tree with good ones.

    python -m benchmarks.bench_adaptive --prompts 60

Both run on the embedded model: first random heads against plain decoding, then the model's own heads against every
fixed tree of the same set. All ways run in turn on each prompt within this process. "plain again" is a second copy of
plain decoding; its ratio shows the resolution of the measurement. "auto" is warm: it has written some other prompts
before and keeps what it learns; "auto, first" starts each prompt without knowing the device or the heads. With
`--busy 2`, two busy processes run beside it, and times are the processor time of the decoding thread.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch

from benchmarks import harness
from benchmarks.ablations import measuring
from benchmarks.ablations.measuring import Way, Written
from benchmarks.ablations.setup import NEW, Asked, bench_of, prompts
from medusa_decoding.checkpoints import pretrained
from medusa_decoding.decode.runtime.steps import Backend
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.heads import MedusaHeads
from medusa_decoding.model import MedusaModel
from medusa_decoding.trees.tree import Tree

TreeChoice = Tree | Literal["auto"]
HEADS = 4
WARM_UP = 6
"""Prompts that "auto" writes before it is measured."""


def random_heads(base: Any, seed: int) -> MedusaHeads:
    """Return untrained heads of the embedded ones' size, each with its own projection."""
    config, generator = base.config, torch.Generator().manual_seed(seed)
    heads = MedusaHeads(config.hidden_size, config.vocab_size, HEADS, num_layers=2, dtype=base.dtype)
    for weights in heads.parameters():
        with torch.no_grad():
            weights.copy_(torch.randn(weights.shape, generator=generator) / config.hidden_size**0.5)
    return heads.eval()


def compare(
    model: MedusaModel,
    choices: Mapping[str, TreeChoice],
    asked: Sequence[Asked],
    warm_up: Sequence[Asked],
    clock: Callable[[], float],
) -> dict[str, Any]:
    """Run every choice of a tree on every prompt, and return what "auto" gained over each of the others."""
    bench = bench_of(model, [], [], NEW)

    def learning(name: str, choice: TreeChoice) -> Way:
        way, kept = measuring.ours(bench, choice, clock=clock), {}  # type: ignore[var-annotated]

        def run(one: Asked) -> Written:
            # "auto" and "auto, first" use the same model, but must not learn from each other.
            model._policies = {} if name.endswith("first") else kept
            return way(one)

        return run

    ways = {name: learning(name, choice) for name, choice in choices.items()}
    for name, way in ways.items():
        for one in warm_up if name == "auto" else warm_up[:1]:
            way(one)
    found = measuring.answer(ways, asked)
    samples = {name: measuring.timed(written) for name, written in found.items()}
    return {
        "tokens_per_second": {name: harness.rate(of) for name, of in samples.items()},
        # The prefill gives a text's first token and is not a step.
        "tokens_per_step": {
            name: sum(len(one.text) - 1 for one in written) / sum(one.steps for one in written)
            for name, written in found.items()
        },
        "over_plain": {name: harness.ratio(samples[name], samples["plain"]) for name in samples if name != "plain"},
        "auto_over": {name: harness.ratio(samples["auto"], samples[name]) for name in samples if name != "auto"},
        "same_text_as_plain": {
            name: sum(a.text == b.text for a, b in zip(written, found["plain"], strict=True))
            for name, written in found.items()
        },
    }


def measure(count: int, backend: Backend, seed: int, busy: int = 0) -> dict[str, Any]:
    """Compare with random heads, then with the model's own."""
    warm_up, asked = (
        [Asked(i, ids) for i, ids in enumerate(prompts(held_out=held_out, count=some, seed=drawn))]
        for held_out, some, drawn in ((False, WARM_UP, 3), (True, count, 11))
    )
    base = pretrained.load_model(CHECKPOINT / "base", dtype=torch.float32).eval()
    plain: dict[str, TreeChoice] = {
        "plain": Tree([]),
        "plain again": Tree([]),
        "auto": "auto",
        "auto, first": "auto",
    }
    # Beside busy processes, wall times tell what the scheduler did.
    clock = time.thread_time if busy else time.perf_counter
    figures: dict[str, Any] = {
        "busy": busy, "clock": clock.__name__,
        "prompts": count, "warm_up": WARM_UP, "max_new_tokens": NEW, "batch": 1, "dtype": "float32", "backend": backend,
    }  # fmt: skip
    with MedusaModel(base, random_heads(base, seed), backend=backend) as model:
        figures["random_heads"] = compare(model, plain, asked, warm_up, clock)
    # As users load it: with the accuracies and the tree that are stored next to the heads.
    with MedusaModel.from_pretrained(CHECKPOINT / "heads", dtype=torch.float32, backend=backend) as model:
        fixed = {f"{tree.num_nodes} nodes": tree for tree in model._adaptive().trees[1:]}
        figures["own_heads"] = compare(model, plain | fixed, asked, warm_up, clock)
    return figures


def main() -> None:
    """Run both comparisons, print them and append them to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=60, help="held-out requests (default: 60)")
    parser.add_argument(
        "--backend", choices=("eager", "compiled"), default="eager", help="how steps run (default: eager)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random heads (default: 0)")
    parser.add_argument("--busy", type=int, default=0, help="busy processes beside it (default: 0)")
    parser.add_argument("--dry", action="store_true", help="print only, append nothing")
    args = parser.parse_args()
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(args.busy)]
    try:
        figures = measure(args.prompts, args.backend, args.seed, args.busy)
    finally:
        for process in others:
            process.kill()
    print(json.dumps(figures, indent=1))
    if not args.dry:
        print(harness.write_record("adaptive-demo-busy" if args.busy else "adaptive-demo", figures))


if __name__ == "__main__":
    main()
