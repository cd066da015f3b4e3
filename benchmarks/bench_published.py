"""Whole answers of a published model by every way of decoding, next to transformers and llama.cpp.

    python -m benchmarks.bench_published --model MODEL.gguf --data FOLDER --llama PYTHON
    python -m benchmarks.bench_published --model MODEL.gguf --data FOLDER --heads HEADS --prompts 20 --dtypes fp32
    python -m benchmarks.bench_published --model MODEL.gguf --data FOLDER --heads HEADS --device cuda --dtypes bf16

Prompts are MT-Bench's (both turns), HumanEval's, GSM8K's and different ones of dev.jsonl.gz, up to `--prompts` of each,
spread evenly over the file. Each is answered greedily in every dtype by every way, in a random order, before the next
one is; the second turn follows the plain loop's first answer in the first dtype. All ways have the same number of
threads. Prefill is included in all times.

"int8" is torchao's `Int8WeightOnlyConfig` in the layers, with bfloat16 around them, and Q8_0 in llama.cpp. Layers of
"int8-dynamic" round their activations too (as llama.cpp does beside all quantised weights), and its lm_head is in 8
bits. "int4" is `IntxWeightOnlyConfig` in groups of 32 in the layers and lm_head, and Q4_0 in llama.cpp; "int4-dynamic"
is `Int8DynamicActivationIntxWeightConfig`, whose projections round their activations to 8 bits. llama.cpp reads
the weights of the GGUF file in the dtype's type ("llama.cpp"), and the file as it is ("given/llama.cpp"). It runs in
`--llama`, an interpreter that has the package xllamacpp. Ways that draft have what is best of some settings for prompts
that are not measured: the length of a copy, the nodes of the tree.

Every answer is a line of raw.jsonl in `--out`: after an interruption, or `--minutes`, the same command continues. What
the lines say is in summary.json: tokens per second of each set and category over those of other ways (95 % bootstrap
intervals over prompts), in fp32 how many texts are transformers', and what typical acceptance (temperature 0.7, lossy)
loses: the mean log-likelihood that the model itself gives a token of its texts, less that of the plain loop's. This is
no measure of quality: text that repeats itself is likely. `--other-heads` adds the same ways with other heads, such as
"bf16, other/heads"; their ratios to "bf16/heads" compare the two. On a CPU both ways with "auto" copy from the text
where that promises more.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import itertools
import math
import os
import random
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm.auto import tqdm
from transformers import StaticCache

from benchmarks import harness, llama_cpp_server, plot
from benchmarks.ablations import figure_5, measuring, setup
from benchmarks.ablations.measuring import Written
from benchmarks.ablations.setup import Asked, Bench
from benchmarks.bench_cpu_step import DTYPES, quantise
from benchmarks.bench_models import compiled
from medusa_decoding.checkpoints import pretrained
from medusa_decoding.checkpoints.accuracies import find_accuracies
from medusa_decoding.cli import _arguments
from medusa_decoding.evaluation import interval
from medusa_decoding.evaluation.prompts import Conversations, Prompt, read_prompts
from medusa_decoding.evaluation.run import own_attention
from medusa_decoding.files import append_line, write_json
from medusa_decoding.gguf_files import find_gguf
from medusa_decoding.model import MedusaModel
from medusa_decoding.trees.tree import Tree

SETS = {"mt_bench": "mt_bench.jsonl", "human_eval": "human_eval.jsonl", "gsm8k": "gsm8k_test.*",
        "dev": "dev.jsonl.gz"}  # fmt: skip
TUNING = "training.jsonl.gz"
"""Its prompts choose settings; no set has any of them."""
TUNING_PROMPTS, TUNING_LONGEST, TUNING_TOKENS = 6, 512, 64
COPIED, NODES = (2, 4, 8), {"cpu": (2, 3, 4, 6, 8, 16), "cuda": (8, 16, 32, 64)}
CONTEXT, BUCKET = 2048, {"cpu": 512, "cuda": 1024}
"""Most tokens of a prompt and its answer, and steps between sizes of the static cache, of which each is compiled."""
# What llama.cpp has a dtype's weights in: the layers' projections, and lm_head.
GGUF = {"bf16": ("BF16", "BF16"), "fp32": ("F32", "F32"), "int8": ("Q8_0", "BF16"), "int8-all": ("Q8_0", "Q8_0"),
        "int8-dynamic": ("Q8_0", "Q8_0"), "int4": ("Q4_0", "Q4_0"), "int4-dynamic": ("Q4_0", "Q4_0")}  # fmt: skip
GIVEN = "given"
TEMPERATURE = 0.7
Timed = tuple[Written, float]
"""A text and its CPU seconds."""


@dataclass
class Side:
    """One dtype's model and what its ways need.

    Attributes:
        bench: the model, and prompts to choose settings by; the model and its tokenizer are None for the given file.
        chosen: the length of a copy ("copied") and the size of the tree ("nodes").
        accuracies: of the heads; None without any.
        llama: starts llama.cpp with or without its draft; None without llama.cpp.
        other: whether the heads are the other ones, for the ways of `COMPARED` alone.
        headless: the same base model without heads.
    """

    bench: Bench
    chosen: dict[str, int] = field(default_factory=dict)
    accuracies: Any = None
    llama: Callable[[bool], llama_cpp_server.Server] | None = None
    other: bool = False
    headless: MedusaModel | None = None

    def tree(self, copied: bool, nodes: bool) -> Tree:
        """Return the chosen tree."""
        tree = Tree.optimal(self.accuracies, self.chosen["nodes"]) if nodes else Tree([])
        return tree.with_lookup(self.chosen["copied"]) if copied else tree

    def choose(self) -> None:
        """Choose settings by tokens per second, each among several."""
        self.chosen["copied"] = self._fastest({length: Tree([]).with_lookup(length) for length in COPIED})
        if self.accuracies is not None:
            sizes = setup.fitting(NODES[self.bench.model.backbone.device.type], self.accuracies)
            self.chosen["nodes"] = self._fastest({size: Tree.optimal(self.accuracies, size) for size in sizes})

    def _fastest(self, trees: Mapping[int, Tree]) -> int:
        ours = {str(size): measuring.ours(self.bench, tree) for size, tree in trees.items()}
        for way in ours.values():
            way(self.bench.tuning[0])
        counted = {name: (lambda asked, way=way: len(way(asked).text)) for name, way in ours.items()}
        found = harness.interleaved(counted, self.bench.tuning)
        return int(max(found, key=lambda name: harness.rate(found[name])))


def ours(side: Side, tree: Any, **generation: Any) -> Callable[[Asked], Timed]:
    """Return this package's loop."""
    way = measuring.ours(side.bench, tree, **generation)

    def timed(asked: Asked) -> Timed:
        start = time.process_time()
        written = way(asked)
        return written, time.process_time() - start

    return timed


