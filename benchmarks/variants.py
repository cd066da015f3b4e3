"""Train variants of the embedded demo model alike, measure them, and print one table.

    python -m benchmarks.variants table-2 --out runs/table2 [--controls]
    python -m benchmarks.variants heads --out runs/heads --seeds 0 1 2 [--temperature 0.8]

`table-2` is the paper's Table 2 in miniature: what direct fine-tuning, Medusa-1 and Medusa-2 do to a small model and
its speed. Every variant sees as many tokens in gradient steps, from training files of this Python's standard library,
which the model itself was trained on, as Vicuna's heads learn from ShareGPT. (Text written by the model would reward
whatever makes it more certain, and its perplexity on real text would rise with any recipe.) Perplexity on held-out
files takes the place of MT-Bench.

`heads` compares kinds of heads and losses. A model, the demo's or one of your own, answers prompts, greedily or at a
temperature (`medusa distill`). Each kind learns these answers from the same start (`medusa train`), with every seed.
Trees are chosen on other prompts and judged on held-out ones. A killed run continues where it was.

`table-2` decodes greedily, with the tree of 16 nodes that each variant's own accuracies ask for, and every text must be
the one that the same model writes plainly. All in float32 on the CPU; trained folders are kept.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from benchmarks import harness
from benchmarks.ablations import measuring, setup
from medusa_decoding.calibration.texts import Settings, Writer, Written
from medusa_decoding.checkpoints import pretrained, read_heads
from medusa_decoding.cli import main as medusa
from medusa_decoding.cli.train import read_config
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.evaluation import interval
from medusa_decoding.evaluation.interval import Interval
from medusa_decoding.evaluation.own_text import RANKS, accuracy_of_texts, own_text_ranks
from medusa_decoding.evaluation.prompts import read_prompts
from medusa_decoding.files import only_writer, read_json, write_json
from medusa_decoding.heads import MAX_TOP_K, MedusaHeads
from medusa_decoding.model import MedusaModel
from medusa_decoding.roofline.devices import DEVICES
from medusa_decoding.roofline.operators import Operator, total_seconds
from medusa_decoding.roofline.shapes import SHAPES
from medusa_decoding.training import Config, config_schema, train
from medusa_decoding.training.config import HeadsConfig
from medusa_decoding.training.data.encoding import fingerprint
from medusa_decoding.training.data.records import prompt_key
from medusa_decoding.training.loop.accuracy import HeadAccuracy
from medusa_decoding.training.loop.heads import new_heads
from medusa_decoding.trees.calibration import NONE, Calibration
from medusa_decoding.trees.replay import walk
from medusa_decoding.trees.search import walked_tree
from medusa_decoding.trees.tree import Tree
from recipes.demo import corpus
from recipes.demo.card import distinct_four_grams
from recipes.demo.seeds import write_seeds

BASE = CHECKPOINT / "base"
RECIPE = Path(__file__).parents[1] / "recipes" / "demo-cpu.yaml"
PLAIN, CHAIN, TREE = measuring.PLAIN, "chain of 3", "16 nodes"
NODES, ROOT = 16, Tree([])
SIZES = (8, 16, 64)
"""Nodes of the trees of `heads`."""
EXPECTED, DECODED, LIKELIEST = "expected", "measured", ", likeliest drafts"
OVER_LIKELIEST = "over_first_likeliest"
"""Ratio to the first row whose candidates were not ranked with the noise."""
SIDES = {"held-out": 0, "tuning": 1}
"""Files of prompts that `heads` measures on, with the seeds of sampled answers."""
Say = Callable[[str], None]
Figures = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """One row or column of a table.

    Attributes:
        name: how the table names it.
        sections: of a `training.Config`, over those that all variants share; None for the model as it is.
        has_heads: whether its heads are measured.
        source: name of the variant that it is a conversion of.
        storage: what the heads' projections are converted to.
    """

    name: str
    sections: Mapping[str, Any] | None = None
    has_heads: bool = True
    source: str | None = None
    storage: Literal["int8", "fp8"] | None = None

    @property
    def folder(self) -> str:
        """Name of the folder that it is trained in."""
        return _file_name(self.source or self.name)


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
TWO_BLOCKS = {"num_layers": 2, "shared_projection": True, "parent_rank": 32}


def _heads(name: str, loss: Mapping[str, Any] | None = None, **heads: Any) -> Variant:
    """Return heads of two blocks on the shared lm_head with other settings of `heads` and `loss`."""
    return Variant(name, {"heads": TWO_BLOCKS | heads, "loss": loss or {}})


def _steps(name: str, **optimisation: Any) -> Variant:
    """Return the recipe's heads, which have a root input and a parent term, trained with other steps or rates."""
    return Variant(name, {"heads": TWO_BLOCKS | {"root_rank": 128, "parent_rank": 64}, "optimisation": optimisation})


