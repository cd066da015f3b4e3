"""What `table2` measures of a model, and how the figures are laid out: perplexity, tokens a step, speed.

This module does not know how models are trained.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks import harness
from medusa_decoding.evaluation import interval
from medusa_decoding.evaluation.interval import Interval
from medusa_decoding.evaluation.own_text import RANKS, own_text_accuracy
from medusa_decoding.model import MedusaModel, MedusaOutput
from medusa_decoding.training.loop.accuracy import HeadAccuracy
from medusa_decoding.trees.tree import Tree
from recipes.demo.card import distinct_four_grams

PLAIN, CHAIN, TREE = "plain", "chain of 3", "16 nodes"
NODES = 16


@dataclass(frozen=True)
class Material:
    """What every setting is measured on: windows of held-out files, prompts of held-out and of training files."""

    windows: list[torch.Tensor]
    prompts: list[torch.Tensor]
    tuning: list[torch.Tensor]


@torch.no_grad()
def score(base: Any, windows: Sequence[torch.Tensor]) -> np.ndarray:
    """Return each file's sum of next-token losses (nats), tokens predicted and of them right, fp64 [files, 3]."""
    found = []
    for rows in windows:
        logits = base(rows, use_cache=False).logits[:, :-1].flatten(0, 1)
        targets = rows[:, 1:].flatten()
        loss = F.cross_entropy(logits.double(), targets, reduction="sum")
        found.append((float(loss), float(len(targets)), float((logits.argmax(-1) == targets).sum())))
    return np.array(found)


@dataclass
class Decoded:
    """Texts written one way, a prompt each.

    Attributes:
        texts: new tokens.
        steps: tokens committed by steps, and steps.
        timed: new tokens and seconds, prefill included.
    """

    texts: list[list[int]] = field(default_factory=list)
    steps: list[tuple[int, int]] = field(default_factory=list)
    timed: list[tuple[int, float]] = field(default_factory=list)


def decode(
    model: MedusaModel, trees: Mapping[str, Tree], prompts: Sequence[torch.Tensor], new_tokens: int
) -> dict[str, Decoded]:
    """Write every prompt's greedy text with every tree, in turn within this process."""
    found = {name: Decoded() for name in trees}

    def way(name: str, tree: Tree) -> Callable[[torch.Tensor], int]:
        def run(ids: torch.Tensor) -> int:
            output = model.generate(ids, max_new_tokens=new_tokens, eos_token_id=[], tree=tree)
            assert isinstance(output, MedusaOutput)
            found[name].texts.append(output.sequences[0, ids.shape[1] :].tolist())
            found[name].steps.append((output.new_tokens[0] - 1, output.steps))
            return output.new_tokens[0]

        return run

    ways = {name: way(name, tree) for name, tree in trees.items()}
    for name, one in ways.items():
        one(prompts[0])  # not timed
        found[name].texts.clear()
        found[name].steps.clear()
    for name, timed in harness.interleaved(ways, prompts).items():
        found[name].timed = timed
    return found


def head_accuracy(model: MedusaModel, prompts: Sequence[torch.Tensor], texts: Sequence[list[int]]) -> HeadAccuracy:
    """Count how often heads are right about texts that the model wrote."""
    assert model.heads is not None
    total = HeadAccuracy.empty(model.heads.num_heads, RANKS)
    for ids, text in zip(prompts, texts, strict=True):
        one = own_text_accuracy(model, [*ids[0].tolist(), *text], ids.shape[1])
        total.hits += one.hits
        total.total += one.total
    return total


@dataclass(frozen=True)
class Measured:
    """What was measured of one setting.

    Attributes:
        scores: fp64 [files, 3], see `score`.
        decoded: by tree, the plain loop first.
        accuracy: of the heads on the model's own text; None without heads.
        tree: choices of the tree of 16 nodes; None without heads.
    """

    scores: np.ndarray
    decoded: dict[str, Decoded]
    accuracy: HeadAccuracy | None = None
    tree: list[list[int]] | None = None

    @property
    def different(self) -> int:
        """Texts of trees that are not the plain loop's."""
        plain = self.decoded[PLAIN].texts
        others = [one for name, one in self.decoded.items() if name != PLAIN]
        return sum(a != b for one in others for a, b in zip(one.texts, plain, strict=True))


