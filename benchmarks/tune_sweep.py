"""Generate with every tree that `medusa tune` chose among, to see whether the chosen one is the fastest.

    python -m benchmarks.tune_sweep --model HEADS --prompts mt_bench.jsonl --limit 3 --out records.jsonl

Each text is written with every tree, in an order shuffled for each text and round. A tree's rate is its tokens over the
time of its steps, with the median of the rounds for each text. Prefills are left out, because they are the same for all
trees. `--out` appends a record to a file.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks import harness
from medusa_decoding.checkpoints import tuning_file
from medusa_decoding.checkpoints.tuning_file import Conditions, Tuning
from medusa_decoding.cli import _arguments
from medusa_decoding.decode.runtime.steps import resolve_backend
from medusa_decoding.evaluation import interval
from medusa_decoding.evaluation.interval import WORDS, Interval
from medusa_decoding.evaluation.prompts import Conversations, Prompt, read_prompts
from medusa_decoding.evaluation.report import in_columns
from medusa_decoding.files import append_line
from medusa_decoding.model import MedusaModel, MedusaOutput
from medusa_decoding.progress import Progress
from medusa_decoding.provenance import machine
from medusa_decoding.trees.tree import Tree


@dataclass(frozen=True)
class Written:
    """One text: tokens from its steps, number of steps, and the duration of the steps."""

    tokens: int
    steps: int
    seconds: float


@dataclass(frozen=True)
class Swept:
    """The result of one tree.

    Attributes:
        texts: tokens of each text, and the median of its rounds' seconds.
        low, high: the rates of the slowest and the fastest round.
        tokens_per_step: over all texts.
    """

    tree: Tree
    texts: tuple[tuple[int, float], ...]
    low: float
    high: float
    tokens_per_step: float

    @property
    def rate(self) -> float:
        """Tokens per second over all texts."""
        return _rate(self.texts)


def compare(
    model: MedusaModel,
    tokenizer: Any,
    tuning: Tuning,
    prompts: Sequence[Prompt],
    max_new_tokens: int = 128,
    rounds: int = 3,
) -> dict[str, Any]:
    """Generate with every tree of a tuning, and compare the trees chosen by it with all of them; show a progress bar.

    The tree chosen for a text is that of the case with the prefix nearest to its prompt's length, as in decoding. For a
    case that the times could not decide, it is the one that seemed the fastest. Prompts without room for the new tokens
    are left out; of the others, the first turn is used. Returns JSON values: what was compared, `cases`, `trees`, and
    what `judge` returns.
    """
    conversations = Conversations(model, tokenizer)
    asked = [(prompt, conversations.encode(prompt)) for prompt in prompts]
    asked = [(prompt, ids) for prompt, ids in asked if len(ids) + max_new_tokens <= model.backbone.context_limit]
    if not asked:
        raise ValueError(f"--prompts: none leaves room for {max_new_tokens} new tokens in the context")
    cases = [tuning.nearest(1, len(ids)) for _, ids in asked]
    chosen = [(case.chosen or case.fastest).tree for case in cases]
    expected = {size.tree: size.tokens for case in cases for size in case.sizes}

    def write(text: int, tree: Tree) -> Written:
        prompt, ids = asked[text]
        ending = conversations.ending(prompt)
        output = model.generate(torch.tensor([ids]), max_new_tokens=max_new_tokens, tree=tree, metrics=True, **ending)
        assert isinstance(output, MedusaOutput)
        assert output.metrics is not None
        return Written(output.new_tokens[0] - 1, output.metrics.steps, output.metrics.decode_seconds)

    eager = resolve_backend(model.backend, model.backbone.device) == "eager"
    with Progress(rounds * len(asked) * len(expected), "text") as bar:
        found = sweep(write, [*expected], len(asked), rounds=rounds, warm_all=not eager, on_text=bar.update)
    texts = Counter(case.prefix for case in cases)
    return {
        "texts": len(asked),
        "left_out": len(prompts) - len(asked),
        "max_new_tokens": max_new_tokens,
        "rounds": rounds,
        "cases": [
            {
                "prefix": prefix,
                "texts": texts[prefix],
                "chosen_nodes": (case.chosen or case.fastest).nodes,
                "undecided": case.chosen is None,
                "step_seconds": [{"nodes": size.nodes, "seconds": size.seconds} for size in case.sizes],
            }
            for prefix, case in sorted({case.prefix: case for case in cases}.items())
        ],
        "trees": [
            {
                "nodes": one.tree.num_nodes,
                "choices": one.tree.choices,
                "chosen": one.tree in chosen,
                "tokens_per_step": one.tokens_per_step,
                "expected_tokens": expected[one.tree],
                "tokens_per_second": one.rate,
                "slowest_round": one.low,
                "fastest_round": one.high,
            }
            for one in found
        ],
        **judge(chosen, found),
    }


def sweep(
    write: Callable[[int, Tree], Written],
    trees: Sequence[Tree],
    texts: int,
    *,
    rounds: int = 3,
    warm_all: bool = False,
    on_text: Callable[[], object] = lambda: None,
) -> list[Swept]:
    """Write texts with every tree, and return one result per tree, in the order of `trees`.

    `write` writes the text with this index with a tree. With `warm_all`, every text is written once with each tree
    before anything counts, instead of the first text only: needed if steps are made at the first use of a shape.
    `on_text` is called after each text that counts, for a progress bar.
    """
    for text in range(texts if warm_all else 1):
        for tree in trees:
            write(text, tree)
    shuffler, order = random.Random(0), list(range(len(trees)))
    found: list[list[list[Written]]] = [[[] for _ in range(rounds)] for _ in trees]
    for number in range(rounds):
        for text in range(texts):
            shuffler.shuffle(order)
            for index in order:
                found[index][number].append(write(text, trees[index]))
                on_text()
    return [_summed(tree, written) for tree, written in zip(trees, found, strict=True)]


def _summed(tree: Tree, rounds: Sequence[Sequence[Written]]) -> Swept:
    tokens, steps = (sum(getattr(one, name) for one in rounds[0]) for name in ("tokens", "steps"))
    if not steps:
        raise ValueError("texts: none has more than one new token")
    texts = tuple(
        (text[0].tokens, statistics.median(one.seconds for one in text)) for text in zip(*rounds, strict=True)
    )
    rates = [tokens / sum(one.seconds for one in written) for written in rounds]
    return Swept(tree, texts, min(rates), max(rates), tokens / steps)


def judge(chosen: Sequence[Tree], found: Sequence[Swept]) -> dict[str, Any]:
    """Compare the trees chosen, one per text, with the results of all trees.

    Returns:
        chosen_tokens_per_second; best_nodes, of the fastest tree; rank, 1 if no tree is faster; behind, the share of
        the fastest tree's rate that the chosen ones lack, below 0 if trees chosen per text are faster than any single
        one; chosen_over_best, the ratio of the rates with a 95 % interval (bootstrap over texts), or None if it is not
        finite. The fastest tree is found on the same texts: if one tree was chosen for all of them, the ratio is at
        most 1 by construction, and below 1 by chance also if trees are equally fast.
    """
    by_tree = {one.tree: one.texts for one in found}
    texts = [by_tree[tree][index] for index, tree in enumerate(chosen)]
    rate, best = _rate(texts), max(found, key=lambda one: one.rate)
    of_best = interval.ratio_of_rates([(*own, *other) for own, other in zip(texts, best.texts, strict=True)])
    return {
        "chosen_tokens_per_second": rate,
        "best_nodes": best.tree.num_nodes,
        "rank": 1 + sum(one.rate > rate for one in found),
        "behind": 1.0 - rate / best.rate,
        "chosen_over_best": None if of_best is None else asdict(of_best),
    }


def _rate(texts: Sequence[tuple[int, float]]) -> float:
    return sum(tokens for tokens, _ in texts) / sum(seconds for _, seconds in texts)


def as_text(figures: dict[str, Any]) -> str:
    """Return a comparison as a table for a terminal."""
    cases = [
        f"{one['chosen_nodes']} nodes for prefix {one['prefix']}" + " (undecided)" * one["undecided"]
        for one in figures["cases"]
    ]
    rows = [["", "nodes", "tokens per step", "expected", "tokens per second", "slowest..fastest round"]]
    for one in figures["trees"]:
        rates = [f"{one[name]:.1f}" for name in ("tokens_per_second", "slowest_round", "fastest_round")]
        tokens = [f"{one[name]:.2f}" for name in ("tokens_per_step", "expected_tokens")]
        rows.append(["*" * one["chosen"], str(one["nodes"]), *tokens, rates[0], "..".join(rates[1:])])
    lines = [
        f"{figures['texts']} texts of up to {figures['max_new_tokens']} new tokens, {figures['rounds']} rounds; "
        f"{figures['left_out']} prompts left out for want of room in the context",
        f"chosen: {', '.join(cases)}",
        in_columns(rows),
        f"what was chosen is number {figures['rank']} of {len(figures['trees'])}, {100 * abs(figures['behind']):.1f} % "
        f"{'behind' if figures['behind'] >= 0 else 'ahead of'} the fastest ({figures['best_nodes']} nodes)",
    ]
    ratio = figures["chosen_over_best"]
    if figures["behind"] and ratio is not None and ratio["low"] is not None:
        lines.append(
            f"rate over that of the fastest: {interval.as_text(Interval(**ratio))} ({WORDS}). The fastest tree was "
            "found on the same texts, so a single chosen tree is at most at 1, and below it by chance too"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Generate with every tree of a stored tuning, print the rank of the chosen ones, and append a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    _arguments.add_model(parser)
    _arguments.add_backend(parser)
    _arguments.add_dtypes(parser)
    words = "as for medusa eval; the first turn of each is used"
    parser.add_argument("--prompts", nargs="+", required=True, metavar="FILE", help=words)
    _arguments.add_option(parser, "--limit N", _arguments.at_least_one, "first N prompts per category")
    _arguments.add_option(parser, "--max-new-tokens N", _arguments.at_least_one, "per text", 128)
    _arguments.add_option(parser, "--rounds R", _arguments.at_least_one, "generations per text", 3)
    _arguments.add_option(parser, "--out FILE", _arguments.path, "file to append a record to")
    parser.set_defaults(tree=Tree([]))  # what is stored must not be loaded with the model
    args = parser.parse_args(arguments)
    _arguments.resolve_device(args)
    prompts = read_prompts(args.prompts, limit=args.limit, turns=1, distinct=True)
    folder, tokenizer = _arguments.heads_folder(args), _arguments.load_tokenizer(args)
    with _arguments.load_model(args) as model:
        assert model.heads is not None
        conditions = Conditions.current(model.backbone, model.heads, model.backend)
        _, tuning = tuning_file.find(folder, conditions, model.heads)
        figures = compare(model, tokenizer, tuning, prompts, args.max_new_tokens, args.rounds)
        device = model.backbone.device
    print(as_text(figures))
    if args.out is not None:
        record = {
            "benchmark": "tune_sweep",
            "model": args.model or "the embedded demo checkpoint",
            "dtype": tuning.conditions.dtype,
            "backend": tuning.conditions.backend,
            "batch": 1,
            "weighed": tuning.weighed,
        }
        append_line(args.out, record | figures | harness.provenance() | {"machine": machine(device)})


if __name__ == "__main__":
    main()