def theirs(side: Side, static: bool = False, **settings: Any) -> Callable[[Asked], Timed]:
    """Return transformers' `generate`, with a compiled step over a static cache if asked for."""
    bench, caches = side.bench, {}
    pad, device = next(iter(bench.ends["eos_token_id"]), 0), bench.model.backbone.device
    bucket = BUCKET[device.type]

    def generate(asked: Asked, new_tokens: int) -> Timed:
        given, rows = dict(settings), -(-(asked.ids.shape[1] + bench.new_tokens) // bucket) * bucket
        if static and rows not in caches:  # compiled before it is timed
            caches[rows] = StaticCache(bench.model.backbone.config, max_cache_len=rows)
            generate(asked, 3)
        with own_attention(bench.model) as base:
            if static:
                caches[rows].reset()
                given |= {"past_key_values": caches[rows], **compiled()}
            start, cpu = time.perf_counter(), time.process_time()
            ids = asked.ids.to(device)
            out = base.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False,
                pad_token_id=pad, return_dict_in_generate=False, **(bench.ends | given),
            )  # fmt: skip
            text = out[0, ids.shape[1] :].tolist()
            return Written(text, time.perf_counter() - start, 0, 0), time.process_time() - cpu

    return lambda asked: generate(asked, bench.new_tokens)


def llama(side: Side, draft: bool) -> Callable[[Asked], Timed]:
    """Start llama.cpp and return its way."""
    assert side.llama is not None
    server = side.llama(draft)
    return lambda asked: server.answer(asked.ids[0].tolist(), side.bench.new_tokens)


