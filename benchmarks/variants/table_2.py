"""`table-2`: the paper's Table 2 in miniature."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from benchmarks import harness
from benchmarks.ablations import measuring, setup
from benchmarks.ablations.setup import NEW
from benchmarks.variants.variant import BASE, Figures, Say, Variant, as_json, chosen, train_all
from medusa_decoding.checkpoints import pretrained, read_heads
from medusa_decoding.evaluation import interval
from medusa_decoding.evaluation.own_text import accuracy_of_texts
from medusa_decoding.model import MedusaModel
from medusa_decoding.training.loop.accuracy import HeadAccuracy
from medusa_decoding.trees.tree import Tree
from recipes.demo.base import END
from recipes.demo.card import distinct_four_grams
from recipes.demo.requests import answer, draw, encoded

PLAIN, CHAIN, TREE = measuring.PLAIN, "chain of 3", "16 nodes"
NODES = 16

# One rate for all weights: the backbone's of appendix B.3, whose heads have four times as much.
_TOGETHER = {
    "method": "medusa-2",
    "loss": {"lambda_0": 1.0},
    "optimisation": {"heads_first_epochs": 0.0, "epochs": 1.0, "heads_factor": 1.0, "learning_rate": 5e-4},
}
_WHOLE = {"enabled": False}
TABLE_2 = (
    Variant("baseline", has_heads=False),
    Variant("direct", {**_TOGETHER, "lora": _WHOLE}),
    Variant("medusa-1", {"method": "medusa-1", "optimisation": {"epochs": 1.0}}),
    Variant("medusa-2", {"method": "medusa-2", "optimisation": {"heads_first_epochs": 0.5, "epochs": 0.5}}),
)
CONTROLS = (
    Variant("direct, LoRA", {**_TOGETHER, "lora": {"enabled": True}}),
    # What more training alone does to the model: the heads' loss has nearly no weight, and they are not measured.
    Variant(
        "no heads",
        {**_TOGETHER, "lora": _WHOLE, "loss": {"lambda_0": 1e-12}, "heads": {"num_heads": 1}},
        has_heads=False,
    ),
)


@dataclass(frozen=True)
class Sizes:
    """How much `table-2` trains and measures.

    Attributes:
        steps: gradient steps of each variant, an even number.
        rows: requests with their answers per step.
        length: tokens of each that are learnt from, at most.
        warmup: steps of each stage.
        prompts: held-out requests, which are decoded and whose reference answers perplexity is of.
        tuning: requests of the training side that trees are chosen on.
        new_tokens: of a decoded answer, at most.
    """

    steps: int = 300
    rows: int = 4
    length: int = 384
    warmup: int = 20
    prompts: int = 64
    tuning: int = 16
    new_tokens: int = NEW

    def __post_init__(self) -> None:
        if self.steps < 2 or self.steps % 2:
            raise ValueError(f"steps: expected an even number from 2 (Medusa-2 has two stages), got {self.steps}")
        if self.prompts < 1:
            raise ValueError(f"prompts: expected at least 1, got {self.prompts}")
        if not 0 <= self.warmup < self.steps // 2:
            raise ValueError(f"warmup: expected from 0 to below {self.steps // 2}, got {self.warmup}")


QUICK = Sizes(steps=4, rows=2, warmup=1, prompts=3, tuning=2, new_tokens=16)


def shared_settings(sizes: Sizes, data: Path) -> dict[str, Any]:
    """Return what all runs of the table share."""
    return {
        "model": {"name": str(BASE), "dtype": "float32", "quantization": "none"},
        "data": {
            "train": [{"path": str(data)}], "length": sizes.length, "held_out_share": 0.0, "pack": False,
        },
        "heads": {"num_heads": 4},
        "optimisation": {
            "optimizer": "adamw", "batch_size": sizes.rows, "micro_batch_size": sizes.rows,
            "warmup_steps": sizes.warmup,
        },
    }  # fmt: skip


def prepare(variants: Sequence[Variant], sizes: Sizes, out: Path, say: Say = print) -> None:
    """Write the training data and train every variant of the table.

    Raises:
        ValueError: a folder that holds something else.
    """
    stated = out / "trained.json"
    wanted = {name: getattr(sizes, name) for name in ("steps", "rows", "length", "warmup")}
    there = json.loads(stated.read_text()) if stated.is_file() else None
    if there != wanted and out.exists() and any(out.iterdir()):
        raise ValueError(f"out: expected a new folder, or one that was begun with {wanted}, got {out} with {there}")
    out.mkdir(parents=True, exist_ok=True)
    stated.write_text(json.dumps(wanted), encoding="utf-8")
    data = out / "requests.jsonl"
    asked = draw(sizes.steps * sizes.rows)  # for one epoch
    lines = (json.dumps({"prompt": request.text, "response": answer(request)}) + "\n" for request in asked)
    data.write_text("".join(lines), encoding="utf-8")
    train_all(variants, shared_settings(sizes, data), out, say)


@dataclass(frozen=True)
class Material:
    """What every variant is measured on.

    Attributes:
        prompts: held-out requests, int64 [1, T] each.
        answers: the reference answer to each of them, with its EOS, int64 [1, T].
        tuning: requests of the training side, int64 [1, T] each.
        new_tokens: of each text, at most.
    """

    prompts: list[torch.Tensor]
    answers: list[torch.Tensor]
    tuning: list[torch.Tensor]
    new_tokens: int


def draw_material(sizes: Sizes) -> Material:
    """Draw the material of the table."""
    tokenizer = pretrained.load_tokenizer(BASE)
    asked = list(draw(sizes.prompts, 11, held_out=True))
    texts = (f"{answer(request)}{END}" for request in asked)
    answers = [tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids for text in texts]
    return Material(encoded(tokenizer, asked), answers, encoded(tokenizer, draw(sizes.tuning, 3)), sizes.new_tokens)


@dataclass(frozen=True)
class Measured:
    """What was measured of one variant.

    Attributes:
        scores: fp64 [answers, 3], see `score`.
        found: texts by way of decoding, the plain loop first.
        accuracy: of the heads on the model's own text; None without heads.
        tree: choices of the tree of 16 nodes; None without heads.
    """

    scores: np.ndarray
    found: dict[str, measuring.Found]
    accuracy: HeadAccuracy | None = None
    tree: list[list[int]] | None = None

    @property
    def texts(self) -> list[list[int]]:
        """The plain loop's texts."""
        return [one.text for one in self.found[PLAIN].written]


