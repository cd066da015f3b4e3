"""Write a first config that fits a model, its data and the device: `medusa train --init MODEL DATA`.

Only the model's configs and tokenizer are read, not its weights, and of the data at most `RECORDS` records. Every
choice has a reason, which the file repeats as a comment.

By default the heads learn what the model itself answers, because that is what they have to predict.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import yaml  # type: ignore[import-untyped]

from medusa_decoding.checkpoints import pretrained
from medusa_decoding.decode.runtime.memory import available, size
from medusa_decoding.training.config import Config, GenerationConfig, SourceConfig
from medusa_decoding.training.data.encoding import ChatEncoder
from medusa_decoding.training.data.records import NO_ANSWER, Record, Report, parse_record
from medusa_decoding.training.data.sources import BadRecordError, raw_records
from medusa_decoding.training.distill.seeds import Seed
from medusa_decoding.training.loop.backbone import DTYPES
from medusa_decoding.training.loop.estimate import Shapes, device_name, memory, operations, shapes_of

RECORDS, SAMPLE = 20_000, 300
"""Records that are read at most, and of these the ones that are tokenized."""
Recipe = Literal["own-answers", "given-answers", "paper"]
"""Whose answers the heads learn; "paper": the given ones, with the settings of the paper's appendix B."""
POSITIONS = 512
"""Positions to learn from in a step. Many small steps taught the demo's heads more than few large ones."""
STEPS = 600
"""Steps that a run should have at least, so that heads learn enough."""
TURNS, TEXT_PROMPT = GenerationConfig().turns, GenerationConfig().prompt_tokens
"""Questions of a conversation that are answered, and tokens of a text, at most, that a model goes on with."""
ROOM = 0.8
"""Share of the free memory that a run may take by its estimate."""
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
LARGE_VOCABULARY, MAP_SHARE = 16_384, 1 / 6
"""Tokens of a vocabulary that may be trimmed, and the share of them that is left (down to a power of two)."""
CACHE = 8 * 2**30
"""Bytes of hidden states that may be cached on disk."""
FILL = 0.95
"""Share of a row's tokens that packed records are taken to fill."""
SECTIONS = ("method", "model", "data", "heads", "loss", "generation", "optimisation", "output")


class Choice(NamedTuple):
    """A setting, its value and why it has that value."""

    key: str
    value: Any
    why: str = ""


class FirstConfig:
    """A config as it is chosen.

    Attributes:
        facts: what was found, a line each.
        distills: whether `medusa distill` writes the answers.
    """

    def __init__(self, device: torch.device, recipe: Recipe) -> None:
        self.device, self.distills, self.paper = device, recipe == "own-answers", recipe == "paper"
        self.gpu, self.free = device.type == "cuda", available(device)
        self.quantises = self.gpu and importlib.util.find_spec("bitsandbytes") is not None
        self.facts: list[str] = []
        self._chosen: dict[str, Choice] = {}

    def set(self, key: str, value: Any, why: str = "") -> None:
        """Choose a value; a later one replaces it."""
        self._chosen[key] = Choice(key, value, why)

    def get(self, key: str) -> Any:
        """Return a value that was chosen."""
        return self._chosen[key].value

    @property
    def choices(self) -> list[Choice]:
        """All choices in the file's order."""
        return sorted(self._chosen.values(), key=lambda choice: SECTIONS.index(choice.key.partition(".")[0]))

    @property
    def config(self) -> Config:
        """The settings; raises `ValueError` if they exclude each other."""
        values: dict[str, Any] = {"output": {"folder": "-"}}
        for key, value, _ in self._chosen.values():
            section, _, name = key.partition(".")
            if name:
                values.setdefault(section, {})[name] = value
            else:
                values[section] = value
        return Config.of(values)

    @property
    def shapes(self) -> Shapes:
        """The sizes of the model and of the heads."""
        return shapes_of(self.config)

    @property
    def bytes(self) -> int:
        """The memory of a run."""
        return sum(memory(self.config, self.shapes).values())

    @property
    def fits(self) -> bool:
        """Whether a run fits the device."""
        return self.free is None or self.bytes <= ROOM * self.free

    def to_yaml(self, commands: Sequence[str]) -> str:
        """Return the file: the settings with their reasons, and in its first lines the commands to run with it."""
        lines = [f"# Medusa heads, fitted to {device_name(self.device)}.", "#"]
        lines += [*(f"#   {' '.join(command.split())}" for command in commands), "#"]
        lines.append(
            "# Settings that are not here have their defaults, most of them the paper's: medusa train --settings"
        )
        before = ""
        for key, value, why in self.choices:
            section, _, name = key.rpartition(".")
            if section and section != before:
                lines.append(f"{section}:")
            before = section
            text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
            text = text.removesuffix("\n").removesuffix("\n...")
            lines.append(f"{'  ' if section else ''}{name}: {text}{f'    # {why}' if why else ''}")
        return "\n".join(lines) + "\n"


