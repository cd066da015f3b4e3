"""The paper's Table 2 in miniature: what direct fine-tuning, Medusa-1 and Medusa-2 do to one small model and its speed.

    python -m benchmarks.table2 --out runs/table2 [--controls]

Every setting starts from the embedded base model and sees as many tokens in gradient steps, of the text that the model
itself was trained on: training files of this Python's standard library, as Vicuna's heads learn from ShareGPT. (Text
written by the model would reward whatever makes it surer of itself, and its perplexity on real text would rise with any
recipe.) Measured are the perplexity of each trained model on held-out files, where the paper has MT-Bench, and tokens a
step and speed of greedy decoding on held-out prompts, where every text must be the one that the same model writes
plainly. All in float32 on the CPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import harness
from medusa_decoding.demo import CHECKPOINT, corpus
from medusa_decoding.demo.distill import random_prompts
from medusa_decoding.demo.measure import distinct_four_grams
from medusa_decoding.evaluation import interval
from medusa_decoding.evaluation.interval import Interval
from medusa_decoding.evaluation.own_text import RANKS, own_text_accuracy
from medusa_decoding.model import MedusaModel, MedusaOutput
from medusa_decoding.training import Config, train
from medusa_decoding.training.accuracy import HeadAccuracy
from medusa_decoding.training.chat import fingerprint
from medusa_decoding.tree import Tree

BASE = CHECKPOINT / "base"
PLAIN, CHAIN, TREE = "plain", "chain of 3", "16 nodes"
NODES = 16


@dataclass(frozen=True)
class Sizes:
    """How much is trained and measured.

    Attributes:
        steps: gradient steps of each setting, an even number.
        rows: a step.
        length: tokens a row, in training and in measuring perplexity.
        warmup: steps, of each stage.
        windows: of a held-out file at most.
        prompts: held-out prompts to decode.
        tuning: prompts of training files that trees are chosen on.
        prompt_tokens, new_tokens: of each.
    """

    steps: int = 300
    rows: int = 4
    length: int = 256
    warmup: int = 20
    windows: int = 4
    prompts: int = 64
    tuning: int = 24
    prompt_tokens: int = 128
    new_tokens: int = 128

    def __post_init__(self) -> None:
        if self.steps < 2 or self.steps % 2:
            raise ValueError(f"steps: expected an even number from 2 (Medusa-2 has two stages), got {self.steps}")
        if not 0 <= self.warmup < self.steps // 2:
            raise ValueError(f"warmup: expected from 0 to below {self.steps // 2}, got {self.warmup}")


QUICK = Sizes(steps=4, rows=2, length=64, warmup=1, windows=1, prompts=3, tuning=2, prompt_tokens=24, new_tokens=16)


@dataclass(frozen=True)
class Setting:
    """A column of the table: sections of a `training.Config` over its defaults; none for the model as it is."""

    name: str
    sections: Mapping[str, Any] = field(default_factory=dict)
    has_heads: bool = True


RATE, HEADS_RATE = 5e-4, 2e-3
"""Peak rates of appendix B.3: of the backbone, and of the heads (four times as much)."""
_TOGETHER = {
    "method": "medusa-2",
    "loss": {"lambda_0": 1.0},
    "optimisation": {"heads_first_epochs": 0.0, "epochs": 1.0, "heads_factor": 1.0, "learning_rate": RATE},
}
_WHOLE = {"enabled": False}
SETTINGS = (
    Setting("baseline", has_heads=False),
    Setting("direct", {**_TOGETHER, "lora": _WHOLE}),
    Setting("medusa-1", {"method": "medusa-1", "optimisation": {"epochs": 1.0}}),
    Setting("medusa-2", {"method": "medusa-2", "optimisation": {"heads_first_epochs": 0.5, "epochs": 0.5}}),
)
CONTROLS = (
    Setting("direct, LoRA", {**_TOGETHER, "lora": {"enabled": True}}),
    # The heads weigh next to nothing, and are not looked at: what more training alone does to the model.
    Setting(
        "no heads",
        {**_TOGETHER, "lora": _WHOLE, "loss": {"lambda_0": 1e-12}, "heads": {"num_heads": 1}},
        has_heads=False,
    ),
)


def config(setting: Setting, sizes: Sizes, data: Path, folder: Path) -> Config:
    """Return the training run of a setting; what it does not say is the method's own (appendix B)."""
    values: dict[str, Any] = {
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
        "output": {"folder": str(folder), "tensorboard": False, "keep_checkpoints": 1},
    }  # fmt: skip
    for name, section in setting.sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, Mapping) else section
    return Config.of(values)