def load(variant: Variant, out: Path) -> MedusaModel:
    """Load a trained variant."""
    folder = out / variant.folder
    base = pretrained.load_model(folder / "model" if (folder / "model").is_dir() else BASE, dtype=torch.float32).eval()
    heads = read_heads(folder / "heads", dtype=torch.float32).heads if variant.has_heads else None
    return MedusaModel(base, heads, backend="eager")


def measure(model: MedusaModel, material: Material) -> Measured:
    """Measure a model, with heads or without.

    Raises:
        OtherTextError: a tree writes another text than the plain loop.
    """
    bench = setup.bench_of(model, material.prompts, material.tuning, material.new_tokens)
    ways, best = {PLAIN: measuring.ours(bench, Tree([]))}, None
    if model.heads is not None:
        best = Tree.optimal(setup.count_heads(bench), NODES)
        ways |= {CHAIN: measuring.ours(bench, Tree.chain(3)), TREE: measuring.ours(bench, best)}
    found = measuring.compare(bench, ways, dict.fromkeys(ways.keys() - {PLAIN}, PLAIN))
    scores = score(model.base, material.prompts, material.answers)
    if model.heads is None or best is None:
        return Measured(scores, found)
    own = [
        (ids[0].tolist() + one.text, ids.shape[1])
        for ids, one in zip(material.prompts, found[PLAIN].written, strict=True)
    ]
    accuracy = accuracy_of_texts(model, own)
    return Measured(scores, found, accuracy, [list(path) for path in best.choices])


@torch.no_grad()
def score(base: Any, prompts: Sequence[torch.Tensor], answers: Sequence[torch.Tensor]) -> np.ndarray:
    """Return the sum of losses (nats), the tokens and of them the top-1 ones of each answer, fp64 [answers, 3].

    Prompts and answers are int64 [1, T] each.
    """
    found = []
    for prompt, expected in zip(prompts, answers, strict=True):
        logits = base(torch.cat([prompt, expected], 1), use_cache=False).logits[0, prompt.shape[1] - 1 : -1]
        targets = expected[0]
        loss = F.cross_entropy(logits.double(), targets, reduction="sum")
        found.append((float(loss), float(len(targets)), float((logits.argmax(-1) == targets).sum())))
    return np.array(found)


