"""Write a first config that fits a model, its data and the device: `medusa train --init MODEL DATA`.

Only the model's configs and tokenizer are read, not its weights, and of the data at most `RECORDS` records. Every
choice has a reason, which the file repeats as a comment.

By default the heads learn what the model itself answers, because that is what they have to predict.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import random
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import yaml  # type: ignore[import-untyped]

from medusa_decoding.checkpoints import pretrained
from medusa_decoding.decode.runtime.memory import available, size
from medusa_decoding.training.config import Config, GenerationConfig, SourceConfig
from medusa_decoding.training.data.encoding import ChatEncoder
from medusa_decoding.training.data.records import NO_ANSWER, Record, interpret, parse_record
from medusa_decoding.training.data.sources import BadRecordError, raw_records
from medusa_decoding.training.distill.seeds import Seed
from medusa_decoding.training.loop.backbone import DTYPES
from medusa_decoding.training.loop.estimate import device_name, memory, operations, shapes_of

RECORDS, SAMPLE = 20_000, 300
"""Records that are read at most, and of these the ones that are tokenized."""
Recipe = Literal["own-answers", "given-answers", "paper"]
"""Whose answers the heads learn; "paper": the given ones, with the settings of the paper's appendix B."""
POSITIONS = 512
"""Positions to learn from in a step. Many small steps taught the demo's heads more than few large ones."""
STEPS = 600
"""Steps that a run should have at least, so that heads learn enough."""
TURNS = GenerationConfig().turns
"""Questions of a conversation that are answered."""
ROOM = 0.8
"""Share of the free memory that a run may take by its estimate."""
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096)
LARGE_VOCABULARY, MAP_SHARE = 16_384, 1 / 6
"""Tokens of a vocabulary that may be trimmed, and the share of them that is left (down to a power of two)."""
TEXT_PROMPT = 128
"""Tokens of a text, at most, that a model goes on with."""
CACHE = 8 * 2**30
"""Bytes of hidden states that may be cached on disk."""


@dataclass(frozen=True)
class Choice:
    """A setting, its value and why it has that value."""

    key: str
    value: Any
    why: str = ""


@dataclass
class FirstConfig:
    """A config as chosen: what was found (a line each), all settings in the file's order, and what it is for.

    `distills` says whether `medusa distill` writes the answers.
    """

    facts: list[str]
    choices: list[Choice]
    distills: bool
    title: str

    @property
    def config(self) -> Config:
        """The settings; raises `ValueError` if they exclude each other."""
        return Config.of(_nested(self.choices))

    def to_yaml(self, commands: Sequence[str]) -> str:
        """Return the file: the settings with their reasons, and in its first lines the commands to run with it."""
        lines = [f"# {_in_a_line(self.title)}", "#", *(f"#   {_in_a_line(command)}" for command in commands), "#"]
        lines.append(
            "# Settings that are not here have their defaults, most of them the paper's: medusa train --settings"
        )
        section = ""
        for choice in self.choices:
            first, _, name = choice.key.rpartition(".")
            if first and first != section:
                section = first
                lines.append(f"{section}:")
            indent, value = "  " if first else "", choice.value
            if isinstance(value, list):
                lines += [f"{indent}{name}:", *(f"{indent}  - {_written(entry)}" for entry in value)]
            else:
                why = f"    # {choice.why}" if choice.why else ""
                lines.append(f"{indent}{name}: {_written(value)}{why}")
        return "\n".join(lines) + "\n"


def _in_a_line(text: str) -> str:
    """Return a text for a comment: a file's name may have line breaks, and characters that YAML refuses."""
    return " ".join("".join(one if one.isprintable() else " " for one in text).split())