def measure(model: MedusaModel, material: Material, new_tokens: int) -> Measured:
    """Measure a model, with heads or without."""
    scores = score(model.base, material.windows)
    if model.heads is None:
        return Measured(scores, decode(model, {PLAIN: Tree([])}, material.prompts, new_tokens))
    tuned = decode(model, {PLAIN: Tree([])}, material.tuning, new_tokens)[PLAIN].texts
    best = Tree.optimal(head_accuracy(model, material.tuning, tuned).by_rank, NODES)
    decoded = decode(model, {PLAIN: Tree([]), CHAIN: Tree.chain(3), TREE: best}, material.prompts, new_tokens)
    accuracy = head_accuracy(model, material.prompts, decoded[PLAIN].texts)
    return Measured(scores, decoded, accuracy, [list(path) for path in best.choices])


def figures(one: Measured, baseline: Measured) -> dict[str, Any]:
    """Return a setting's figures; intervals are of 95 %, over held-out files or prompts, which stay paired."""
    own = one.scores.tolist()
    paired = np.stack(
        [one.scores[:, 0], baseline.scores[:, 0], *one.scores[:, 1:].T, baseline.scores[:, 2]], 1
    ).tolist()
    plain = one.decoded[PLAIN]
    found: dict[str, Any] = {
        "perplexity": _json(interval.bootstrap(own, lambda sums: np.exp(sums[0] / sums[1]))),
        "perplexity_over_baseline": _json(interval.bootstrap(paired, lambda s: np.exp((s[0] - s[1]) / s[2]))),
        "top1": _json(interval.bootstrap(own, lambda sums: sums[2] / sums[1])),
        "top1_less_baseline": _json(interval.bootstrap(paired, lambda s: (s[3] - s[4]) / s[2])),
        "distinct_4_grams": distinct_four_grams(plain.texts),
        "texts_as_baseline": sum(a == b for a, b in zip(plain.texts, baseline.decoded[PLAIN].texts, strict=True)),
        "plain_tokens_per_second": harness.rate(plain.timed),
        "texts_unlike_plain": one.different,
        "tokens_per_step": {},
        "speedup": {},
    }
    for name, decoded in one.decoded.items():
        if name != PLAIN:
            found["tokens_per_step"][name] = _json(interval.ratio(decoded.steps))
            pairs = [(*a, *b) for a, b in zip(decoded.timed, plain.timed, strict=True)]
            found["speedup"][name] = _json(interval.ratio_of_rates(pairs))
    if one.accuracy is not None:
        found["head_top1"] = [row[0] for row in one.accuracy.cumulative]
        found["tree"] = one.tree
    return found


def table(columns: Mapping[str, Mapping[str, Any]], prompts: int) -> str:
    """Return the figures as a Markdown table, settings in columns as in the paper."""

    def spread(value: Mapping[str, float] | None, digits: int) -> str:
        if value is None:
            return "-"
        low, high = (f"{value[end]:.{digits}f}" if value[end] is not None else "?" for end in ("low", "high"))
        return f"{value['value']:.{digits}f} ({low} to {high})"

    def of_trees(words: str, key: str) -> list[tuple[str, Callable[[Mapping[str, Any]], str]]]:
        def cell(name: str) -> Callable[[Mapping[str, Any]], str]:
            return lambda column: spread(column[key].get(name), 2)

        return [(f"{words}, {name}", cell(name)) for name in (CHAIN, TREE)]

    rows: list[tuple[str, Callable[[Mapping[str, Any]], str]]] = [
        ("perplexity, held-out files", lambda c: spread(c["perplexity"], 2)),
        ("over the baseline's", lambda c: spread(c["perplexity_over_baseline"], 4)),
        ("next-token top-1", lambda c: spread(c["top1"], 4)),
        ("less the baseline's", lambda c: spread(c["top1_less_baseline"], 4)),
        *of_trees("tokens a step", "tokens_per_step"),
        *of_trees("speedup", "speedup"),
        ("top-1 of heads, own text", lambda c: " ".join(f"{share:.2f}" for share in c.get("head_top1", ())) or "-"),
        ("texts unlike the same model's plain text", lambda c: str(c["texts_unlike_plain"])),
        (f"plain texts as the baseline's, of {prompts}", lambda c: str(c["texts_as_baseline"])),
        ("distinct 4-grams", lambda c: f"{c['distinct_4_grams']:.2f}"),
    ]
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(cell(column) for column in columns.values()) + " |" for name, cell in rows]
    return "\n".join(lines) + "\n"


def _json(found: Interval | None) -> dict[str, float | None] | None:
    return None if found is None else found.to_json()