# Heads and rates of recipes/demo-cpu.yaml in version 0.2.
_EARLIER = {
    "heads": {"num_layers": 1, "shared_projection": False, "parent_rank": 32},
    "optimisation": {
        "learning_rate": 1e-3, "warmup_share": None, "warmup_steps": 20, "epochs": 4.0,
        "batch_size": 16, "micro_batch_size": 16,
    },
}  # fmt: skip
HEADS = (
    _heads("parents, rank 32"),
    _heads("root, rank 64", root_rank=64),
    _heads("root, rank 128", root_rank=128),
    _heads("root, rank 256", root_rank=256),
    _heads("parents, rank 64", parent_rank=64),
    _heads("parents, rank 256", parent_rank=256),
    _heads("kl", {"targets": "kl"}),
    _heads("tv", {"targets": "tv"}),
    _heads("kl, half hard", {"targets": "kl", "hard_share": 0.5}),
    _heads("tv, half hard", {"targets": "tv", "hard_share": 0.5}),
    _heads("root and parents", root_rank=128, parent_rank=64),
    _heads("root, parents, kl", {"targets": "kl"}, root_rank=128, parent_rank=64),
    Variant("version 0.2", _EARLIER),
)
SWEEP = (
    _heads("both, one block", num_layers=1, root_rank=128, parent_rank=64),
    _heads("both, three blocks", num_layers=3, root_rank=128, parent_rank=64),
    _heads("both, own projections", shared_projection=False, root_rank=128, parent_rank=64),
    _heads("both, one block, own projections", num_layers=1, shared_projection=False, root_rank=128, parent_rank=64),
    _steps("both, batch 1", batch_size=1, micro_batch_size=1),
    _steps("both, batch 8", batch_size=8, micro_batch_size=8),
    _steps("both, batch 24", batch_size=24, micro_batch_size=24),
    _steps("both, peak 1e-3", learning_rate=1e-3),
    _steps("both, peak 6e-3", learning_rate=6e-3),
    _steps("both, no warm-up", warmup_share=None, warmup_steps=0),
    _steps("both, 4 epochs", epochs=4.0),
)
"""Settings around those of the recipe, trained only if they are asked for (`--first "root and parents"`)."""
OLDER = (
    Variant("own projections", {}),
    Variant("own, int8", {}, source="own projections", storage="int8"),
    Variant("own, fp8", {}, source="own projections", storage="fp8"),
    Variant("own, two blocks", {"heads": {"num_layers": 2}}),
    Variant("own, 1,024 tokens", {"heads": {"token_map_size": 1024}}),
    Variant("own, 512 tokens", {"heads": {"token_map_size": 512}}),
    Variant("own, parents, rank 16", {"heads": {"parent_rank": 16}}),
    Variant("own, parents, rank 64", {"heads": {"parent_rank": 64}}),
    Variant("shared lm_head", {"heads": {"shared_projection": True}}),
    _heads("shared, two blocks", parent_rank=0),
    _heads("shared, parents, rank 64", num_layers=1, parent_rank=64),
)
"""Trained only if they are asked for."""


@dataclass(frozen=True)
class Sizes:
    """How much `table-2` trains and measures.

    Attributes:
        steps: gradient steps of each variant, an even number.
        rows: rows per step.
        length: tokens per row, in training and in measuring perplexity.
        warmup: steps of each stage.
        windows: per held-out file, at most.
        prompts: held-out prompts to decode.
        tuning: prompts from training files that trees are chosen on.
        prompt_tokens, new_tokens: of each.
    """

    steps: int = 300
    rows: int = 4
    length: int = 256
    warmup: int = 20
    windows: int = 4
    prompts: int = 64
    tuning: int = 16
    prompt_tokens: int = 128
    new_tokens: int = 128

    def __post_init__(self) -> None:
        if self.steps < 2 or self.steps % 2:
            raise ValueError(f"steps: expected an even number from 2 (Medusa-2 has two stages), got {self.steps}")
        if self.prompts < 1:
            raise ValueError(f"prompts: expected at least 1, got {self.prompts}")
        if not 0 <= self.warmup < self.steps // 2:
            raise ValueError(f"warmup: expected from 0 to below {self.steps // 2}, got {self.warmup}")

    @property
    def tokens(self) -> int:
        """Tokens that each variant sees in gradient steps."""
        return self.steps * self.rows * self.length


QUICK = Sizes(steps=4, rows=2, length=64, warmup=1, windows=1, prompts=3, tuning=2, prompt_tokens=24, new_tokens=16)


# -- training ----------------------------------------------------------------------------------------------------------


def config(variant: Variant, shared: Mapping[str, Any], folder: Path) -> Config:
    """Return the training run of a variant; what neither it nor `shared` says is the method's own (appendix B)."""
    values = dict(shared)
    for name, section in (variant.sections or {}).items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, Mapping) else section
    values["output"] = {"folder": str(folder), "tensorboard": False, "keep_checkpoints": 1}
    return Config.of(values)