@dataclass
class _Data:
    """What was found in the data: records by kind, those without an answer, and a sample of the usable ones."""

    path: str
    kinds: Counter[str]
    unanswered: int
    several: bool
    complete: bool
    sample: list[Record]

    @property
    def records(self) -> int:
        return self.kinds.total()


def first_config(model: str, data: str, device: torch.device, recipe: Recipe = "own-answers") -> FirstConfig:
    """Choose the settings of a first run.

    Args:
        model: folder or hub id of the base model.
        data: file, folder or hub name, as for training.
        device: to train on.
        recipe: what the heads learn, and how.
    """
    settings = pretrained.load_config(model, argument="MODEL")
    tokenizer = pretrained.load_tokenizer(model, argument="MODEL")
    chosen = FirstConfig(device, recipe)
    found = _look_at(data, chosen.distills)
    chosen.set("method", "medusa-1", "trains heads alone: the model and its texts stay as they are")
    chosen.set("model.name", _given(model))
    encoder = _template(chosen, model, tokenizer, found)
    lengths, learnt = _lengths(chosen, encoder, found, int(getattr(settings, "max_position_embeddings", 0) or 4096))
    _answers(chosen, model, found)
    _heads(chosen)
    _fit(chosen)
    rows = _steps(chosen, found, sum(lengths) / len(lengths), learnt)
    folder, number = Path("runs") / model_name(model), 2
    while folder.exists():
        folder, number = Path("runs") / f"{model_name(model)}-{number}", number + 1
    chosen.set("output.folder", str(folder))
    if importlib.util.find_spec("tensorboard") is None:
        chosen.set("output.trackers", [], "tensorboard is not installed")
    shapes = chosen.shapes
    states = rows * chosen.get("data.length") * shapes.hidden * DTYPES[chosen.get("model.dtype")].itemsize
    if not chosen.gpu and found.complete and states < min(CACHE, shutil.disk_usage(".").free // 4):
        words = f"later epochs read the model's states from disk (about {size(states)}); remove it afterwards"
        chosen.set("data.cache_hidden", str(folder / "states"), words)
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in found.kinds.most_common())
    more = "" if found.complete else f" (only the first {RECORDS:,} were read)"
    what = f"; {found.unanswered:,} without an answer" if chosen.distills else ""
    chosen.facts = [
        f"model: {Path(model).name}, {(shapes.linear + shapes.other) / 1e6:,.0f} M weights, hidden size "
        f"{shapes.hidden}, {shapes.vocabulary:,} tokens, {'quantised on disk' if shapes.stored else 'not quantised'}",
        f"data: {kinds}{more}{what}; half of them have up to {lengths[len(lengths) // 2]} tokens, 95 % up to "
        f"{_most(lengths)} (with answers)",
        f"device: {device_name(device)}, "
        + ("unknown memory" if chosen.free is None else f"{size(chosen.free)} of memory free"),
    ]
    return chosen


