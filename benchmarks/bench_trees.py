"""Whether the expected tokens per step of a tree can be trusted: trees searched on some prompts, measured on others.

    python -m benchmarks.bench_trees                                              # the demo model, drawn requests
    python -m benchmarks.bench_trees --model HEADS --prompts CHATS.jsonl.gz mt_bench.jsonl --counts 80 50

Trees of each size are searched by products, by paths and by walking, on the texts that the model writes in answer to
the first prompts. The next prompts judge them: by their own texts, and (greedy, the walked tree) by what decoding
made. At each temperature above 0 the same is done with sampled texts, where `greedy_tree` is the tree by greedy texts.
Everything is counted: no figure depends on the machine's speed.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import harness
from medusa_decoding.checkpoints import find_base_model, pretrained
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.evaluation import interval
from medusa_decoding.evaluation.prompts import Prompt, read_prompts
from medusa_decoding.model import MedusaModel
from medusa_decoding.trees.tree import Tree
from medusa_decoding.tuning.calibration import Calibration
from medusa_decoding.tuning.collect import calibrate
from medusa_decoding.tuning.expected import expect, search_trees
from medusa_decoding.tuning.replay import walk
from medusa_decoding.tuning.search import walked_tree
from medusa_decoding.tuning.texts import Settings, Writer
from recipes.demo.requests import draw

SIZES = (4, 8, 16, 32, 64)


def measure(
    model: MedusaModel, tokenizer: Any, known: Sequence[Prompt], others: Sequence[Prompt], settings: dict[str, Any]
) -> dict[str, Any]:
    """Search trees on `known` prompts and judge them on `others`; return the record's figures by nodes.

    `settings` has `max_new_tokens`, and the `temperatures` of sampled texts.
    """
    tokens = settings["max_new_tokens"]
    searched, judging = (calibrate(model, tokenizer, part, max_new_tokens=tokens) for part in (known, others))
    writer = Writer(model, tokenizer, Settings(tokens))
    sizes: dict[str, Any] = {}
    trees = {size: walked_tree(searched, size) for size in SIZES}
    for size, found in zip(SIZES, search_trees(searched, SIZES, judging), strict=True):
        sizes[str(size)] = validate(searched, writer, others, trees[size]) | {
            "searched_by": {
                one.by: {"expected": asdict(one.expected), "held_out": asdict(one.held_out)}
                for one in found
                if one.held_out is not None
            }
        }
    sampled: dict[str, Any] = {}
    for temperature in settings["temperatures"]:
        fitted, held = (
            calibrate(model, tokenizer, part, max_new_tokens=tokens, temperature=temperature, seed=1)
            for part in (known, others)
        )
        sampled[str(temperature)] = {
            str(size): {
                "greedy_tree": asdict(expect(held, trees[size])),
                "sampled_tree": asdict(expect(held, walked_tree(fitted, size))),
            }
            for size in SIZES
        }
    return {"prompts": [len(known), len(others)], **settings, "sizes": sizes, "sampled": sampled}


def validate(calibration: Calibration, writer: Writer, prompts: Sequence[Prompt], tree: Tree) -> dict[str, Any]:
    """Answer prompts with a tree, and compare the tokens per step with what a calibration on other prompts expects.

    `ratio` is the walked expectation over the measurement; its interval accounts for the chance in both samples.
    """
    rows = []  # tokens and steps of each prompt; the tokens of prefills are not counted
    for one in writer.answers(enumerate(prompts), tree):
        lengths = [written.accept_lengths for written in one.written]
        steps = sum(map(len, lengths))
        rows.append((steps + sum(map(sum, lengths)), steps))
    measured = interval.ratio(rows)
    if measured is None:
        raise ValueError("prompts: none leaves room for more than one new token")
    ratio = interval.ratio_of_two(walk(calibration, tree).by_prompt, rows)
    return {
        "expected": asdict(expect(calibration, tree)), "measured": asdict(measured), "ratio": asdict(ratio),
        "steps": sum(steps for _, steps in rows),
    }  # fmt: skip


def main() -> None:
    """Measure, print and append to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=CHECKPOINT / "heads", help="folder of the heads (default: demo)")
    parser.add_argument(
        "--prompts",
        nargs="+",
        type=Path,
        help="files of prompts, which are shuffled (default: held-out requests of the demo model)",
    )
    parser.add_argument(
        "--counts", nargs=2, type=int, default=(120, 60), help="prompts to search on and to judge by (default: 120 60)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, help="default: 128")
    parser.add_argument(
        "--temperatures", nargs="*", type=float, default=(0.7, 1.0), help="of sampled texts (default: 0.7 1)"
    )
    args = parser.parse_args()
    asked = sum(args.counts)
    if args.prompts is None:
        prompts = [Prompt((one.text,), one.kind) for one in draw(asked, 13, held_out=True)]
    else:
        prompts = read_prompts(args.prompts, turns=1, distinct=True)
        random.Random(0).shuffle(prompts)
    if len(prompts) < asked:
        raise SystemExit(f"--counts: expected at most {len(prompts)} different prompts in all, got {asked}")
    settings = {"max_new_tokens": args.max_new_tokens, "temperatures": args.temperatures}
    with MedusaModel.from_pretrained(args.model, dtype="float32") as model:
        tokenizer = pretrained.load_tokenizer(find_base_model(args.model))
        figures = measure(model, tokenizer, prompts[: args.counts[0]], prompts[args.counts[0] : asked], settings)
    print(json.dumps(figures, indent=1))
    print(harness.write_record("trees", {"model": str(args.model), **figures}))


if __name__ == "__main__":
    main()