PLAIN, TRANSFORMERS, TYPICAL, LLAMA = "plain", "transformers", "typical", "llama.cpp"
WAYS: dict[str, Callable[[Side], Callable[[Asked], Timed]]] = {
    TRANSFORMERS: theirs,
    "transformers, prompt lookup": functools.partial(theirs, prompt_lookup_num_tokens=8),
    "transformers, compiled": functools.partial(theirs, static=True),
    PLAIN: lambda side: ours(side, Tree([])),
    "lookup": lambda side: ours(side, side.tree(copied=True, nodes=False)),
    "auto, no heads": lambda side: ours(side, "auto", model=side.headless),
    "heads": lambda side: ours(side, side.tree(copied=False, nodes=True)),
    "heads, auto": lambda side: ours(side, "auto"),
    "heads, lookup": lambda side: ours(side, side.tree(copied=True, nodes=True)),
    TYPICAL: lambda side: ours(side, side.tree(copied=False, nodes=True), acceptance="typical",
                               temperature=TEMPERATURE),
    LLAMA: lambda side: llama(side, draft=False),
    "llama.cpp, n-grams": lambda side: llama(side, draft=True),
}  # fmt: skip
COMPARED = ("heads", "heads, auto", "heads, lookup")
NEED_HEADS, OTHER = (*COMPARED, TYPICAL), ", other"
BASELINES = (PLAIN, TRANSFORMERS, "transformers, compiled", "heads", LLAMA)


def runs(name: str, side: Side) -> bool:
    """Return whether a way can run: whether there are heads, or llama.cpp, or a model of ours."""
    if side.other:
        return name in COMPARED
    if name.startswith(LLAMA):
        return side.llama is not None
    return side.bench.model is not None and (side.accuracies is not None or name not in NEED_HEADS)


@contextlib.contextmanager
def loaded(args: argparse.Namespace) -> Iterator[dict[str, Side]]:
    """Load the model in each dtype, with its heads, and the files of llama.cpp."""
    source = find_gguf(args.model)
    if args.llama and (source is None or llama_cpp_server.version(args.llama) is None):
        raise ValueError(
            f"--llama: expected an interpreter that imports xllamacpp and --model FILE.gguf, got {args.llama}"
        )
    base = pretrained.load_model(args.model, dtype=torch.float32).eval()
    tokenizer, sides, servers = pretrained.load_tokenizer(args.model), {}, []

    def start(file: Path, exact: bool, draft: bool) -> llama_cpp_server.Server:
        servers.append(llama_cpp_server.Server(args.llama, file, CONTEXT, args.threads, draft, exact))
        return servers[-1]

    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [server.close() for server in servers])
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for dtype in (one for one in args.dtypes if one != GIVEN):
            activations, quantised = DTYPES[dtype]
            own = copy.deepcopy(base)
            for weight in own.parameters():  # buffers stay in float32, as they are when a model is loaded
                weight.data = weight.data.to(activations)
            quantise(own.to(args.device), quantised)
            for name, heads in (
                (dtype, args.heads),
                *([(dtype + OTHER, args.other_heads)] if args.other_heads else []),
            ):
                model = MedusaModel.from_pretrained(heads, own) if heads else MedusaModel(own)
                stack.enter_context(model)
                conversations = Conversations(model, tokenizer)
                tuning = [Asked(i, ids) for i, ids in enumerate(tuning_prompts(args.data, conversations))]
                ends = {"eos_token_id": []} | conversations.ending()
                side = sides[name] = Side(Bench(model, tokenizer, [], tuning, TUNING_TOKENS, ends), other=name != dtype)
                side.headless = stack.enter_context(MedusaModel(own)) if heads else model
                if heads:
                    known = find_accuracies(Path(heads), setup.heads_of(model))
                    side.accuracies = setup.count_heads(side.bench) if known is None else known.by_rank
            if args.llama:
                llama_cpp_server.rewrite(source, folder / f"{dtype}.gguf", *GGUF[dtype])
                sides[dtype].llama = functools.partial(start, folder / f"{dtype}.gguf", dtype == "fp32")
        if args.llama and GIVEN in args.dtypes:
            without: Any = None
            bench = Bench(without, without, [], [], args.max_new_tokens, {})
            sides[GIVEN] = Side(bench, llama=functools.partial(start, source, False))
        yield sides


def find(folder: Path, name: str) -> Path:
    """Return the file of that name in a folder or below it."""
    found = next(iter(sorted(folder.rglob(name))), None)
    if found is None:
        raise ValueError(f"--data: expected {name} in {folder} or below it, got none")
    return found