def train_all(variants: Sequence[Variant], shared: Mapping[str, Any], out: Path, say: Say) -> None:
    """Train every variant in its folder of `out`, unless an earlier call has."""
    for variant in variants:
        folder = out / variant.folder
        if variant.sections is not None and not (folder / "heads").is_dir():
            say(f"training: {variant.name}")
            train(config(variant, shared, folder), resume=True, announce=say)


def table_2_settings(sizes: Sizes, data: Path) -> dict[str, Any]:
    """Return what all runs of `table-2` share."""
    return {
        "model": {"name": str(BASE), "dtype": "float32", "quantization": "none"},
        "data": {
            "train": [{"path": str(data)}], "length": sizes.length, "held_out_share": 0.0, "template": "plain",
            "pack": False,
        },
        "heads": {"num_heads": 4},
        "optimisation": {
            "optimizer": "adamw", "batch_size": sizes.rows, "micro_batch_size": sizes.rows,
            "warmup_steps": sizes.warmup,
        },
    }  # fmt: skip


def prepare_table_2(variants: Sequence[Variant], sizes: Sizes, out: Path, say: Say = print) -> None:
    """Write the training text and train every variant of `table-2`.

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
    data = out / "rows.jsonl"
    write_rows(sizes, corpus.split(), Tokenizer.from_file(str(BASE / "tokenizer.json")), data)
    train_all(variants, table_2_settings(sizes, data), out, say)


def write_rows(sizes: Sizes, files: corpus.Split, tokenizer: Tokenizer, path: Path) -> None:
    """Write training text as exact tokens, in as many rows as one epoch of `sizes.steps` steps needs.

    Files are taken in a random order and cut into consecutive rows.

    Raises:
        ValueError: more steps than there is text for.
    """
    stream = np.empty(0, dtype=np.uint16)
    for name in np.random.default_rng(0).permutation(files.train):
        if len(stream) >= sizes.tokens:
            break
        stream = np.concatenate([stream, corpus.encode(files, [str(name)], tokenizer)])
    if len(stream) < sizes.tokens:
        raise ValueError(f"steps: expected at most {len(stream) // sizes.length // sizes.rows}, got {sizes.steps}")
    mark = fingerprint(pretrained.load_tokenizer(BASE))
    with path.open("w", encoding="utf-8") as lines:
        for row in stream[: sizes.tokens].reshape(-1, sizes.length).tolist():
            exact = {"input_ids": row, "learnt": [[0, sizes.length]], "tokenizer": mark}
            lines.write(json.dumps({"text": tokenizer.decode(row, skip_special_tokens=False)} | exact) + "\n")


# -- measuring ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Material:
    """What every variant is measured on.

    Attributes:
        prompts: int64 [1, T] from held-out files.
        tuning: the same from training files.
        new_tokens: of each text.
        windows: int64 [n, T] of each held-out file, for perplexity.
    """

    prompts: list[torch.Tensor]
    tuning: list[torch.Tensor]
    new_tokens: int
    windows: list[torch.Tensor] = field(default_factory=list)


def table_2_material(sizes: Sizes, files: corpus.Split, tokenizer: Tokenizer) -> Material:
    """Draw the material of `table-2`."""
    sides = (files.held_out, sizes.prompts, 11), (files.train[:: len(files.train) // 60], sizes.tuning, 3)
    prompts, tuning = (
        list(corpus.random_prompts(corpus.encode(files, names, tokenizer), count, sizes.prompt_tokens, seed).split(1))
        for names, count, seed in sides
    )
    return Material(prompts, tuning, sizes.new_tokens, held_out_windows(sizes, files, tokenizer))


def held_out_windows(sizes: Sizes, files: corpus.Split, tokenizer: Tokenizer) -> list[torch.Tensor]:
    """Return windows int64 [n, length] of each held-out file that is as long as one, evenly spread over it."""
    found = []
    for name in files.held_out:
        ids = torch.from_numpy(corpus.encode(files, [name], tokenizer).astype(np.int64))
        if len(ids) >= sizes.length:
            count = min(sizes.windows, len(ids) // sizes.length)
            starts = np.linspace(0, len(ids) - sizes.length, count).astype(int) if count > 1 else [0]
            found.append(torch.stack([ids[start : start + sizes.length] for start in starts]))
    return found


@dataclass(frozen=True)
class Measured:
    """What was measured of one variant.

    Attributes:
        scores: fp64 [files, 3], see `score`.
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
    scores = score(model.base, material.windows)
    if model.heads is None or best is None:
        return Measured(scores, found)
    own = [
        (ids[0].tolist() + one.text, ids.shape[1])
        for ids, one in zip(material.prompts, found[PLAIN].written, strict=True)
    ]
    accuracy = accuracy_of_texts(model, own)
    return Measured(scores, found, accuracy, [list(path) for path in best.choices])