def _look_at(path: str, distills: bool) -> _Data:
    found, report = _Data(_given(path), Counter(), 0, False, True, []), Report()
    for where, raw in raw_records(SourceConfig(path), partly=True):
        if report.read == RECORDS:
            found.complete = False
            break
        report.read += 1
        try:
            record = parse_record(raw, where, seeds=distills)
        except BadRecordError as error:
            report.reject(where, str(error))
            continue
        found.kinds[record.kind] += 1
        roles = Counter(turn["role"] for turn in record.messages)
        found.unanswered += record.text is None and not roles["assistant"]
        found.several |= roles["user"] > 1
        found.sample.append(record)
    if found.records == 0:
        reasons = "; ".join(f"{count} x {reason}" for reason, count in report.bad.most_common(3)) or "an empty file"
        hint = "; without --recipe the model writes the answers" if report.bad[NO_ANSWER] else ""
        raise ValueError(
            f"DATA: expected records (docs/data.md shows a line of each kind), got {reasons} in {path}{hint}"
        )
    found.sample = found.sample[:: -(-len(found.sample) // SAMPLE)]
    return found


def _given(name: str) -> str:
    """Return a file's or folder's path in full, so that it is found from any folder; a hub name as it is."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name


def _template(chosen: FirstConfig, model: str, tokenizer: Any, found: _Data) -> ChatEncoder:
    """Choose how conversations become text; return the encoder of these settings."""
    chosen.set("data.train", [{"path": found.path}])
    template, arguments = "auto", {}
    if tokenizer.chat_template:
        if "enable_thinking" in str(tokenizer.chat_template):
            arguments = {"enable_thinking": False}
            chosen.set("data.template_arguments", arguments, "answers without a block of thought")
    elif set(found.kinds) != {"text"} and "vicuna" in Path(model).name.lower():
        template = "vicuna"
        chosen.set("data.template", template, "the tokenizer has no chat template; this is the model's own format")
    elif found.several:
        template = "plain"
        chosen.set("data.template", template, "the tokenizer has no chat template, and there are several turns")
    encoder = ChatEncoder(tokenizer, template, arguments=arguments)
    try:
        list(_sizes(encoder, found.sample, chosen.distills, 0))
    except ValueError:
        encoder = ChatEncoder(tokenizer, template, turns="each", arguments=arguments)
        chosen.set("data.turns", "each", "the template renders an answer differently once other turns follow")
    return encoder


def _sizes(encoder: ChatEncoder, sample: list[Record], distills: bool, new: int) -> Iterator[tuple[int, int]]:
    """Yield how many tokens the examples of a sample have, and how many of them are learnt.

    If the model writes the answers (`distills`), each of them has `new` tokens.
    """
    for record in sample:
        with contextlib.suppress(BadRecordError):
            if not distills:
                yield from ((len(example.ids), int(example.learnt.sum())) for example in encoder.encode(record))
                continue
            seed = Seed(0, record, encoder, GenerationConfig(), sys.maxsize)
            later = [turn["content"] for turn in record.messages if turn["role"] == "user"][1:TURNS]
            asked = sum(len(encoder.tokenizer(question, verbose=False)["input_ids"]) for question in later)
            yield len(seed.prompt) + asked + seed.turns * new, seed.turns * new


def _lengths(chosen: FirstConfig, encoder: ChatEncoder, found: _Data, limit: int) -> tuple[list[int], float]:
    """Choose the length of a row; return the sampled lengths in order, and which share of their tokens is learnt.

    A row holds the longest answers that a model may write; they are taken to be half as long on average.
    """
    most, new_tokens = min(4096 if chosen.gpu else 1024, limit), min(512, limit // 2)
    sizes = list(_sizes(encoder, found.sample, chosen.distills, new_tokens))
    if not sizes:
        raise ValueError(f"DATA: expected records to learn that the chat template takes, got none in {found.path}")
    wanted = _most(sorted(tokens for tokens, _ in sizes))
    length = next((step for step in LENGTHS if wanted <= step <= most), most)
    cut = sum(tokens > length for tokens, _ in sizes) / len(sizes)
    why = "holds 95 % of the records" if wanted <= length else f"as long as fits this device; {cut:.0%} are longer"
    chosen.set("data.length", length, why)
    if chosen.distills:
        chosen.set("generation.max_new_tokens", new_tokens, "most tokens per answer; few answers should be cut")
        chosen.set("generation.batch_size", 16 if chosen.gpu else 32, "answers written at once")
        if found.kinds["text"]:
            chosen.set("generation.prompt_tokens", max(16, min(TEXT_PROMPT, length - new_tokens)))
        sizes = list(_sizes(encoder, found.sample, True, new_tokens // 2))  # most answers end earlier
    lengths = sorted(tokens for tokens, _ in sizes)
    return [min(tokens, length) for tokens in lengths], sum(new for _, new in sizes) / sum(lengths)


def _most(ordered: list[int]) -> int:
    """Return the 95th percentile."""
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


def _answers(chosen: FirstConfig, model: str, found: _Data) -> None:
    """Say whose answers the heads learn, and how the model samples its own."""
    if not chosen.distills:
        chosen.set("data.answers", "given", "learns the answers of the data, as --recipe says")
        return
    answered = found.records - found.unanswered - found.kinds["text"]
    why = f"; the {answered:,} given ones are dropped, --recipe given-answers learns them" if answered else ""
    chosen.set("data.answers", "own", f"`medusa distill`: heads learn what the model writes{why}")
    if found.several:
        chosen.set("generation.turns", TURNS, "questions of a conversation, each after the model's own earlier answers")
    own, drawn = pretrained.read_generation_config(model, argument="MODEL"), "greedy (no do_sample)"
    if own.get("do_sample"):
        names = ("temperature", "top_p", "top_k", "min_p")
        drawn = ", ".join(f"{name} {own[name]}" for name in names if own.get(name) is not None) or "temperature 1"
        chosen.set("loss.targets", "kl", "learns what the model could have answered, not only the one draw")
    why = f"the model's own generation_config: {drawn}; name it if you serve otherwise"
    chosen.set("generation.temperature", None, why)


def _heads(chosen: FirstConfig) -> None:
    as_paper = chosen.gpu or chosen.paper
    count = min(5 if as_paper else 4, chosen.get("data.length") - 2)
    chosen.set("heads.num_heads", count, "as in the paper" if as_paper else "as in the CPU recipes")
    if not chosen.gpu:
        chosen.set("model.dtype", "float32", "fastest and exact on most CPUs")
    elif torch.cuda.is_bf16_supported():
        chosen.set("model.dtype", "bfloat16", "this GPU computes in it")
    else:
        chosen.set("model.dtype", "float32", "this GPU has no bfloat16, and float16 cannot be trained in")
    chosen.set("model.quantization", "none", "the heads learn from the model as it is served")
    chosen.set("heads.shared_projection", False)
    shapes = chosen.shapes
    if chosen.paper:
        share = shapes.own / (shapes.linear + shapes.other)
        words = f"own projections as in the paper, {share:.0%} of the model's size"
        chosen.set("heads.shared_projection", False, words)
        if chosen.quantises and shapes.stored is None:
            chosen.set("model.quantization", "4bit", "as in the paper (B.3); serve it the same way")
        return
    chosen.set("heads.shared_projection", True, "learns more from little data than own projections, and reads less")
    chosen.set("heads.num_layers", 2, "a second block costs little and gains most")
    rank = min(256, shapes.hidden // 2)
    chosen.set("heads.root_rank", rank, "drafts see the root token; 0 for heads that other programs read")
    chosen.set("heads.parent_rank", 64, "drafts see the token before them; 0 for heads that other programs read")
    if not chosen.gpu and shapes.vocabulary >= LARGE_VOCABULARY:
        # A trimmed vocabulary, if that at least halves a step.
        whole, kept = sum(operations(chosen.config, shapes)), 2 ** int(math.log2(MAP_SHARE * shapes.vocabulary))
        chosen.set("heads.token_map_size", kept)
        share = sum(operations(chosen.config, shapes)) / whole
        words = f"of {shapes.vocabulary:,}, the answers' most frequent tokens, then the tokenizer's first"
        words = f"{words}: {share:.0%} of the operations per step; null for all"
        chosen.set("heads.token_map_size", kept if share <= 0.5 else None, words if share <= 0.5 else "all tokens")


def _fit(chosen: FirstConfig) -> None:
    """Choose optimiser, dtype and quantisation so that one row fits the device."""
    chosen.set("optimisation.optimizer", "adamw", "its state in 32 bits fits")
    if chosen.paper and chosen.quantises:
        chosen.set("optimisation.optimizer", "adamw_8bit", "as in the paper (B.2)")
    chosen.set("optimisation.batch_size", 1)
    chosen.set("optimisation.micro_batch_size", 1)
    remedies: list[tuple[str, Any, str]] = [("heads.shared_projection", True, "own projections would not fit")]
    if not chosen.gpu:
        remedies.append(("model.dtype", "bfloat16", "weights in float32 would not fit"))
    if chosen.quantises and chosen.shapes.stored is None and not chosen.distills:
        remedies.append(("model.quantization", "4bit", "16-bit weights would not fit; serve it the same way"))
    for key, value, why in remedies:
        if not chosen.fits and chosen.get(key) != value:
            chosen.set(key, value, why)
    if not chosen.fits:
        advice = "; --recipe paper with bitsandbytes installed holds it in 4 bits" if chosen.gpu else ""
        raise ValueError(
            f"MODEL: expected one that can be trained in {ROOM:.0%} of the {size(chosen.free or 0)} that "
            f"{device_name(chosen.device)} has free, got about {size(chosen.bytes)}{advice}"
        )
    if chosen.distills and chosen.free is not None:
        shapes, kind = chosen.shapes, DTYPES[chosen.get("model.dtype")]
        text = 2 * shapes.layers * shapes.kv * kind.itemsize * chosen.get("data.length")
        room = ROOM * chosen.free - memory(chosen.config, shapes)["backbone"]
        if chosen.get("generation.batch_size") * text > room:
            chosen.set("generation.batch_size", max(1, int(room // text)), "as many answers as fit at once")


def _steps(chosen: FirstConfig, found: _Data, tokens: float, learnt: float) -> int:
    """Choose rates, batch, micro-batch, epochs and the held-out share; return the rows.

    `tokens` are those of a record on average, `learnt` the share of them to learn.
    """
    room = FILL * chosen.get("data.length")
    share = round(min(0.1, max(0.02, 100 / found.records)), 3)
    rows = max(1, round(found.records * (1 - share) * tokens / room))
    epochs, batch, why = 2, 64, "rows per step, as in the paper (B.3)"
    if not chosen.paper:
        # A power of two, so that micro-batches divide it.
        least = 2 ** max(0, round(math.log2(POSITIONS / (room * learnt))))
        batch = max(least, 64) if chosen.gpu else least
        while batch > least and rows * epochs / batch < STEPS:
            batch //= 2
        if rows * epochs / batch < STEPS:
            epochs = min(10, -(-STEPS * batch // rows))
        faster = "; small steps teach faster" if batch < 64 else ""
        why = f"rows per step, with about {round(room * learnt * batch):,} tokens to learn{faster}"
        chosen.set("optimisation.warmup_share", 0.3, "one cycle: the rate rises, then falls to 0")
        if not chosen.gpu:
            chosen.set("optimisation.learning_rate", 3e-3, "peak; that of the demo's recipe, for small models")
            chosen.set("optimisation.heads_factor", 1.0)
    steps, more = math.ceil(rows / batch) * epochs, "" if found.complete else "at least "
    chosen.set("optimisation.epochs", epochs, f"with batch_size {batch}: {more}about {steps} steps of {rows} rows")
    chosen.set("optimisation.batch_size", batch, why)
    micro = min(batch, 64 if chosen.gpu else 16)
    chosen.set("optimisation.micro_batch_size", micro)
    while micro > 1 and not chosen.fits:
        micro //= 2
        chosen.set("optimisation.micro_batch_size", micro)
    free = "" if chosen.free is None else f" of {size(chosen.free)} free"
    chosen.set("optimisation.micro_batch_size", micro, f"rows at a time: about {size(chosen.bytes)}{free} (estimated)")
    chosen.set("data.held_out_share", share, f"about {max(1, round(found.records * share)):,} records to measure on")
    return rows


def model_name(model: str) -> str:
    """Return a name for files and folders of a model: the last part of its path or hub id."""
    name = Path(model).expanduser().resolve().name.lower().removesuffix(".gguf")
    return re.sub(r"[^a-z0-9.-]+", "-", name).strip("-.") or "model"
