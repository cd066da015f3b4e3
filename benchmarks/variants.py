"""Train variants of the embedded demo model alike, measure them, and print one table.

    python -m benchmarks.variants table-2 --out runs/table2 [--controls]
    python -m benchmarks.variants heads --out runs/variants

`table-2` is the paper's Table 2 in miniature: what direct fine-tuning, Medusa-1 and Medusa-2 do to a small model and
its speed. Every variant sees as many tokens in gradient steps, from training files of this Python's standard library,
which the model itself was trained on, as Vicuna's heads learn from ShareGPT. (Text written by the model would reward
whatever makes it more certain, and its perplexity on real text would rise with any recipe.) Perplexity on held-out
files takes the place of MT-Bench.

`heads` compares kinds of heads. The model continues pieces of code greedily (`medusa distill`), and each kind learns
that text from the same start (`medusa train`). int8 and fp8 are the heads with their own projections, converted.

Both measure greedy decoding of held-out prompts, with the tree of 16 nodes that each variant's own accuracies ask for.
Every text must be the one that the same model writes plainly. All in float32 on the CPU; trained folders are kept.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from benchmarks import harness
from benchmarks.ablations import measuring, setup, writing
from medusa_decoding.checkpoints import pretrained, read_heads
from medusa_decoding.cli import main as medusa
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.evaluation import interval
from medusa_decoding.evaluation.interval import Interval
from medusa_decoding.evaluation.own_text import accuracy_of_texts
from medusa_decoding.files import only_writer
from medusa_decoding.heads import MAX_TOP_K, MedusaHeads
from medusa_decoding.model import MedusaModel
from medusa_decoding.training import Config, config_schema, train
from medusa_decoding.training.data.encoding import fingerprint
from medusa_decoding.training.loop.accuracy import HeadAccuracy
from medusa_decoding.trees.tree import Tree
from recipes.demo import corpus
from recipes.demo.card import distinct_four_grams
from recipes.demo.seeds import write_seeds

BASE = CHECKPOINT / "base"
RECIPE = Path(__file__).parents[1] / "recipes" / "demo-cpu.yaml"
PLAIN, CHAIN, TREE = measuring.PLAIN, "chain of 3", "16 nodes"
NODES = 16
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
        """Name of its folder."""
        return (self.source or self.name).replace(", ", "-").replace(" ", "-").lower()


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
HEADS = (
    Variant("own projections", {}),
    Variant("own, int8", source="own projections", storage="int8"),
    Variant("own, fp8", source="own projections", storage="fp8"),
    *(
        Variant(name, {"heads": settings})
        for name, settings in {
            "two blocks per head": {"num_layers": 2},
            "shared lm_head": {"shared_projection": True},
            "shared, two blocks": {"shared_projection": True, "num_layers": 2},
            "1,024 of 2,048 tokens": {"token_map_size": 1024},
            "512 of 2,048 tokens": {"token_map_size": 512},
            "parents, rank 16": {"parent_rank": 16},
            "parents, rank 64": {"parent_rank": 64},
            "shared, parents, rank 64": {"shared_projection": True, "parent_rank": 64},
        }.items()
    ),
)


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


def prepare_heads(variants: Sequence[Variant], seeds: int, epochs: float, out: Path, say: Say = print) -> None:
    """Have the model write the training text, and train every variant of `heads` on it."""
    out.mkdir(parents=True, exist_ok=True)
    records = out / "data" / "generated" / "records.jsonl"
    if not (records.parent / "records.jsonl.finished").exists():
        pieces = out / "seeds.jsonl"
        if not pieces.exists():
            write_seeds(pieces, seeds)
        arguments = ["--set", f"data.train=[{{path: {pieces}}}]", "--set", f"output.folder={out / 'data'}"]
        arguments += ["--set", f"model.name={BASE}", "--only-data", *(["--resume"] if records.exists() else [])]
        if medusa(["distill", "--config", str(RECIPE), *arguments]) != 0:
            raise RuntimeError("the data could not be written; see above")
    shared: dict[str, Any] = config_schema.read_yaml(RECIPE)
    shared["model"]["name"] = str(BASE)
    shared["heads"] = {"num_heads": 4, "parent_rank": 0}
    shared["data"] |= {"train": [{"path": str(records)}], "cache_hidden": str(out / "states")}
    shared["optimisation"]["epochs"] = epochs
    train_all(variants, shared, out, say)


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


def heads_material(prompts: int, out: Path, prompt_tokens: int = 128, new_tokens: int = 128) -> Material:
    """Draw the material of `heads`: beginnings of pieces of code."""
    tokenizer = pretrained.load_tokenizer(BASE)
    sides = []
    for name, held_out, seed in (("held-out", True, 102), ("calibration", False, 101)):
        file = out / f"{name}.jsonl"
        write_seeds(file, prompts, seed, held_out=held_out)
        pieces = [json.loads(line)["text"] for line in file.read_text(encoding="utf-8").splitlines()]
        rows = [tokenizer(text, return_tensors="pt").input_ids[:, :prompt_tokens] for text in pieces]
        sides.append([ids for ids in rows if ids.shape[1] == prompt_tokens])
    return Material(*sides, new_tokens)


@dataclass(frozen=True)
class Measured:
    """What was measured of one variant.

    Attributes:
        scores: fp64 [files, 3], see `score`.
        found: texts by way of decoding, the plain loop first.
        accuracy: of the heads on the model's own text; None without heads.
        tree: choices of the tree of 16 nodes; None without heads.
        bytes: that a step reads of the heads in bfloat16.
    """

    scores: np.ndarray
    found: dict[str, measuring.Found]
    accuracy: HeadAccuracy | None = None
    tree: list[list[int]] | None = None
    bytes: int = 0

    @property
    def texts(self) -> list[list[int]]:
        """The plain loop's texts."""
        return [one.text for one in self.found[PLAIN].written]