def spread(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return up to `count` prompts, spread evenly."""
    count = min(count, len(prompts))
    return [prompts[i * len(prompts) // count] for i in range(count)]


def questions(folder: Path, count: int) -> Iterator[tuple[str, int, Prompt]]:
    """Yield set, number and prompt; the sets take turns."""
    files = {name: spread(read_prompts([find(folder, file)], distinct=True), count) for name, file in SETS.items()}
    for number, row in enumerate(itertools.zip_longest(*files.values())):
        yield from ((name, number, one) for name, one in zip(files, row, strict=True) if one is not None)


def tuning_prompts(folder: Path, conversations: Conversations) -> list[torch.Tensor]:
    """Return prompts that no set has, int64 [1, T] each."""
    chosen = spread(read_prompts([find(folder, TUNING)], turns=1, limit=1000), TUNING_PROMPTS)
    return [torch.tensor([conversations.encode(one)[:TUNING_LONGEST]]) for one in chosen]


def ready(sides: Mapping[str, Side], args: argparse.Namespace, path: Path) -> dict[str, Callable[[Asked], Timed]]:
    """Choose what is not chosen in raw.jsonl yet, and return the ways after some texts that are not timed.

    Raises:
        ValueError: the file has lines of another machine, commit or other settings.
    """
    settings, before = described(args), {}
    for line in read(path):
        if line.get("settings", settings) != settings:
            other = [name for name, value in settings.items() if line["settings"].get(name) != value]
            raise ValueError(f"--out: expected an empty folder or one with the same {', '.join(other)}, got {path}")
        before |= line.get("chosen", {})
    if not path.exists():
        append_line(path, {"settings": settings})
    for dtype, side in sides.items():
        side.chosen = before.get(dtype, {})
        if not side.chosen and side.bench.model is not None:
            side.choose()
            append_line(path, {"chosen": {dtype: side.chosen}})
        side.bench.new_tokens = 16
    ways = {
        f"{dtype}/{name}": WAYS[name](side) for dtype, side in sides.items() for name in args.ways if runs(name, side)
    }
    for way, asked in itertools.product(ways.values(), sides[args.dtypes[0]].bench.tuning[:2]):
        way(asked)
    for side in sides.values():
        side.bench.new_tokens = args.max_new_tokens
    return ways


def read(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file; none if it is not there."""
    return plot.read(path) if path.exists() else []


def measure(
    sides: Mapping[str, Side], args: argparse.Namespace, asked: Sequence[tuple[str, int, Prompt]], path: Path
) -> list[dict[str, Any]]:
    """Answer what raw.jsonl has no line of, and return the lines of all answers."""
    ways, first = ready(sides, args, path), sides[args.dtypes[0]].bench
    known = {(line["set"], line["number"], line["turn"]): line for line in read(path) if "set" in line}
    shuffler = random.Random(len(known))
    conversations = Conversations(first.model, first.tokenizer)
    room = min(CONTEXT, first.model.backbone.context_limit) - args.max_new_tokens
    until = time.monotonic() + 60 * args.minutes
    for name, number, prompt in tqdm(asked, unit="prompt", disable=None):
        turns, answer = conversations.turns(prompt), None
        for turn in range(1, len(prompt.turns) + 1):
            ids, key = turns.send(answer), (name, number, turn)
            if key not in known:
                if len(ids) > room:
                    break
                if time.monotonic() > until:
                    return list(known.values())
                unordered = harness.in_turn(ways, Asked(number, torch.tensor([ids])), shuffler)
                found = {way: unordered[way] for way in ways}
                known[key] = {
                    "set": name, "number": number, "turn": turn, "category": prompt.category,
                    "answer": found[f"{args.dtypes[0]}/{PLAIN}"][0].text, "ways": raw(found),
                    "surprise": surprises(sides, torch.tensor([ids]), found),
                }  # fmt: skip
                append_line(path, known[key])
            answer = known[key]["answer"]
    return list(known.values())


def described(args: argparse.Namespace) -> dict[str, Any]:
    """Return what lines of one file have in common."""
    llama_cpp = llama_cpp_server.version(args.llama) if args.llama else None
    given = {name: getattr(args, name) for name in ("model", "heads", "other_heads")}
    names = {name: Path(path).name if path else None for name, path in given.items()}
    kept = {name: getattr(args, name) for name in ("ways", "dtypes", "device", "threads", "max_new_tokens", "prompts")}
    of_machine = {name: value for name, value in harness.provenance().items() if name not in ("command", "date")}
    return names | kept | {"llama_cpp": llama_cpp} | of_machine


def raw(found: Mapping[str, Timed]) -> dict[str, dict[str, Any]]:
    """Return what a line says of each way; "same": whether the text is transformers' in the same dtype."""
    theirs = {dtype_of(name): one.text for name, (one, _) in found.items() if name.split("/")[1] == TRANSFORMERS}
    return {
        name: {
            "tokens": len(one.text), "seconds": round(one.seconds, 4), "cpu_seconds": round(cpu, 4),
            "committed": one.committed, "steps": one.steps, "same": one.text == theirs.get(dtype_of(name)),
        }
        for name, (one, cpu) in found.items()
    }  # fmt: skip


def dtype_of(way: str) -> str:
    """Return the dtype of a way that is named with it."""
    return way.split("/")[0].removesuffix(OTHER)


def surprises(sides: Mapping[str, Side], ids: torch.Tensor, found: Mapping[str, Timed]) -> dict[str, float]:
    """Return the sum of -log p in nats that a dtype's model gives texts of typical acceptance and the plain loop."""
    return {
        f"{dtype}/{name}": figure_5.surprise(side.bench.model.backbone.causal_lm, ids, found[f"{dtype}/{name}"][0].text)
        for dtype, side in sides.items()
        if f"{dtype}/{TYPICAL}" in found
        for name in (TYPICAL, PLAIN)
    }


def summary(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of each set, of MT-Bench's categories and of all prompts, by dtype and way."""
    groups = {"all": list(lines)}
    for line in lines:
        groups.setdefault(line["set"], []).append(line)
        if line["category"] != SETS[line["set"]].split(".")[0]:
            groups.setdefault(line["category"], []).append(line)
    return {name: figures(some) for name, some in groups.items()}


def figures(lines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of some texts; the turns of a prompt are one sample."""
    fields = ("tokens", "seconds", "cpu_seconds", "committed", "steps", "same")
    totals: dict[str, dict[Any, Counter[str]]] = {name: {} for name in lines[0]["ways"]}
    surprise: dict[str, dict[Any, Counter[str]]] = {}
    for line in lines:
        prompt = line["set"], line["number"]
        for name, one in line["ways"].items():
            totals[name].setdefault(prompt, Counter()).update({field: one[field] for field in fields})
        for name, nats in line["surprise"].items():
            part = {"nats": nats, "tokens": line["ways"][name]["tokens"]}
            surprise.setdefault(name, {}).setdefault(prompt, Counter()).update(part)
    found: dict[str, Any] = {"prompts": len(next(iter(totals.values()))), "texts": len(lines), "ways": {}}
    for name, samples in totals.items():
        total = functools.reduce(lambda a, b: a + b, samples.values())
        dtype = dtype_of(name)
        over = {}
        for baseline in (*(f"{dtype}/{one}" for one in BASELINES), f"{GIVEN}/{LLAMA}"):
            if baseline in totals and baseline != name:
                pairs = zip(samples.values(), totals[baseline].values(), strict=True)
                rows = [(a["tokens"], a["seconds"], b["tokens"], b["seconds"]) for a, b in pairs]
                over[baseline] = measuring.rounded(interval.ratio_of_rates(rows))
        found["ways"][name] = {
            "tokens_per_second": total["tokens"] / total["seconds"],
            "cpu_seconds_per_token": total["cpu_seconds"] / total["tokens"],
            "cpu_seconds_per_second": total["cpu_seconds"] / total["seconds"],
            "tokens_per_step": total["committed"] / total["steps"] if total["steps"] else None,
            "same_text_as_transformers": total["same"] if f"{dtype}/{TRANSFORMERS}" in totals else None,
            "over": over,
        }
        if name in surprise and name.endswith(TYPICAL):
            pairs = zip(surprise[name].values(), surprise[f"{dtype}/{PLAIN}"].values(), strict=True)
            rows = [(b["nats"], b["tokens"], a["nats"], a["tokens"]) for a, b in pairs]
            lost = interval.bootstrap(rows, lambda sums: sums[0] / sums[1] - sums[2] / sums[3])
            found["ways"][name]["log_likelihood_per_token_over_plain"] = measuring.rounded(lost)
    return found


def table(found: Mapping[str, Any], baseline: str) -> str:
    """Return a Markdown table of the ways' tokens per second over a baseline's of the same dtype, by group."""
    every = found["all"]["ways"]
    rows = [["way", "tokens/s", "tokens per step", f"same text of {found['all']['texts']}"]]
    rows[0] += [f"{name}: over {baseline}" for name in found]
    for name, one in every.items():
        steps, cells = one["tokens_per_step"], []
        for group in found.values():
            ratio = group["ways"][name]["over"].get(f"{dtype_of(name)}/{baseline}")
            cells.append("" if ratio is None else interval.as_text(interval.Interval(**ratio), 2))
        same = one["same_text_as_transformers"]
        fixed = [f"{one['tokens_per_second']:.1f}", f"{steps:.2f}" if steps else "", "" if same is None else same]
        rows.append([name, *map(str, fixed), *cells])
    return harness.markdown(rows)


def main() -> None:
    """Measure, write the summary and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a GGUF file, or a folder")
    parser.add_argument("--heads", metavar="FOLDER", help="of the model (default: only ways that need none)")
    parser.add_argument("--other-heads", metavar="FOLDER", help="of the model, to compare with --heads (default: none)")
    parser.add_argument("--llama", metavar="PYTHON", help="an interpreter that has xllamacpp (default: no llama.cpp)")
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER",
                        help=f"has {', '.join(SETS.values())} and {TUNING}, in it or below it")  # fmt: skip
    parser.add_argument("--prompts", type=_arguments.at_least_one, default=80, help="of each set (default: 80)")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=[*WAYS], help="default: all that can run")
    parser.add_argument("--dtypes", nargs="+", choices=(*DTYPES, GIVEN),
                        default=["fp32", "bf16", "int8", GIVEN], help=f"{GIVEN}: the file as it is, by llama.cpp alone "
                        "(default: fp32 bf16 int8 given)")  # fmt: skip
    parser.add_argument(
        "--device", choices=tuple(NODES), default="cpu", help="llama.cpp runs on the CPU (default: cpu)"
    )
    parser.add_argument("--threads", type=_arguments.at_least_one, default=torch.get_num_threads())
    parser.add_argument("--max-new-tokens", type=_arguments.at_least_one, default=256, help="default: 256")
    parser.add_argument("--minutes", type=float, default=math.inf,
                        help="stop and summarise after so many; sets take turns (default: never)")  # fmt: skip
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: benchmarks/results/published/MACHINE")
    args = parser.parse_args()
    if args.dtypes[0] == GIVEN:
        parser.error(f"--dtypes: expected a dtype of this package first, got {' '.join(args.dtypes)}")
    if PLAIN not in args.ways:
        parser.error(f"--ways: expected {PLAIN} among them, which conversations follow, got {' '.join(args.ways)}")
    torch.set_num_threads(args.threads)
    load = os.getloadavg()[0]
    if args.device == "cpu" and load > 0.5:
        print(f"the machine is not idle: {load:.1f} programs ran in the last minute; figures will be wrong", flush=True)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore", FutureWarning)  # the cache's argument has another name since transformers 5.24
    torch._dynamo.config.recompile_limit = 64  # a compiled step for each dtype and size of the cache
    asked = list(questions(args.data, args.prompts))
    out = args.out or harness.RESULTS / "published" / harness.machine_slug()
    out.mkdir(parents=True, exist_ok=True)
    with torch.no_grad(), loaded(args) as sides:
        left_out = [name for name in args.ways if not any(runs(name, side) for side in sides.values())]
        if left_out:
            print("left out, for want of --heads or --llama:", "; ".join(left_out), flush=True)
        lines = measure(sides, args, asked, out / "raw.jsonl")
        chosen = {dtype: side.chosen for dtype, side in sides.items()}
    found = summary(lines)
    record = {"benchmark": "published", "settings": described(args), "chosen": chosen, "load_average": load,
              "left_out": left_out, "interval": interval.WORDS, "groups": found}  # fmt: skip
    write_json(out / "summary.json", record | harness.provenance())
    for baseline in BASELINES:
        if any(name.endswith(f"/{baseline}") for name in found["all"]["ways"]):
            print(f"\n{table(found, baseline)}")


if __name__ == "__main__":
    main()
