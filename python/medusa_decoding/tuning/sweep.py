"""Generate with every tree that `medusa tune` chose among, to see whether the chosen one is the fastest.

Each text is written with every tree, in an order shuffled for each text and round. A tree's rate is its tokens over the
time of its steps, with the median of the rounds for each text. Prefills are left out, because they are the same for all
trees.
"""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from medusa_decoding.checkpoints.tuning_file import Tuning
from medusa_decoding.checks import check_count
from medusa_decoding.decode.runtime.steps import resolve_backend
from medusa_decoding.evaluation import interval
from medusa_decoding.evaluation.prompts import Conversations, Prompt
from medusa_decoding.model import MedusaModel, MedusaOutput
from medusa_decoding.progress import Progress
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
    are left out; of the others, the first turn is used.

    Returns:
        JSON values: what was compared, `cases`, `trees`, and what `judge` returns.

    Raises:
        ValueError: no prompt leaves room, or no text has more than one new token.
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
    """Write texts with every tree.

    Args:
        write: writes the text with this index with a tree.
        trees: what to compare.
        texts: number of texts.
        rounds: how often each text is written with each tree.
        warm_all: write every text once with each tree before anything counts, instead of the first text only. Needed if
            steps are made at the first use of a shape.
        on_text: called after each text that counts, for a progress bar.

    Returns:
        One result per tree, in the order of `trees`.

    Raises:
        ValueError: no trees, texts or rounds, or no text with a step.
    """
    for name, value in (("trees", len(trees)), ("texts", texts), ("rounds", rounds)):
        check_count(name, value)
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