def head_bytes(heads: MedusaHeads) -> dict[str, int]:
    """Return the bytes of weights that a decode step reads for heads at batch 1, by part.

    The parts are the "root" input's matrices; the "residual" blocks; the "projection" with its scales and the ids of
    gathered rows (a shared one is read once for all heads, assumed in their dtype); and "parents", the candidates' rows
    of the parents' term.
    """
    float_bytes, ids = heads.w1.element_size(), 0 if heads.token_map is None else 8 * len(heads.token_map)
    residual = sum(t.numel() for t in (heads.w1, heads.b1) if t is not None) * float_bytes
    if heads.w2 is None:
        projection = heads.num_candidates * heads.hidden_size * float_bytes + ids
    else:
        scales = 0 if heads.w2_scale is None else heads.w2_scale.numel() * 4
        projection = heads.w2.numel() * heads.w2.element_size() + scales
    candidates = min(MAX_TOP_K, heads.num_candidates)
    # Parents: the root, and the candidates of every head but the last.
    rows = 1 + (heads.num_heads - 1) * candidates + heads.num_heads * candidates
    rank = heads.parent_rank
    parents = (rows * rank + heads.num_heads * rank * rank) * float_bytes if rank else 0
    root = sum(t.numel() for t in (heads.root_down, heads.root_up) if t is not None) * float_bytes
    return {"root": root, "residual": residual, "projection": projection, "parents": parents}


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


# -- figures -----------------------------------------------------------------------------------------------------------


def table_2_figures(one: Measured, baseline: Measured) -> Figures:
    """Return a variant's figures for `table-2`; intervals are over held-out files or prompts, which stay paired."""
    own = one.scores.tolist()
    paired = np.stack(
        [one.scores[:, 0], baseline.scores[:, 0], *one.scores[:, 1:].T, baseline.scores[:, 2]], 1
    ).tolist()
    plain, trees = one.found[PLAIN], {name: found for name, found in one.found.items() if name != PLAIN}
    figures: Figures = {
        "perplexity": _json(interval.bootstrap(own, lambda sums: np.exp(sums[0] / sums[1]))),
        "perplexity_over_baseline": _json(interval.bootstrap(paired, lambda s: np.exp((s[0] - s[1]) / s[2]))),
        "top1": _json(interval.bootstrap(own, lambda sums: sums[2] / sums[1])),
        "top1_less_baseline": _json(interval.bootstrap(paired, lambda s: (s[3] - s[4]) / s[2])),
        "distinct_4_grams": distinct_four_grams(one.texts),
        "texts_as_baseline": sum(a == b for a, b in zip(one.texts, baseline.texts, strict=True)),
        "plain_tokens_per_second": plain.figures()["tokens_per_second"],
        "texts_unlike_plain": sum(len(found.written) - (found.same or 0) for found in trees.values()),
        "tokens_per_step": {name: _json(found.tokens_per_step()) for name, found in trees.items()},
        "speedup": {name: _json(found.speedup()) for name, found in trees.items()},
    }
    if one.accuracy is not None:
        figures |= {"head_top1": [row[0] for row in one.accuracy.cumulative], "tree": one.tree}
    return figures


def table_2(columns: Mapping[str, Figures], prompts: int) -> str:
    """Return `table-2` in Markdown, with the variants in columns as in the paper."""

    def spread(value: Mapping[str, float] | None, digits: int) -> str:
        if value is None:
            return "-"
        low, high = (f"{value[end]:.{digits}f}" if value[end] is not None else "?" for end in ("low", "high"))
        return f"{value['value']:.{digits}f} ({low} to {high})"

    def of_trees(words: str, key: str) -> dict[str, Callable[[Figures], str]]:
        return {f"{words}, {name}": lambda c, name=name: spread(c[key].get(name), 2) for name in (CHAIN, TREE)}

    rows: dict[str, Callable[[Figures], str]] = {
        "perplexity, held-out files": lambda c: spread(c["perplexity"], 2),
        "over the baseline's": lambda c: spread(c["perplexity_over_baseline"], 4),
        "next-token top-1": lambda c: spread(c["top1"], 4),
        "less the baseline's": lambda c: spread(c["top1_less_baseline"], 4),
        **of_trees("tokens per step", "tokens_per_step"),
        **of_trees("speedup", "speedup"),
        "top-1 of heads, own text": lambda c: " ".join(f"{share:.2f}" for share in c.get("head_top1", ())) or "-",
        f"plain texts as the baseline's, of {prompts}": lambda c: str(c["texts_as_baseline"]),
        "distinct 4-grams": lambda c: f"{c['distinct_4_grams']:.2f}",
    }
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [
        f"| {name} | " + " | ".join(cell(column) for column in columns.values()) + " |" for name, cell in rows.items()
    ]
    return "\n".join(lines) + "\n"


def _json(found: Interval | None) -> dict[str, float | None] | None:
    return None if found is None else asdict(found)


# -- kinds of heads ----------------------------------------------------------------------------------------------------