# -- text --------------------------------------------------------------------------------------------------------------


def write_rows(sizes: Sizes, files: corpus.Split, tokenizer: Tokenizer, path: Path) -> int:
    """Write a row of training text a step and place, as exact tokens: an epoch has `sizes.steps` steps.

    Files are taken in a random order until there are enough, and cut into rows one behind the other.

    Returns:
        Tokens written.
    """
    count = sizes.steps * sizes.rows
    stream = np.empty(0, dtype=np.uint16)
    for name in np.random.default_rng(0).permutation(files.train):
        if len(stream) >= count * sizes.length:
            break
        stream = np.concatenate([stream, corpus.encode(files, [str(name)], tokenizer)])
    mark = fingerprint(AutoTokenizer.from_pretrained(BASE))
    with path.open("w", encoding="utf-8") as lines:
        for row in stream[: count * sizes.length].reshape(count, sizes.length).tolist():
            said = {"input_ids": row, "learnt": [[0, sizes.length]], "tokenizer": mark}
            lines.write(json.dumps({"text": tokenizer.decode(row, skip_special_tokens=False)} | said) + "\n")
    return count * sizes.length


def held_out_windows(sizes: Sizes, files: corpus.Split, tokenizer: Tokenizer) -> list[torch.Tensor]:
    """Return windows int64 [n, length] of each held-out file that is as long as one, evenly spread over it."""
    found = []
    for name in files.held_out:
        ids = torch.from_numpy(corpus.encode(files, [name], tokenizer).astype(np.int64))
        room = len(ids) - sizes.length
        if room >= 0:
            count = min(sizes.windows, len(ids) // sizes.length)
            starts = np.linspace(0, room, count).astype(int) if count > 1 else np.array([0])
            found.append(torch.stack([ids[start : start + sizes.length] for start in starts]))
    return found


# -- measuring ---------------------------------------------------------------------------------------------------------


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
class Material:
    """What every setting is measured on: windows of held-out files, prompts of held-out and of training files."""

    windows: list[torch.Tensor]
    prompts: list[torch.Tensor]
    tuning: list[torch.Tensor]

    @classmethod
    def draw(cls, sizes: Sizes, files: corpus.Split, tokenizer: Tokenizer) -> Material:
        """Draw it from the corpus."""
        sides = (files.held_out, sizes.prompts, 11), (files.train[:: len(files.train) // 60], sizes.tuning, 3)
        prompts, tuning = (
            list(random_prompts(corpus.encode(files, names, tokenizer), count, sizes.prompt_tokens, seed).split(1))
            for names, count, seed in sides
        )
        return cls(held_out_windows(sizes, files, tokenizer), prompts, tuning)


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


# -- the table ---------------------------------------------------------------------------------------------------------


def figures(one: Measured, baseline: Measured) -> dict[str, Any]:
    """Return a setting's figures; intervals are of 95 %, over held-out files or prompts, which stay paired."""
    paired = np.stack([one.scores[:, 0], baseline.scores[:, 0], *one.scores[:, 1:].T, baseline.scores[:, 2]], axis=1)
    plain = one.decoded[PLAIN]
    found: dict[str, Any] = {
        "perplexity": _json(interval.bootstrap(one.scores, lambda sums: np.exp(sums[0] / sums[1]))),
        "perplexity_over_baseline": _json(interval.bootstrap(paired, lambda s: np.exp((s[0] - s[1]) / s[2]))),
        "top1": _json(interval.bootstrap(one.scores, lambda sums: sums[2] / sums[1])),
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
        return [(f"{words}, {name}", lambda c, n=name: spread(c[key].get(n), 2)) for name in (CHAIN, TREE)]

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
        ("minutes of training", lambda c: f"{c['training_seconds'] / 60:.1f}"),
    ]
    lines = ["| | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(cell(column) for column in columns.values()) + " |" for name, cell in rows]
    return "\n".join(lines) + "\n"


def run(settings: Sequence[Setting], sizes: Sizes, out: Path, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Train and measure every setting, the baseline first.

    Args:
        settings: columns; the first one is the model as it is.
        sizes: how much.
        out: an empty folder, which gets the training text and a folder a setting.
        say: is told how it goes.
    """
    files = corpus.split()
    tokenizer = Tokenizer.from_file(str(BASE / "tokenizer.json"))
    data = out / "rows.jsonl"
    tokens = write_rows(sizes, files, tokenizer, data)
    material = Material.draw(sizes, files, tokenizer)
    say(f"{tokens} tokens in {sizes.steps} gradient steps a setting; {len(material.windows)} held-out files")
    found: dict[str, dict[str, Any]] = {}
    baseline: Measured | None = None
    for setting in settings:
        started, seconds = time.monotonic(), 0.0
        if setting.sections:
            folder = out / setting.name.replace(", ", "-").replace(" ", "-").lower()
            result = train(config(setting, sizes, data, folder), announce=say)
            seconds, trained = result.seconds, folder / "model"
            base = trained if trained.is_dir() else BASE
            heads = result.heads if setting.has_heads else None
        else:
            base, heads = BASE, None
        with _load(base, heads) as model:
            measured = measure(model, material, sizes.new_tokens)
        baseline = baseline or measured
        found[setting.name] = figures(measured, baseline) | {"training_seconds": seconds}
        say(f"{setting.name}: {time.monotonic() - started:.0f} s, {json.dumps(found[setting.name])}")
    return {"sizes": asdict(sizes), "tokens": tokens, "held_out_files": len(material.windows), "settings": found}


def _load(base: Path, heads: Path | None) -> MedusaModel:
    if heads is None:
        return MedusaModel(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval())
    return MedusaModel.from_pretrained(heads, base, dtype=torch.float32, backend="eager")


def _json(found: Interval | None) -> dict[str, float | None] | None:
    return None if found is None else found.to_json()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it all, print the table and append the record; return 1 where a text was not its model's own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a new folder for training text, models and heads")
    parser.add_argument("--steps", type=int, default=Sizes.steps, help="gradient steps of each (default: %(default)s)")
    parser.add_argument("--controls", action="store_true", help="direct fine-tuning with LoRA, and without heads, too")
    parser.add_argument("--quick", action="store_true", help="a few steps of everything, to see that it runs")
    args = parser.parse_args(arguments)
    try:
        sizes = QUICK if args.quick else Sizes(steps=args.steps)
        if args.out.exists() and any(args.out.iterdir()):
            raise ValueError(f"out: expected a new or empty folder, got {args.out} with something in it")
    except ValueError as error:
        parser.error(str(error))
    args.out.mkdir(parents=True, exist_ok=True)
    found = run(SETTINGS + (CONTROLS if args.controls else ()), sizes, args.out)
    columns = table(found["settings"], sizes.prompts)
    (args.out / "table.md").write_text(columns, encoding="utf-8")
    (args.out / "figures.json").write_text(json.dumps(found | harness.provenance(), indent=1) + "\n", encoding="utf-8")
    print(columns)
    print(interval.WORDS.replace("over prompts", "over held-out files or prompts"))
    if not args.quick:
        print(harness.write_record("table2", found))
    different = sum(column["texts_unlike_plain"] for column in found["settings"].values())
    if different:
        print(f"{different} texts are not the ones that the same model writes plainly")
    return int(different > 0)


if __name__ == "__main__":
    raise SystemExit(main())
