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
from tokenizers import Tokenizer

from benchmarks import harness
from benchmarks.table2_figures import Material, Measured, figures, measure, table
from medusa_decoding.checkpoints import pretrained
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.evaluation import interval
from medusa_decoding.files import only_writer
from medusa_decoding.model import MedusaModel
from medusa_decoding.training import Config, train
from medusa_decoding.training.data.encoding import fingerprint
from recipes.demo import corpus

BASE = CHECKPOINT / "base"


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


QUICK = Sizes(steps=4, rows=2, length=64, warmup=1, windows=1, prompts=3, tuning=2, prompt_tokens=24, new_tokens=16)


@dataclass(frozen=True)
class Setting:
    """A column of the table: sections of a `training.Config` over its defaults; none for the model as it is."""

    name: str
    sections: Mapping[str, Any] = field(default_factory=dict)
    has_heads: bool = True

    @property
    def folder(self) -> str:
        """Name of its folder."""
        return self.name.replace(", ", "-").replace(" ", "-").lower()


# One rate for all weights: the backbone's of appendix B.3, whose heads have four times as much.
_TOGETHER = {
    "method": "medusa-2",
    "loss": {"lambda_0": 1.0},
    "optimisation": {"heads_first_epochs": 0.0, "epochs": 1.0, "heads_factor": 1.0, "learning_rate": 5e-4},
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

    Raises:
        ValueError: more steps than there is text for.
    """
    count = sizes.steps * sizes.rows
    stream = np.empty(0, dtype=np.uint16)
    for name in np.random.default_rng(0).permutation(files.train):
        if len(stream) >= count * sizes.length:
            break
        stream = np.concatenate([stream, corpus.encode(files, [str(name)], tokenizer)])
    if len(stream) < count * sizes.length:
        raise ValueError(f"steps: expected at most {len(stream) // sizes.length // sizes.rows}, got {sizes.steps}")
    mark = fingerprint(pretrained.load_tokenizer(BASE))
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


def draw(sizes: Sizes, files: corpus.Split, tokenizer: Tokenizer) -> Material:
    """Draw what is measured on from the corpus."""
    sides = (files.held_out, sizes.prompts, 11), (files.train[:: len(files.train) // 60], sizes.tuning, 3)
    prompts, tuning = (
        list(corpus.random_prompts(corpus.encode(files, names, tokenizer), count, sizes.prompt_tokens, seed).split(1))
        for names, count, seed in sides
    )
    return Material(held_out_windows(sizes, files, tokenizer), prompts, tuning)


# -- the command -------------------------------------------------------------------------------------------------------


def prepare(settings: Sequence[Setting], sizes: Sizes, out: Path, say: Callable[[str], None] = print) -> None:
    """Write the training text and train every setting; what an earlier call has trained there is kept.

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
    for setting in settings:
        folder = out / setting.folder
        if setting.sections and not (folder / "heads").is_dir():
            say(f"{setting.name}: {sizes.steps} steps of {sizes.rows * sizes.length} tokens")
            train(config(setting, sizes, data, folder), resume=True, announce=say)


def run(settings: Sequence[Setting], sizes: Sizes, out: Path, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure every setting, trained in `out` by `prepare`; the first one is the model as it is."""
    files, tokenizer = corpus.split(), Tokenizer.from_file(str(BASE / "tokenizer.json"))
    material = draw(sizes, files, tokenizer)
    found: dict[str, dict[str, Any]] = {}
    baseline: Measured | None = None
    for setting in settings:
        started, folder = time.monotonic(), out / setting.folder
        base = folder / "model" if (folder / "model").is_dir() else BASE
        with _load(base, folder / "heads" if setting.has_heads else None) as model:
            measured = measure(model, material, sizes.new_tokens)
        baseline = baseline or measured
        found[setting.name] = figures(measured, baseline)
        say(f"{setting.name}: measured in {time.monotonic() - started:.0f} s, {json.dumps(found[setting.name])}")
    tokens = sizes.steps * sizes.rows * sizes.length
    return {"sizes": asdict(sizes), "tokens": tokens, "held_out_files": len(material.windows), "settings": found}


def _load(base: Path, heads: Path | None) -> MedusaModel:
    if heads is None:
        return MedusaModel(pretrained.load_model(base, dtype=torch.float32).eval())
    return MedusaModel.from_pretrained(heads, base, dtype=torch.float32, backend="eager")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it all, print the table and append the record; return 1 where a text was not its model's own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for text, models and heads; what is trained there is kept"
    )
    parser.add_argument("--steps", type=int, default=Sizes.steps, help="gradient steps of each (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=Sizes.prompts, help="held-out prompts (default: %(default)s)")
    parser.add_argument("--controls", action="store_true", help="direct fine-tuning with LoRA, and without heads, too")
    parser.add_argument("--quick", action="store_true", help="a few steps of everything, to see that it runs")
    args = parser.parse_args(arguments)
    try:
        sizes = QUICK if args.quick else Sizes(steps=args.steps, prompts=args.prompts)
        settings = SETTINGS + (CONTROLS if args.controls else ())
        with only_writer("--out", args.out):
            prepare(settings, sizes, args.out)
    except ValueError as error:
        parser.error(str(error))
    found = run(settings, sizes, args.out)
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
