"""`heads`: kinds of heads and losses, compared over training seeds."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from benchmarks import harness
from benchmarks.ablations.setup import NEW
from benchmarks.simulator.devices import DEVICES
from benchmarks.simulator.operators import Operator, total_seconds
from benchmarks.simulator.shapes import SHAPES
from benchmarks.variants.variant import BASE, Figures, Variant, as_json, chosen, config, file_name, train_all
from medusa_decoding.checkpoints import pretrained, read_heads
from medusa_decoding.cli import main as medusa
from medusa_decoding.cli.train import read_config
from medusa_decoding.evaluation import interval
from medusa_decoding.evaluation.interval import Interval
from medusa_decoding.evaluation.own_text import RANKS, own_text_ranks
from medusa_decoding.evaluation.prompts import Prompt, read_prompts
from medusa_decoding.files import read_json, write_json
from medusa_decoding.heads import MAX_TOP_K, MedusaHeads
from medusa_decoding.model import MedusaModel
from medusa_decoding.training import config_schema, train
from medusa_decoding.training.config import HeadsConfig
from medusa_decoding.training.data.records import prompt_key
from medusa_decoding.training.loop.heads import new_heads
from medusa_decoding.trees.tree import Tree
from medusa_decoding.tuning.calibration import NONE, Calibration
from medusa_decoding.tuning.replay import walk
from medusa_decoding.tuning.search import walked_tree
from medusa_decoding.tuning.texts import Settings, Writer, Written
from recipes.demo.requests import draw

RECIPE = Path(__file__).parents[2] / "recipes" / "demo-cpu.yaml"
ROOT = Tree([])
SIZES = (8, 16, 64)
"""Nodes of the trees."""
EXPECTED, DECODED, LIKELIEST = "expected", "measured", ", likeliest drafts"
OVER_LIKELIEST = "over_first_likeliest"
"""Ratio to the first row whose candidates were not ranked with the noise."""
SIDES = {"held-out": 0, "tuning": 1}
"""Files of prompts that are measured on, with the seeds of sampled answers."""
TWO_BLOCKS = {"num_layers": 2, "shared_projection": True, "parent_rank": 32}


def _heads(name: str, loss: Mapping[str, Any] | None = None, **heads: Any) -> Variant:
    """Return heads of two blocks on the shared lm_head with other settings of `heads` and `loss`."""
    return Variant(name, {"heads": TWO_BLOCKS | heads, "loss": loss or {}})


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
    _heads("root and parents", root_rank=128, parent_rank=64),
    _heads("root, parents, kl", {"targets": "kl"}, root_rank=128, parent_rank=64),
    Variant("version 0.2", _EARLIER),
)
OLDER = (
    Variant("own projections", {}),
    Variant("own, int8", {}, source="own projections", storage="int8"),
    Variant("own, fp8", {}, source="own projections", storage="fp8"),
    Variant("own, two blocks", {"heads": {"num_layers": 2}}),
    Variant("shared lm_head", {"heads": {"shared_projection": True}}),
    _heads("shared, two blocks", parent_rank=0),
    _heads("shared, parents, rank 64", num_layers=1, parent_rank=64),
)
"""Trained only if they are asked for."""


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


class Run:
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
        names = ("prompts_from", "held_out_from", "temperature", "training_prompts", "prompts", "new_tokens")
        self.stated = {name: getattr(args, name) for name in names} | {"settings": self.settings}
        stated = self.out / "task.json"
        if not stated.is_file():
            self._write_prompts()
            write_json(stated, self.stated)
        there: Any = read_json(stated)
        if there != self.stated:
            names = ", ".join(name for name, value in self.stated.items() if there.get(name, ...) != value)
            raise ValueError(f"out: expected a new folder, or the {names} in {stated}, got other ones")

    def _settings(self) -> dict[str, Any]:
        args, values, file = self._args, config_schema.read_yaml(RECIPE), self.out / "settings.yaml"
        values["model"] |= {"name": str(BASE if args.model == "demo" else args.model), "dtype": "float32"}
        values["heads"] = {"num_heads": 4}
        values["data"] |= {"train": [{"path": str(self._records)}], "held_out_share": 0.0}
        values["data"]["cache_hidden"] = str(self.out / "states")
        values["data"].pop("answers", None)  # the model's own, but written before
        values["generation"] |= {"temperature": args.temperature, "turns": 1}
        if args.quick:
            values["data"]["length"] = 128
            values["generation"]["max_new_tokens"] = 16
            values["optimisation"] = {"optimizer": "adamw", "max_steps": 2, "batch_size": 2}
        write_json(file, values)  # JSON is YAML
        write_json(file, asdict(read_config(argparse.Namespace(config=file, set=args.set))))
        return dict(read_json(file))

    def _write_prompts(self) -> None:
        """Write prompts to learn from, to choose trees on and held-out ones; none is in two files."""
        for name, part in zip((*SIDES, "training"), self._drawn(), strict=True):
            lines = [{"text": one.turns[0]} if one.is_text else {"messages": one.messages} for one in part]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (self.out / f"{name}.jsonl").write_text(text, encoding="utf-8")

    def _drawn(self) -> tuple[Sequence[Prompt], ...]:
        """Return held-out prompts, others to choose trees on and others to learn from."""
        args, count = self._args, self._args.prompts
        if args.prompts_from is None:
            requests = [*draw(count, 2, held_out=True), *draw(count + args.training_prompts, 2)]
            prompts = [Prompt((request.text,)) for request in requests]
            return prompts[:count], prompts[count : 2 * count], prompts[2 * count :]
        found, others = _unique(args.prompts_from), _unique(args.held_out_from)
        held_out, rest = [one for key, one in others.items() if key not in found], list(found.values())
        np.random.default_rng(0).shuffle(rest)
        sides = "half" if args.held_out_from is None else "all"
        if args.held_out_from is None:
            held_out, rest = rest[:count], rest[count:]
        elif not held_out:
            raise ValueError(f"--held-out-from: expected prompts that {args.prompts_from} does not have, got none")
        if len(rest) <= count:
            raise ValueError(f"--prompts: expected fewer than {sides} of the {len(found)} there, got {count}")
        return held_out[:count], rest[:count], rest[count : count + args.training_prompts]

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
        answered = sorted(writer.answers(enumerate(self._prompts[side]), tree), key=lambda one: one.number)
        return [one.written[0] for one in answered if one.written]

    def row(self, variant: Variant, seed: int) -> Figures:
        """Train and measure a row with a seed, or return what an earlier run has found.

        Raises:
            ValueError: that run had other settings.
        """
        shared = self.settings | {"optimisation": self.settings["optimisation"] | {"seed": seed}}
        made = config(variant, shared, self.out / f"{variant.folder}-{seed}")
        file = self.out / f"{file_name(variant.name)}-{seed}.json"
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
        return Calibration(model.heads.num_heads, min(RANKS, model.heads.num_candidates), texts)


def _unique(file: str | None) -> dict[bytes, Prompt]:
    """Return the prompts of a file by their first question, each once; none without a file."""
    return {} if file is None else {prompt_key(one.turns[0]): one for one in read_prompts([file], turns=1)}


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


def row_of(seeds: Sequence[Figures], first: Sequence[Figures]) -> Figures:
    """Return a row's figures over all seeds; ratios are to the first row, with intervals over paired prompts."""
    found: Figures = {name: np.mean([one[name] for one in seeds], 0).tolist() for name in ("top1", "top10", "seconds")}
    found |= {name: seeds[0][name] for name in ("bytes_bf16", "us_7b_h200")}
    found |= {"texts_unlike_plain": sum(one["texts_unlike_plain"] for one in seeds), "ways": {}}
    for way, sizes in seeds[0]["steps"].items():
        for size in sizes:
            own = [np.array(one["steps"][way][size]) for one in seeds]
            cell = found["ways"].setdefault(way, {})[size] = {
                "tokens_per_step": as_json(interval.ratio(sum(own).tolist())),
                "of_seeds": [float(np.divide(*rows.sum(0))) for rows in own],
            }
            for name, other in (("over_first", way), (OVER_LIKELIEST, way + LIKELIEST)):
                if other in first[0]["steps"]:
                    rows = sum(np.array(one["steps"][other][size]) for one in first)
                    cell[name] = as_json(interval.ratio_of_rates(np.hstack([sum(own), rows]).tolist()))
    return found