def figures_of(one: Measured, baseline: Measured) -> Figures:
    """Return a variant's figures for the table; intervals are over held-out requests, which stay paired."""
    own = one.scores.tolist()
    paired = np.stack(
        [one.scores[:, 0], baseline.scores[:, 0], *one.scores[:, 1:].T, baseline.scores[:, 2]], 1
    ).tolist()
    plain, trees = one.found[PLAIN], {name: found for name, found in one.found.items() if name != PLAIN}
    figures: Figures = {
        "perplexity": as_json(interval.bootstrap(own, lambda sums: np.exp(sums[0] / sums[1]))),
        "perplexity_over_baseline": as_json(interval.bootstrap(paired, lambda s: np.exp((s[0] - s[1]) / s[2]))),
        "top1": as_json(interval.bootstrap(own, lambda sums: sums[2] / sums[1])),
        "top1_less_baseline": as_json(interval.bootstrap(paired, lambda s: (s[3] - s[4]) / s[2])),
        "distinct_4_grams": distinct_four_grams(one.texts),
        "texts_as_baseline": sum(a == b for a, b in zip(one.texts, baseline.texts, strict=True)),
        "plain_tokens_per_second": plain.figures()["tokens_per_second"],
        "texts_unlike_plain": sum(len(found.written) - (found.same or 0) for found in trees.values()),
        "tokens_per_step": {name: as_json(found.tokens_per_step()) for name, found in trees.items()},
        "speedup": {name: as_json(found.speedup()) for name, found in trees.items()},
    }
    if one.accuracy is not None:
        figures |= {"head_top1": [row[0] for row in one.accuracy.cumulative], "tree": one.tree}
    return figures


def as_table(columns: Mapping[str, Figures], prompts: int) -> str:
    """Return the table in Markdown, with the variants in columns as in the paper."""

    def spread(value: Mapping[str, float] | None, digits: int) -> str:
        if value is None:
            return "-"
        low, high = (f"{value[end]:.{digits}f}" if value[end] is not None else "?" for end in ("low", "high"))
        return f"{value['value']:.{digits}f} ({low} to {high})"

    def of_trees(words: str, key: str) -> dict[str, Callable[[Figures], str]]:
        return {f"{words}, {name}": lambda c, name=name: spread(c[key].get(name), 2) for name in (CHAIN, TREE)}

    rows: dict[str, Callable[[Figures], str]] = {
        "perplexity, held-out answers": lambda c: spread(c["perplexity"], 4),
        "over the baseline's": lambda c: spread(c["perplexity_over_baseline"], 4),
        "next-token top-1": lambda c: spread(c["top1"], 4),
        "less the baseline's": lambda c: spread(c["top1_less_baseline"], 4),
        **of_trees("tokens per step", "tokens_per_step"),
        **of_trees("speedup", "speedup"),
        "top-1 of heads, own text": lambda c: " ".join(f"{share:.2f}" for share in c.get("head_top1", ())) or "-",
        f"plain texts as the baseline's, of {prompts}": lambda c: str(c["texts_as_baseline"]),
        "distinct 4-grams": lambda c: f"{c['distinct_4_grams']:.2f}",
    }
    lines = [[name, *map(cell, columns.values())] for name, cell in rows.items()]
    return harness.markdown([["", *columns], *lines]) + "\n"


def measure_all(variants: Sequence[Variant], material: Material, out: Path, say: Say = print) -> dict[str, Measured]:
    """Measure every variant, trained in `out` before."""
    found = {}
    for variant in variants:
        started = time.monotonic()
        with load(variant, out) as model:
            found[variant.name] = measure(model, material)
        say(f"{variant.name}: measured in {time.monotonic() - started:.0f} s")
    return found


def run_suite(args: argparse.Namespace) -> tuple[str, Figures, str]:
    """Train and measure `table-2`; return the record's name, its figures and the table."""
    sizes = QUICK if args.quick else Sizes(steps=args.steps, prompts=args.prompts)
    variants = chosen(TABLE_2 + (CONTROLS if args.controls else ()), args.only)
    prepare(variants, sizes, args.out)
    if args.train_only:
        return "", {}, ""
    baseline = TABLE_2[0]  # it trains nothing, and the others are compared with it
    variants = [baseline, *(variant for variant in variants if variant != baseline)]
    material = draw_material(sizes)
    found = measure_all(variants, material, args.out)
    columns = {name: figures_of(one, found[baseline.name]) for name, one in found.items()}
    figures = {"sizes": asdict(sizes), "settings": columns}
    return "table2", figures, f"{as_table(columns, sizes.prompts)}{interval.WORDS}\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `table-2` alone."""
    parser.add_argument("--steps", type=int, default=300, help="gradient steps of each (default: %(default)s)")
    parser.add_argument("--controls", action="store_true", help="also direct fine-tuning with LoRA and no heads")
    parser.add_argument("--train-only", action="store_true", help="measure nothing")