def _written(value: Any) -> str:
    """Return a value as YAML in one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")


@dataclass
class _Data:
    """What was found in the data; `several` counts records with several questions, `sample` has some of the records."""

    path: str
    records: int = 0
    complete: bool = True
    bad: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    unanswered: int = 0
    several: int = 0
    sample: list[Record] = field(default_factory=list)


def first_config(model: str, data: str, device: torch.device, recipe: Recipe = "own-answers") -> FirstConfig:
    """Choose the settings of a first run.

    Args:
        model: folder or hub id of the base model.
        data: file, folder or hub name, as for training.
        device: to train on.
        recipe: what the heads learn, and how.

    Raises:
        ValueError: no such model or data, no record that can be used, or a model that does not fit the device.
    """
    settings = pretrained.load_config(model, argument="MODEL")
    tokenizer = pretrained.load_tokenizer(model, argument="MODEL")
    distills = recipe == "own-answers"
    found = _look_at(data, distills)
    values = _Values(device, settings, recipe)
    values.add("method", "medusa-1", "trains heads alone: the model and its texts stay as they are")
    values.add("model.name", _given(model))
    encoder = _template(values, model, tokenizer, found)
    lengths, learnt = _lengths(values, encoder, found)
    _answers(values, model, found)
    _heads(values)
    _fit(values)
    _steps(values, found, lengths, learnt)
    folder = _new_folder(Path("runs") / model_name(model))
    values.add("output.folder", str(folder))
    _cache(values, found, lengths)
    if importlib.util.find_spec("tensorboard") is None:
        values.add("output.trackers", [], "tensorboard is not installed")
    title = f"Medusa heads for {Path(model).name} from {Path(data).name}, fitted to {device_name(device)}."
    return FirstConfig(_facts(model, values, found, lengths), values.ordered(), distills, title)


# -- what there is -----------------------------------------------------------------------------------------------------


def _look_at(path: str, distills: bool) -> _Data:
    found, rng = _Data(_given(path)), random.Random(0)
    for where, raw in raw_records(SourceConfig(path), partly=True):
        if found.records + found.bad.total() == RECORDS:
            found.complete = False
            break
        try:
            record, kind = parse_record(raw, where, seeds=True), interpret(raw).kind
            found.unanswered += (learnt := _learnt(raw, where)) is None
        except BadRecordError as error:
            found.bad[str(error)] += 1
            continue
        found.records += 1
        found.kinds[kind] += 1
        if not distills:
            if learnt is None:
                continue
            record = learnt
        found.several += sum(turn["role"] == "user" for turn in record.messages) > 1
        # Each record is in the sample with the same probability.
        place = len(found.sample) if len(found.sample) < SAMPLE else rng.randrange(found.records)
        found.sample[place : place + 1] = [record] if place < SAMPLE else []
    if found.records == 0:
        reasons = "; ".join(f"{count} x {reason}" for reason, count in found.bad.most_common(3)) or "an empty file"
        raise ValueError(f"DATA: expected records (docs/data.md shows a line of each kind), got {reasons} in {path}")
    return found


def _learnt(raw: Any, where: str) -> Record | None:
    """Return a good record as training takes it, or None if it has no answer to learn."""
    try:
        return parse_record(raw, where)
    except BadRecordError as error:
        if str(error) != NO_ANSWER:
            raise
        return None


def _given(name: str) -> str:
    """Return a file's or folder's path in full, so that it is found from any folder; a hub name as it is.

    What a run writes (`output.folder`, `data.cache_hidden`) is relative to the folder that the run starts in.
    """
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() else name


def _facts(model: str, values: _Values, found: _Data, lengths: list[int]) -> list[str]:
    shapes = values.shapes
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in found.kinds.most_common())
    more = "" if found.complete else f" (only the first {RECORDS:,} were read)"
    what = f"; {found.unanswered:,} without an answer" if values.distills else ""
    middle, long = lengths[len(lengths) // 2], _quantile(lengths, 0.95)
    free = "unknown memory" if values.free is None else f"{size(values.free)} of memory free"
    return [
        f"model: {Path(model).name}, {(shapes.linear + shapes.other) / 1e6:,.0f} M weights, hidden size "
        f"{shapes.hidden}, {shapes.vocabulary:,} tokens, {'quantised on disk' if shapes.stored else 'not quantised'}",
        f"data: {kinds}{more}{what}; half of them have up to {middle} tokens, 95 % up to {long} (with answers)",
        f"device: {device_name(values.device)}, {free}",
    ]


# -- choices -----------------------------------------------------------------------------------------------------------


class _Values:
    """The choices so far, and the estimate of a run with them."""

    def __init__(self, device: torch.device, settings: Any, recipe: Recipe) -> None:
        self.device, self.settings, self.recipe = device, settings, recipe
        self.distills, self.paper = recipe == "own-answers", recipe == "paper"
        self.gpu = device.type == "cuda"
        self.quantises = self.gpu and importlib.util.find_spec("bitsandbytes") is not None
        self.free = available(device)
        self.choices: dict[str, Choice] = {}

    def add(self, key: str, value: Any, why: str = "") -> None:
        self.choices[key] = Choice(key, value, why)

    def get(self, key: str) -> Any:
        return self.choices[key].value

    @property
    def config(self) -> Config:
        needed = [Choice("data.train", [{"path": "-"}]), Choice("output.folder", "-")]
        return Config.of(_nested([*needed, *self.choices.values()]))

    @property
    def shapes(self) -> Any:
        return shapes_of(self.config)

    @property
    def bytes(self) -> int:
        return sum(memory(self.config, self.shapes).values())

    @property
    def fits(self) -> bool:
        return self.free is None or self.bytes <= ROOM * self.free

    def ordered(self) -> list[Choice]:
        sections = ["method", "model", "data", "heads", "loss", "generation", "optimisation", "output"]
        return sorted(self.choices.values(), key=lambda choice: sections.index(choice.key.split(".")[0]))


def _nested(choices: list[Choice]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for choice in choices:
        section, _, name = choice.key.partition(".")
        if name:
            found.setdefault(section, {})[name] = choice.value
        else:
            found[section] = choice.value
    return found


def _template(values: _Values, model: str, tokenizer: Any, found: _Data) -> ChatEncoder:
    """Choose how conversations become text; return the encoder of these settings."""
    values.add("data.train", [{"path": found.path}])
    template, arguments = "auto", {}
    if tokenizer.chat_template:
        if "enable_thinking" in str(tokenizer.chat_template):
            arguments = {"enable_thinking": False}
            values.add("data.template_arguments", arguments, "answers without a block of thought")
    elif set(found.kinds) != {"text"} and "vicuna" in Path(model).name.lower():
        template = "vicuna"
        values.add("data.template", template, "the tokenizer has no chat template; this is the model's own format")
    elif found.several:
        template = "plain"
        values.add("data.template", template, "the tokenizer has no chat template, and there are several turns")
    encoder = ChatEncoder(tokenizer, template, arguments=arguments)
    try:
        list((_asked if values.distills else _encoded)(encoder, found.sample))
    except ValueError:
        encoder = ChatEncoder(tokenizer, template, turns="each", arguments=arguments)
        values.add("data.turns", "each", "the template renders an answer differently once other turns follow")
    return encoder


def _encoded(encoder: ChatEncoder, sample: list[Record]) -> Iterator[tuple[int, int]]:
    """Yield how many tokens the examples of a sample have, and how many of these are learnt."""
    for record in sample:
        with contextlib.suppress(BadRecordError):
            yield from ((len(example.ids), int(example.learnt.sum())) for example in encoder.encode(record))


def _asked(encoder: ChatEncoder, sample: list[Record]) -> Iterator[tuple[int, int]]:
    """Yield how many tokens the questions of each record have that a model answers, and how many questions they are.

    Raises:
        ValueError: as `Seed`.
    """
    for record in sample:
        with contextlib.suppress(BadRecordError):
            seed = Seed(0, record, encoder, GenerationConfig(prompt_tokens=TEXT_PROMPT), sys.maxsize)
            first, *more = [turn["content"] for turn in record.messages if turn["role"] == "user"][:TURNS] or [""]
            tokens = [len(encoder.tokenizer(question, verbose=False)["input_ids"]) for question in more]
            yield len(seed.prompt) + sum(tokens), seed.turns


def _lengths(values: _Values, encoder: ChatEncoder, found: _Data) -> tuple[list[int], float]:
    """Choose the length of a row; return the sampled lengths in order, and which share of their tokens is learnt.

    A row holds the longest answers that a model may write; they are taken to be half as long on average.
    """
    limit = int(getattr(values.settings, "max_position_embeddings", 4096) or 4096)
    most = min(4096 if values.gpu else 1024, limit)
    new_tokens = min(512, limit // 2)
    if values.distills:
        sizes = [(asked + turns * new_tokens, turns * new_tokens) for asked, turns in _asked(encoder, found.sample)]
    else:
        sizes = list(_encoded(encoder, found.sample))
    if not sizes:
        raise ValueError(f"DATA: expected records to learn that the chat template takes, got none in {found.path}")
    lengths = sorted(size for size, _ in sizes)
    wanted = _quantile(lengths, 0.95)
    length = next((step for step in LENGTHS if step >= wanted and step <= most), most)
    cut = sum(one > length for one in lengths) / len(lengths)
    why = "holds 95 % of the records" if wanted <= length else f"as long as fits this device; {cut:.0%} are longer"
    values.add("data.length", length, why)
    if values.distills:
        values.add("generation.max_new_tokens", new_tokens, "most tokens per answer; few answers should be cut")
        values.add("generation.batch_size", 16 if values.gpu else 32, "answers written at once")
        if found.kinds["text"]:
            values.add("generation.prompt_tokens", max(16, min(TEXT_PROMPT, length - new_tokens)))
        sizes = [(size - new // 2, new // 2) for size, new in sizes]  # most answers end earlier
        lengths = sorted(size for size, _ in sizes)
    return lengths, sum(new for _, new in sizes) / sum(size for size, _ in sizes)


def _answers(values: _Values, model: str, found: _Data) -> None:
    """Say whose answers the heads learn, and how the model samples its own."""
    if not values.distills:
        values.add("data.answers", "given", "learns the answers of the data, as --recipe says")
        return
    answered = found.records - found.unanswered - found.kinds["text"]
    why = f"the {answered:,} given ones are dropped, --recipe given-answers learns them" if answered else ""
    values.add("data.answers", "own", f"`medusa distill`: heads learn what the model writes; {why}".rstrip("; "))
    if found.several:
        values.add("generation.turns", TURNS, "questions of a conversation, each after the model's own earlier answers")
    own = pretrained.read_generation_config(model, argument="MODEL")
    names = ("temperature", "top_p", "top_k", "min_p")
    drawn = ", ".join(f"{name} {own[name]}" for name in names if own.get(name) is not None)
    if not own.get("do_sample"):
        drawn = "greedy (no do_sample" + (f"; {drawn} not used)" if drawn else ")")
    else:
        values.add("loss.targets", "kl", "learns what the model could have answered, not only the one draw")
    drawn = drawn or "temperature 1"
    why = f"the model's own generation_config: {drawn}; name it if you serve otherwise"
    values.add("generation.temperature", None, why)


def _heads(values: _Values) -> None:
    as_paper = values.gpu or values.paper
    count = min(5 if as_paper else 4, values.get("data.length") - 2)
    values.add("heads.num_heads", count, "as in the paper" if as_paper else "as in the CPU recipes")
    if not values.gpu:
        values.add("model.dtype", "float32", "fastest and exact on most CPUs")
    elif torch.cuda.is_bf16_supported():
        values.add("model.dtype", "bfloat16", "this GPU computes in it")
    else:
        values.add("model.dtype", "float32", "this GPU has no bfloat16, and float16 cannot be trained in")
    values.add("model.quantization", "none", "the heads learn from the model as it is served")
    values.add("heads.shared_projection", False)
    shapes = values.shapes
    if values.paper and values.quantises and shapes.stored is None:
        values.add("model.quantization", "4bit", "as in the paper (B.3); serve it the same way")
    if values.paper:
        share = shapes.own / (shapes.linear + shapes.other)
        words = f"own projections as in the paper, {share:.0%} of the model's size"
        values.add("heads.shared_projection", False, words)
    else:
        values.add("heads.shared_projection", True, "learns more from little data than own projections, and reads less")
        values.add("heads.num_layers", 2, "a second block costs little and gains most")
        rank = min(256, shapes.hidden // 2)
        values.add("heads.root_rank", rank, "drafts see the root token; 0 for heads that other programs read")
        values.add("heads.parent_rank", 64, "drafts see the token before them; 0 for heads that other programs read")
    if not as_paper:
        _trim(values)


def _trim(values: _Values) -> None:
    """Trim a large vocabulary if that at least halves a step."""
    shapes = values.shapes
    if shapes.vocabulary < LARGE_VOCABULARY:
        return
    whole = sum(operations(values.config, shapes))
    key, kept = "heads.token_map_size", 2 ** int(math.log2(MAP_SHARE * shapes.vocabulary))
    values.add(key, kept)
    share = sum(operations(values.config, shapes)) / whole
    if share > 0.5:
        del values.choices[key]
        return
    words = "the answers' most frequent tokens, then the tokenizer's first"
    values.add(key, kept, f"of {shapes.vocabulary:,}, {words}: {share:.0%} of the operations per step; null for all")


def _fit(values: _Values) -> None:
    """Choose optimiser, dtype and quantisation so that one row fits the device.

    Raises:
        ValueError: nothing fits.
    """
    values.add("optimisation.optimizer", "adamw", "its state in 32 bits fits")
    if values.paper and values.quantises:
        values.add("optimisation.optimizer", "adamw_8bit", "as in the paper (B.2)")
    values.add("optimisation.batch_size", 1)
    values.add("optimisation.micro_batch_size", 1)
    remedies: list[tuple[str, Any, str]] = [("heads.shared_projection", True, "own projections would not fit")]
    if not values.gpu:
        remedies.append(("model.dtype", "bfloat16", "weights in float32 would not fit"))
    if values.quantises and values.shapes.stored is None and not values.distills:
        remedies.append(("model.quantization", "4bit", "16-bit weights would not fit; serve it the same way"))
    for key, value, why in remedies:
        if not values.fits and values.get(key) != value:
            values.add(key, value, why)
    if not values.fits:
        advice = "; --recipe paper with bitsandbytes installed holds it in 4 bits" if values.gpu else ""
        raise ValueError(
            f"MODEL: expected one that can be trained in {ROOM:.0%} of the {size(values.free or 0)} that "
            f"{device_name(values.device)} has free, got about {size(values.bytes)}{advice}"
        )


def _steps(values: _Values, found: _Data, lengths: list[int], learnt: float) -> None:
    """Choose rates, batch, micro-batch, epochs and the held-out share."""
    records, length = found.records, values.get("data.length")
    share = round(min(0.1, max(0.02, 100 / records)), 3)
    kept = sum(min(one, length) for one in lengths) / len(lengths)
    rows = max(1, round(records * (1 - share) * kept / length / 0.95))
    epochs, batch, why = 2, 64, "rows per step, as in the paper (B.3)"
    if not values.paper:
        # A power of two, so that micro-batches divide it.
        least = 2 ** max(0, round(math.log2(POSITIONS / (0.95 * length * learnt))))
        batch = max(least, 64) if values.gpu else least
        while batch > least and rows * epochs / batch < STEPS:
            batch //= 2
        if rows * epochs / batch < STEPS:
            epochs = min(10, -(-STEPS * batch // rows))
        positions = round(0.95 * length * learnt * batch)
        faster = "; small steps teach faster" if batch < 64 else ""
        why = f"rows per step, with about {positions:,} tokens to learn{faster}"
        values.add("optimisation.warmup_share", 0.3, "one cycle: the rate rises, then falls to 0")
        if not values.gpu:
            values.add("optimisation.learning_rate", 3e-3, "peak; that of the demo's recipe, for small models")
            values.add("optimisation.heads_factor", 1.0)
    steps = math.ceil(rows / batch) * epochs
    more = "" if found.complete else "at least "
    values.add("optimisation.epochs", epochs, f"with batch_size {batch}: {more}about {steps} steps of {rows} rows")
    values.add("optimisation.batch_size", batch, why)
    micro = 1
    while micro * 2 <= min(batch, 64 if values.gpu else 16):
        values.add("optimisation.micro_batch_size", micro * 2)
        if not values.fits:
            break
        micro *= 2
    values.add("optimisation.micro_batch_size", micro)
    free = "" if values.free is None else f" of {size(values.free)} free"
    values.add("optimisation.micro_batch_size", micro, f"rows at a time: about {size(values.bytes)}{free} (estimated)")
    values.add("data.held_out_share", share, f"about {max(1, round(records * share)):,} records to measure on")


def _cache(values: _Values, found: _Data, lengths: list[int]) -> None:
    """On a CPU, keep the frozen model's states for later epochs if they take little space."""
    config = values.config
    rows = found.records * sum(min(one, config.data.length) for one in lengths) / len(lengths) / config.data.length
    needed = int(rows / 0.9 * config.data.length * values.shapes.hidden * DTYPES[config.model.dtype].itemsize)
    room = min(CACHE, shutil.disk_usage(".").free // 4)
    if not values.gpu and found.complete and needed < room:
        words = f"later epochs read the model's states from disk (about {size(needed)}); remove it afterwards"
        values.add("data.cache_hidden", str(Path(config.output.folder) / "states"), words)


def _quantile(ordered: list[int], share: float) -> int:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def model_name(model: str) -> str:
    """Return a name for files and folders of a model: the last part of its path or hub id."""
    name = Path(model).expanduser().resolve().name.lower().removesuffix(".gguf")
    return re.sub(r"[^a-z0-9.-]+", "-", name).strip("-.") or "model"


def _new_folder(folder: Path) -> Path:
    number, found = 2, folder
    while found.exists():
        found, number = folder.with_name(f"{folder.name}-{number}"), number + 1
    return found