class HeadsRun:
    """The rows of `heads` at one temperature. All files are in a folder, from which a killed run continues.

    Attributes:
        out: the folder.
        settings: of all training runs; complete.
        decoded: sizes of the trees to decode with.
        ranked: how drafts are: as in decoding, and at a temperature also by their probabilities alone.

    Raises:
        ValueError: bad settings, or a folder that was begun with other ones.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self.decoded = args, [str(size) for size in args.measured]
        self.ranked = ("", LIKELIEST) if args.temperature else ("",)
        self.out = args.out / (f"temperature-{args.temperature:g}" if args.temperature else "greedy")
        self.out.mkdir(parents=True, exist_ok=True)
        self._records = self.out / "answers" / "generated" / "records.jsonl"
        self.settings = self._settings()
        names = ("prompts_from", "temperature", "training_prompts", "prompts", "new_tokens")
        self.stated = {name: getattr(args, name) for name in names} | {"settings": self.settings}
        stated = self.out / "task.json"
        if not stated.is_file():
            self._write_prompts()
            write_json(stated, self.stated)
        there: Any = read_json(stated)
        if there != self.stated:
            names = ", ".join(name for name, value in self.stated.items() if there[name] != value)
            raise ValueError(f"out: expected a new folder, or the {names} in {stated}, got other ones")

    def _settings(self) -> dict[str, Any]:
        args, values, file = self._args, config_schema.read_yaml(RECIPE), self.out / "settings.yaml"
        values["model"] |= {"name": str(BASE if args.model == "demo" else args.model), "dtype": "float32"}
        values["heads"] = {"num_heads": 4}
        values["data"] |= {"train": [{"path": str(self._records)}], "held_out_share": 0.0}
        values["data"] |= {
            "cache_hidden": str(self.out / "states"),
            "template": "auto" if args.prompts_from else "plain",
        }
        values["data"].pop("answers", None)  # the model's own, but written before
        values["generation"] |= {"temperature": args.temperature, "turns": 1}
        if args.quick:
            values["data"]["length"] = 40
            values["generation"] |= {"max_new_tokens": 16, "prompt_tokens": 16}
            values["optimisation"] = {"optimizer": "adamw", "max_steps": 2, "batch_size": 2}
        write_json(file, values)  # JSON is YAML
        write_json(file, asdict(read_config(argparse.Namespace(config=file, set=args.set))))
        return dict(read_json(file))

    def _write_prompts(self) -> None:
        """Write prompts to learn from, to choose trees on and held-out ones; none is, and no file of code, in two."""
        args, out = self._args, self.out
        if args.prompts_from is None:
            files = corpus.split()
            tuning = files.train[::20]
            write_seeds(out / "training.jsonl", args.training_prompts, names=sorted({*files.train} - {*tuning}))
            write_seeds(out / "tuning.jsonl", args.prompts, 101, names=tuning)
            write_seeds(out / "held-out.jsonl", args.prompts, 102, held_out=True)
            return
        found = list({prompt_key(one.turns[0]): one for one in read_prompts([args.prompts_from], turns=1)}.values())
        if len(found) <= 2 * args.prompts:
            raise ValueError(f"--prompts: expected fewer than half of the {len(found)} there, got {args.prompts}")
        np.random.default_rng(0).shuffle(found)
        ends = 0, args.prompts, 2 * args.prompts, 2 * args.prompts + args.training_prompts
        for name, start, end in zip((*SIDES, "training"), ends, ends[1:], strict=False):
            lines = [{"text": one.turns[0]} if one.is_text else {"messages": one.messages} for one in found[start:end]]
            (out / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")

    def prepare(self) -> None:
        """Have the model answer all prompts, and load it."""
        if not self._records.with_name(self._records.name + ".finished").exists():
            given = ["--set", f"data.train=[{{path: {self.out / 'training.jsonl'}}}]", "--set"]
            given += [f"output.folder={self.out / 'answers'}", *(["--resume"] if self._records.exists() else [])]
            if medusa(["distill", "--config", str(self.out / "settings.yaml"), "--only-data", *given]) != 0:
                raise RuntimeError("the answers could not be written; see above")
        # One small head sees every answer, so that the backbone's time is in no row's training time.
        once = {
            "heads": {"num_heads": 1, "shared_projection": True},
            "optimisation": {"epochs": 1.0, "max_steps": None},
        }
        train_all([Variant("first states", once)], self.settings, self.out, print)
        name, plain = self.settings["model"]["name"], self.out / "plain.json"
        self._base = pretrained.load_model(name, dtype=torch.float32).eval()
        self._tokenizer = pretrained.load_tokenizer(name)
        self._prompts = {side: read_prompts([self.out / f"{side}.jsonl"], turns=1) for side in SIDES}
        if not plain.is_file():
            with MedusaModel(self._base) as model:
                texts = {side: [[one.prompt, one.new, one.seed] for one in self._write(model, side)] for side in SIDES}
            write_json(plain, texts)
        self._answers: Any = read_json(plain)

    def _write(self, model: MedusaModel, side: str, tree: Tree = ROOT) -> list[Written]:
        """Answer the prompts of a side with a tree; those that do not fit the context are left out."""
        prompt_tokens = self.settings["generation"]["prompt_tokens"]
        asked = Settings(self._args.new_tokens, prompt_tokens, None, self._args.temperature, SIDES[side])
        writer = Writer(model, self._tokenizer, asked)
        texts = (next(writer.answers(prompt, number, tree)) for number, prompt in enumerate(self._prompts[side]))
        return [text for text in texts if text is not None]

    def row(self, variant: Variant, seed: int) -> Figures:
        """Train and measure a row with a seed, or return what an earlier run has found.

        Raises:
            ValueError: that run had other settings.
        """
        shared = self.settings | {"optimisation": self.settings["optimisation"] | {"seed": seed}}
        made = config(variant, shared, self.out / f"{variant.folder}-{seed}")
        file = self.out / f"{_file_name(variant.name)}-{seed}.json"
        found: Any = read_json(file) if file.is_file() else {"config": made.to_yaml()}
        if found["config"] != made.to_yaml():
            raise ValueError(
                f"{file}: expected figures of these settings, got others; remove it and {made.output.folder}"
            )
        if "seconds" not in found:
            print(f"{variant.name}, seed {seed}: training")
            found["seconds"] = train(made, resume=True, announce=print).seconds
            write_json(file, found)
        wanted = {EXPECTED + how: [*map(str, SIZES)] for how in self.ranked}
        wanted |= {DECODED + how: self.decoded for how in self.ranked if self.decoded}
        if any(size not in found.get("steps", {}).get(way, ()) for way, sizes in wanted.items() for size in sizes):
            started = time.monotonic()
            heads = read_heads(Path(made.output.folder) / "heads", dtype=torch.float32).heads
            heads = heads if variant.storage is None else heads.quantized(variant.storage)
            with MedusaModel(self._base, heads, backend="eager") as model:
                found |= self._measure(model)
            found["bytes_bf16"] = sum(head_bytes(heads.to(torch.bfloat16)).values())
            found["us_7b_h200"] = predicted_us(made.heads, variant.storage, heads.vocab_size)
            write_json(file, found)
            print(f"{variant.name}, seed {seed}: measured in {time.monotonic() - started:.0f} s")
        steps = {way: {size: found["steps"][way][size] for size in sizes} for way, sizes in wanted.items()}
        return dict(found) | {"steps": steps}

    def _measure(self, model: MedusaModel) -> Figures:
        """Return accuracies on held-out answers, trees, and tokens and steps of each answer by way and size of tree."""
        heads, plain, other = model.heads, self._answers["held-out"], 0
        assert heads is not None
        steps: dict[str, Any] = {}
        for how in reversed(self.ranked):
            with likeliest_drafts(heads) if how else contextlib.nullcontext():
                tuning, held_out = (self._calibration(model, self._answers[side]) for side in ("tuning", "held-out"))
                trees = {str(size): walked_tree(tuning, size) for size in SIZES}
                steps[EXPECTED + how] = {size: walk(held_out, tree).by_prompt for size, tree in trees.items()}
                for size in self.decoded:
                    texts = self._write(model, "held-out", trees[size])
                    lengths = [text.accept_lengths for text in texts]
                    steps.setdefault(DECODED + how, {})[size] = [(len(one) + sum(one), len(one)) for one in lengths]
                    other += sum(text.new != new for text, (_, new, _) in zip(texts, plain, strict=True))
        shares = {f"top{n}": [row[:n][-1] / held_out.positions for row in held_out.hits] for n in (1, 10)}
        choices = {size: tree.choices for size, tree in trees.items()}
        return {**shares, "steps": steps, "texts_unlike_plain": other, "trees": choices}

    def _calibration(
        self, model: MedusaModel, answers: Sequence[tuple[list[int], list[int], int | None]]
    ) -> Calibration:
        """Rank the tokens of answers (prompt, new tokens, seed) among the heads' candidates."""
        assert model.heads is not None
        texts = []
        for prompt, new, seed in answers:
            ranks = own_text_ranks(model, prompt + new, len(prompt), temperature=self._args.temperature, seed=seed)
            texts.append([tuple(map(tuple, ranks.clamp(min=NONE).tolist()))])
        return Calibration.of(model.heads.num_heads, min(RANKS, model.heads.num_candidates), texts)