def load(variant: Variant, out: Path) -> MedusaModel:
    """Load a trained variant."""
    folder = out / variant.folder
    base = pretrained.load_model(folder / "model" if (folder / "model").is_dir() else BASE, dtype=torch.float32).eval()
    if not variant.has_heads:
        return MedusaModel(base)
    heads = read_heads(folder / "heads", dtype=torch.float32).heads
    return MedusaModel(base, heads if variant.storage is None else heads.quantized(variant.storage), backend="eager")


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
    size = sum(head_bytes(model.heads.to(torch.bfloat16)).values())
    return Measured(scores, found, accuracy, [list(path) for path in best.choices], size)


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
    root = 0 if heads.root_projection is None else heads.root_projection.numel() * float_bytes
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


def heads_figures(one: Measured) -> Figures:
    """Return a variant's figures for `heads`."""
    assert one.accuracy is not None
    rate, cumulative = one.found[TREE].tokens_per_step(), one.accuracy.cumulative
    return {
        "top1": [row[0] for row in cumulative],
        "top10": [row[9] for row in cumulative],
        "tokens_per_step": None if rate is None else rate.value,
        "interval": None if rate is None else [rate.low, rate.high],
        "bytes_bf16": one.bytes,
        "same_texts": one.found[TREE].same,
    }


def heads_table(rows: Mapping[str, Figures]) -> str:
    """Return `heads` in Markdown, one row per variant."""
    lines = ["| heads | top-1, heads 1 to 4, % | top-10, % | tokens per step | MB per step, bf16 |", "|---" * 5 + "|"]
    for name, one in rows.items():
        shares = [" ".join(f"{100 * value:.0f}" for value in one[top]) for top in ("top1", "top10")]
        low, high = one["interval"] or (None, None)
        rate = writing.as_text({"value": one["tokens_per_step"], "low": low, "high": high})
        lines.append(f"| {name} | {' | '.join(shares)} | {rate} | {one['bytes_bf16'] / 1e6:.2f} |")
    return "\n".join(lines) + "\n"


def _json(found: Interval | None) -> dict[str, float | None] | None:
    return None if found is None else asdict(found)


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
    variants = _chosen(HEADS, args.only)
    prepare_heads(variants, args.seeds, args.epochs, args.out)
    if args.train_only:
        return "", {}, ""
    material = heads_material(args.prompts, args.out)
    rows = {name: heads_figures(one) for name, one in run(variants, material, args.out).items()}
    figures = {
        "seeds": args.seeds, "epochs": args.epochs, "prompts": len(material.prompts),
        "prompt_tokens": material.prompts[0].shape[1], "new_tokens": material.new_tokens, "nodes": NODES,
        "dtype": "float32",
    }  # fmt: skip
    return "head-variants-demo", figures | {"variants": rows}, heads_table(rows)


def _chosen(variants: Sequence[Variant], names: Sequence[str]) -> list[Variant]:
    """Return the variants with these names (all without any), and those that they are conversions of."""
    known = [variant.name for variant in variants]
    for name in names:
        if name not in known:
            raise ValueError(f"--only: expected some of {', '.join(known)}, got {name}")
    sources = {variant.source for variant in variants if variant.name in names}
    return [variant for variant in variants if not names or variant.name in {*names, *sources}]


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and measure what the command line asks for, print the table and append the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    suites = parser.add_subparsers(required=True, metavar="NAME")
    for name, run_suite in (("table-2", run_table_2), ("heads", run_heads)):
        one = suites.add_parser(name)
        one.set_defaults(run=run_suite, quick=False)
        one.add_argument("--out", type=Path, required=True, help="folder for data and trained variants, which are kept")
        one.add_argument("--prompts", type=int, default=64, help="held-out prompts (default: %(default)s)")
        one.add_argument("--only", nargs="+", default=[], metavar="VARIANT", help="of the variants, only these")
        one.add_argument("--train-only", action="store_true", help="measure nothing")
        one.add_argument("--dry", action="store_true", help="append nothing to the results")
        if run_suite is run_table_2:
            one.add_argument("--steps", type=int, default=300, help="gradient steps of each (default: %(default)s)")
            one.add_argument("--controls", action="store_true", help="also direct fine-tuning with LoRA and no heads")
            one.add_argument("--quick", action="store_true", help="a few steps of everything, to see that it runs")
        else:
            one.add_argument("--seeds", type=int, default=1200, help="pieces that the model continues (default: 1200)")
            one.add_argument("--epochs", type=float, default=2.0, help="over what it wrote (default: 2)")
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