def as_table(rows: Mapping[str, Figures]) -> str:
    """Return `heads` in Markdown, one line per row."""
    lines = [_cells(name, row) for name, row in rows.items()]
    return harness.markdown([list(lines[0]), *(list(line.values()) for line in lines)]) + "\n"


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


def run_suite(args: argparse.Namespace) -> tuple[str, Figures, str]:
    """Train and measure `heads`; return the record's name, its figures and the table."""
    if args.model != "demo" and args.prompts_from is None:
        raise ValueError("--prompts-from is needed for a model of your own")
    if args.quick:
        args.training_prompts, args.prompts, args.new_tokens = 6, 3, 16
    wanted = chosen((*HEADS, *OLDER), args.only or [one.name for one in HEADS])
    first = next(one for one in (*HEADS, *OLDER) if one.name == args.first)
    variants = [first, *(variant for variant in wanted if variant != first)]
    run = Run(args)
    run.prepare()
    found: dict[str, list[Figures]] = {variant.name: [] for variant in variants}
    for seed, variant in itertools.product(args.seeds, variants):  # all rows of a seed are there early
        found[variant.name].append(run.row(variant, seed))
    rows = {name: row_of(seeds, found[variants[0].name]) for name, seeds in found.items()}
    model = "demo" if args.model == "demo" else file_name("-".join(Path(args.model).parts[-3:]))
    figures = {"seeds": args.seeds, **run.stated, "variants": rows}
    return f"heads-{model}-{run.out.name}", figures, f"{as_table(rows)}{interval.WORDS}\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `heads` alone."""
    parser.add_argument("--model", default="demo", metavar="FOLDER", help="base model (default: the demo's)")
    parser.add_argument(
        "--prompts-from", metavar="FILE", help="prompts as for medusa calibrate (default: requests of the demo model)"
    )
    words = "held-out prompts (default: some of --prompts-from, which are not used otherwise)"
    parser.add_argument("--held-out-from", metavar="FILE", help=words)
    parser.add_argument("--temperature", type=float, default=0.0, help="of all answers (default: 0, greedy)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of training (default: 0)")
    parser.add_argument("--training-prompts", type=int, default=1200, help="to learn from (default: %(default)s)")
    parser.add_argument(
        "--new-tokens", type=int, default=NEW, help="of measured answers, at most (default: %(default)s)"
    )
    words = f"trees to decode (default: {' '.join(map(str, SIZES))})"
    parser.add_argument("--measured", type=int, nargs="*", choices=SIZES, default=SIZES, help=words)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="setting of all trainings")
    names = [variant.name for variant in (*HEADS, *OLDER)]
    words = "what the others are compared with (default: %(default)s)"
    parser.add_argument("--first", default=HEADS[0].name, choices=names, metavar="VARIANT", help=words)