@contextlib.contextmanager
def likeliest_drafts(heads: MedusaHeads) -> Iterator[None]:
    """Have heads rank their candidates without the temperature and the random numbers that they are given."""
    for name in ("propose", "propose_children"):
        own = getattr(heads, name)
        setattr(heads, name, lambda *given, own=own, temperature=None, noise=None, **more: own(*given, **more))
    try:
        yield
    finally:
        del heads.propose, heads.propose_children


def predicted_us(settings: HeadsConfig, storage: Literal["int8", "fp8"] | None, vocabulary: int) -> float:
    """Return the microseconds that a step's heads take by the roofline at Llama-2-7B's sizes on an H200, batch 1.

    Each part of `head_bytes` is one launch. A trimmed vocabulary keeps its share of `vocabulary`.
    """
    shape, size = SHAPES["llama-2-7b"], settings.token_map_size
    kept = None if size is None else torch.arange(shape.vocabulary * size // vocabulary)
    heads = new_heads(settings, shape.hidden, shape.vocabulary, kept, torch.bfloat16, "meta")
    parts = head_bytes(heads if storage is None else heads.remade(storage=storage))
    operators = [Operator(name, "linear", 1, 0, 0, size // 2) for name, size in parts.items() if size]
    return 1e6 * total_seconds(operators, DEVICES["h200-attained"])


def heads_row(seeds: Sequence[Figures], first: Sequence[Figures]) -> Figures:
    """Return a row's figures over all seeds; ratios are to the first row, with intervals over paired prompts."""
    found: Figures = {name: np.mean([one[name] for one in seeds], 0).tolist() for name in ("top1", "top10", "seconds")}
    found |= {name: seeds[0][name] for name in ("bytes_bf16", "us_7b_h200")}
    found |= {"texts_unlike_plain": sum(one["texts_unlike_plain"] for one in seeds), "ways": {}}
    for way, sizes in seeds[0]["steps"].items():
        for size in sizes:
            own = [np.array(one["steps"][way][size]) for one in seeds]
            cell = found["ways"].setdefault(way, {})[size] = {
                "tokens_per_step": _json(interval.ratio(sum(own).tolist())),
                "of_seeds": [float(np.divide(*rows.sum(0))) for rows in own],
            }
            for name, other in (("over_first", way), (OVER_LIKELIEST, way + LIKELIEST)):
                if other in first[0]["steps"]:
                    rows = sum(np.array(one["steps"][other][size]) for one in first)
                    cell[name] = _json(interval.ratio_of_rates(np.hstack([sum(own), rows]).tolist()))
    return found


def heads_table(rows: Mapping[str, Figures]) -> str:
    """Return `heads` in Markdown, one line per row."""
    lines = [_cells(name, row) for name, row in rows.items()]
    cells = [list(lines[0]), ["---"] * len(lines[0]), *(list(line.values()) for line in lines)]
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


def _cells(name: str, row: Figures) -> dict[str, str]:
    ways, found = row["ways"], {"heads": name}
    found |= {f"top-{n}, %": " ".join(f"{100 * share:.0f}" for share in row[f"top{n}"]) for n in (1, 10)}
    for way, sizes in ways.items():
        rates = [f"{one['tokens_per_step']['value']:.2f}" for one in sizes.values()]
        found[f"tokens per step {way}, {' / '.join(sizes)} nodes"] = " / ".join(rates)
    spread = []
    for size, expected in ways[EXPECTED].items():
        way = DECODED if size in ways.get(DECODED, ()) else EXPECTED
        one = ways.get(DECODED, {}).get(size, expected)
        for over, words in (("over_first", ""), (OVER_LIKELIEST, LIKELIEST)):
            if over in one:
                name = f"over the first row's{words}, {size} nodes, {way}"
                found[name] = interval.as_text(Interval(**one[over]))
        spread.append(f"{np.ptp(one['of_seeds']):.2f}")
    return found | {
        "range over seeds": " / ".join(spread),
        "texts unlike plain": str(row["texts_unlike_plain"]),
        "MB per step, bf16": f"{row['bytes_bf16'] / 1e6:.2f}",
        "us at 7B, H200": f"{row['us_7b_h200']:.0f}",
        "training, s": f"{row['seconds']:.0f}",
    }


# -- the command -------------------------------------------------------------------------------------------------------


def run(variants: Sequence[Variant], material: Material, out: Path, say: Say = print) -> dict[str, Measured]:
    """Measure every variant, trained in `out` before."""
    found = {}
    for variant in variants:
        started = time.monotonic()
        with load(variant, out) as model:
            found[variant.name] = measure(model, material)
        say(f"{variant.name}: measured in {time.monotonic() - started:.0f} s")
    return found


def run_table_2(args: argparse.Namespace) -> tuple[str, Figures, str]:
    """Train and measure `table-2`; return the record's name, its figures and the table."""
    sizes = QUICK if args.quick else Sizes(steps=args.steps, prompts=args.prompts)
    variants = _chosen(TABLE_2 + (CONTROLS if args.controls else ()), args.only)
    prepare_table_2(variants, sizes, args.out)
    if args.train_only:
        return "", {}, ""
    baseline = TABLE_2[0]  # it trains nothing, and the others are compared with it
    variants = [baseline, *(variant for variant in variants if variant != baseline)]
    material = table_2_material(sizes, corpus.split(), Tokenizer.from_file(str(BASE / "tokenizer.json")))
    found = run(variants, material, args.out)
    columns = {name: table_2_figures(one, found[baseline.name]) for name, one in found.items()}
    figures = {"sizes": asdict(sizes), "tokens": sizes.tokens, "held_out_files": len(material.windows)}
    words = interval.WORDS.replace("over prompts", "over held-out files or prompts")
    return "table2", figures | {"settings": columns}, f"{table_2(columns, sizes.prompts)}{words}\n"


def run_heads(args: argparse.Namespace) -> tuple[str, Figures, str]:
    """Train and measure `heads`; return the record's name, its figures and the table."""
    if args.model != "demo" and args.prompts_from is None:
        raise ValueError("--prompts-from: expected a file of prompts for a model of your own, got none")
    if args.quick:
        args.training_prompts, args.prompts, args.new_tokens = 6, 3, 16
    wanted = _chosen((*HEADS, *SWEEP, *OLDER), args.only or [one.name for one in HEADS])
    first = next(one for one in (*HEADS, *SWEEP, *OLDER) if one.name == args.first)
    variants = [first, *(variant for variant in wanted if variant != first)]
    run = HeadsRun(args)
    run.prepare()
    found: dict[str, list[Figures]] = {variant.name: [] for variant in variants}
    for seed, variant in itertools.product(args.seeds, variants):  # all rows of a seed are there early
        found[variant.name].append(run.row(variant, seed))
    rows = {name: heads_row(seeds, found[variants[0].name]) for name, seeds in found.items()}
    model = "demo" if args.model == "demo" else _file_name("-".join(Path(args.model).parts[-3:]))
    figures = {"seeds": args.seeds, **run.stated, "variants": rows}
    return f"heads-{model}-{run.out.name}", figures, f"{heads_table(rows)}{interval.WORDS}\n"


def _file_name(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "-").replace("'", "").lower()


def _chosen(variants: Sequence[Variant], names: Sequence[str]) -> list[Variant]:
    """Return the variants with these names; all without any."""
    known = [variant.name for variant in variants]
    for name in names:
        if name not in known:
            raise ValueError(f"--only: expected some of {', '.join(known)}, got {name}")
    return [variant for variant in variants if not names or variant.name in names]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and measure what the command line asks for, print the table and append the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    suites = parser.add_subparsers(required=True, metavar="NAME")
    for name, run_suite in (("table-2", run_table_2), ("heads", run_heads)):
        one = suites.add_parser(name)
        one.set_defaults(run=run_suite)
        one.add_argument("--out", type=Path, required=True, help="folder for data and trained variants, which are kept")
        one.add_argument("--prompts", type=int, default=64, help="held-out prompts (default: %(default)s)")
        one.add_argument("--only", nargs="+", default=[], metavar="VARIANT", help="of the variants, only these")
        one.add_argument("--quick", action="store_true", help="a few steps of everything, to see that it runs")
        one.add_argument("--dry", action="store_true", help="append nothing to the results")
        if run_suite is run_table_2:
            one.add_argument("--steps", type=int, default=300, help="gradient steps of each (default: %(default)s)")
            one.add_argument("--controls", action="store_true", help="also direct fine-tuning with LoRA and no heads")
            one.add_argument("--train-only", action="store_true", help="measure nothing")
        else:
            one.add_argument("--model", default="demo", metavar="FOLDER", help="base model (default: the demo's)")
            one.add_argument("--prompts-from", metavar="FILE", help="prompts as for medusa calibrate (demo: code)")
            one.add_argument("--temperature", type=float, default=0.0, help="of all answers (default: 0, greedy)")
            one.add_argument("--seeds", type=int, nargs="+", default=[0], help="of training (default: 0)")
            one.add_argument("--training-prompts", type=int, default=1200, help="to learn from (default: %(default)s)")
            one.add_argument("--new-tokens", type=int, default=128, help="of measured answers (default: %(default)s)")
            sizes = " ".join(map(str, SIZES))
            one.add_argument(
                "--measured",
                type=int,
                nargs="*",
                choices=SIZES,
                default=SIZES,
                help=f"trees to decode (default: {sizes})",
            )
            one.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="setting of all trainings")
            names = [variant.name for variant in (*HEADS, *SWEEP, *OLDER)]
            words = "what the others are compared with (default: %(default)s)"
            one.add_argument("--first", default=HEADS[0].name, choices=names, metavar="VARIANT", help=words)
    args = parser.parse_args(arguments)
    try:
        with only_writer("--out", args.out):
            record, figures, words = args.run(args)
    except (ValueError, measuring.OtherTextError) as error:
        parser.error(str(error))
    if record:
        (args.out / "figures.json").write_text(json.dumps(figures | harness.provenance(), indent=1), encoding="utf-8")
        print(words, end="")
        if not (args.quick or args.dry):
            print(harness.write_record(record, figures))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
