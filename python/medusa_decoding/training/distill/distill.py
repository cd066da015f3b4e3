"""Have a model write its own training data from seed prompts (Medusa paper, section 2.3.2).

The random numbers of an answer depend only on the setting `seed`, the seed's number and the turn. So neither the batch
nor an interruption changes a record: a continued run repeats the batch that was under way, and the file is the same to
the byte. (Rounding depends on the other rows of a batch and, with heads, on the tree of each step. In 16 bits it can
decide a token.)
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from medusa_decoding.checks import token_list
from medusa_decoding.files import only_writer
from medusa_decoding.generation import settings as decoding
from medusa_decoding.generation.inputs import split_prompts
from medusa_decoding.generation.request import Request
from medusa_decoding.model import MedusaModel
from medusa_decoding.provenance import fingerprint
from medusa_decoding.training.config import GenerationConfig
from medusa_decoding.training.data.encoding import ChatEncoder
from medusa_decoding.training.data.records import EXAMPLES, Record
from medusa_decoding.training.data.sources import BadRecordError
from medusa_decoding.training.distill.record_file import RecordFile
from medusa_decoding.training.distill.seeds import Seed
from medusa_decoding.trees.tree import Tree

WINDOW = 32
"""How many batches of seeds are sorted at a time, so that a batch has prompts of similar length."""


@dataclass
class GenerationReport:
    """Counts of what has been generated.

    Attributes:
        left_out: seeds without a record, by reason; `examples` has the first of these as (where, reason).
        answered: seeds whose records are all in the file.
        before: how many of the records earlier runs wrote.
        cut: answers without an end token, cut off by `max_new_tokens` or the length.
        ended: records of seeds with unanswered turns, by reason.
        tokens: learnt tokens in the records, all written by the model.
        new_tokens, steps, seconds: of this run; decode steps are counted per row.
    """

    seeds: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    examples: list[tuple[str, str]] = field(default_factory=list)
    answered: int = 0
    records: int = 0
    before: int = 0
    answers: int = 0
    cut: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    _stepped: int = 0

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens per step of this run without those of prefills; None if there was no step."""
        return self._stepped / self.steps if self.steps else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of this run; None if it wrote none."""
        return self.new_tokens / self.seconds if self.new_tokens else None

    def as_json(self) -> dict[str, Any]:
        """Return all figures by name."""
        found = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        return found | {"tokens_per_step": self.tokens_per_step, "tokens_per_second": self.tokens_per_second}

    def __str__(self) -> str:
        earlier = f", {self.before} of them written before" if self.before else ""
        lines = [f"{self.records} records of {self.seeds} seeds{earlier}: {self.answers} answers, {self.tokens} tokens"]
        if self.new_tokens:
            per_step = f"{self.tokens_per_step:.2f} tokens per step, " if self.steps else ""
            lines.append(
                f"{self.new_tokens} tokens in {self.seconds:.1f} s: {per_step}{self.tokens_per_second:.1f} tokens/s"
            )
        if self.cut:
            lines.append(f"{self.cut} answers cut off (no end token)")
        lines += [f"ended early: {count} x {reason}" for reason, count in self.ended.most_common()]
        lines += [f"left out: {count} x {reason}" for reason, count in self.left_out.most_common()]
        return "\n".join(lines + [f"  {where}: {reason}" for where, reason in self.examples])

    def reject(self, where: str, reason: str) -> None:
        """Count a seed without a record."""
        self.left_out[reason] += 1
        if len(self.examples) < EXAMPLES:
            self.examples.append((where, reason))

    def add(self, record: Mapping[str, Any]) -> None:
        """Count a record."""
        self.records += 1
        self.answered += record["seed"]["part"] == record["seed"]["parts"]
        self.answers += len(record["learnt"])
        self.cut += record["cut"]
        self.tokens += sum(end - start for start, end in record["learnt"])
        if record["ended"] is not None:
            self.ended[record["ended"]] += 1


def generate_records(
    model: MedusaModel,
    tokenizer: PreTrainedTokenizerBase,
    seeds: Iterable[Record],
    settings: GenerationConfig,
    out: Path,
    *,
    template: str = "auto",
    turns: str = "joint",
    arguments: Mapping[str, Any] | None = None,
    length: int | None = None,
    resume: bool = False,
    asked: Any = None,
    progress: Callable[[GenerationReport], None] | None = None,
) -> GenerationReport:
    """Have a model answer the user turns of seeds, and write one record per answered seed.

    Tokens are drawn from the model's distribution at the temperature, top_p, top_k and min_p of the settings. Those
    that are None, and all other settings, are the model's own generation config's. An answer ends with one of that
    config's end tokens or the template's.

    Seeds are conversations, whose answers are dropped, and texts, whose first tokens are continued. With `turns="each"`
    there is one record per answer, with prompts that are rendered anew. A record has at most `length` tokens (None: the
    model's context). `asked` is kept with the report, for `record_file.finished`; `progress` is called with the report
    so far after each batch of answers. See `ChatEncoder` for the template and its arguments.

    Returns:
        The final report, which is also written next to the file.

    Raises:
        ValueError: no template, limits of sampling for greedy answers, or seeds of several turns with a template that
            does not keep earlier answers; existing records of other settings, another model, other heads or other
            seeds; a file that another process writes.
        OSError: the file could not be written.
        FloatingPointError, MemoryError: as `MedusaModel.generate`.
    """
    limit = model.backbone.context_limit if length is None else min(length, model.backbone.context_limit)
    encoder = ChatEncoder(tokenizer, template, turns=turns, arguments=arguments, vocab_size=model.backbone.vocab_size)
    ends = token_list(model.backbone.causal_lm.generation_config.eos_token_id)
    if encoder.end_of_turn is not None and encoder.end_of_turn not in ends:
        ends.append(encoder.end_of_turn)
    config = _decoding(model, settings, ends)
    with only_writer("out", out):
        file = RecordFile(out, _settings(model, encoder, settings, limit, config), resume)
        report = GenerationReport()
        for written in file.earlier:
            report.add(written)
        report.before = report.records
        if progress is not None:
            progress(report)
        for batch in _batches(_encoded(seeds, encoder, settings, limit, report), settings.batch_size):
            if all([file.has(seed.number, seed.digest) for seed in batch]):
                continue
            while live := [seed for seed in batch if seed.prompt]:
                for seed, answer in zip(live, _answers(model, config, live, settings, report), strict=True):
                    seed.take(answer, ends)
                if progress is not None:
                    progress(report)
            for record in file.append([line for seed in batch for line in seed.lines()]):
                report.add(record)
            if progress is not None:
                progress(report)
        file.finish(report.as_json(), asked)
        return report


def _encoded(
    seeds: Iterable[Record], encoder: ChatEncoder, settings: GenerationConfig, limit: int, report: GenerationReport
) -> Iterator[Seed]:
    for number, record in enumerate(seeds):
        report.seeds += 1
        try:
            yield Seed(number, record, encoder, settings, limit)
        except BadRecordError as error:
            report.reject(record.where, str(error))


def _batches(seeds: Iterator[Seed], size: int) -> Iterator[list[Seed]]:
    while window := list(itertools.islice(seeds, WINDOW * size)):
        window.sort(key=lambda seed: (seed.turns, len(seed.prompt), seed.number))
        for start in range(0, len(window), size):
            yield window[start : start + size]


def _decoding(model: MedusaModel, settings: GenerationConfig, ends: Collection[int]) -> Any:
    own = model.backbone.causal_lm.generation_config
    samples = bool(own.do_sample) if settings.temperature is None else settings.temperature > 0
    limits = {name: getattr(settings, name) for name in ("top_p", "top_k", "min_p")}
    for name, value in limits.items():
        if value is not None and not samples:
            why = "the model's generation config" if settings.temperature is None else "generation.temperature 0"
            raise ValueError(f"generation.{name}: expected null with greedy answers ({why}), got {value}")
    drawn = {"temperature": settings.temperature, **limits} if samples else {}
    config = decoding.merge_configs(own, None, {"do_sample": samples, "eos_token_id": list(ends), **drawn})
    config.max_length = config.max_new_tokens = None  # each row has its own
    config.num_return_sequences = 1
    return config


def _answers(
    model: MedusaModel, config: Any, seeds: Sequence[Seed], settings: GenerationConfig, report: GenerationReport
) -> list[list[int]]:
    """Return the tokens with which the model answers each seed's prompt."""
    lengths = [len(seed.prompt) for seed in seeds]
    width = max(lengths)
    ids = torch.tensor([[0] * (width - len(seed.prompt)) + seed.prompt for seed in seeds])
    mask = torch.tensor([[0] * (width - length) + [1] * length for length in lengths])
    prompts = split_prompts(ids, mask, model.backbone.vocab_size)
    limits = decoding.limits_from_config(config, lengths, width, model.backbone.context_limit)
    budgets = [min(settings.max_new_tokens, seed.room) for seed in seeds]
    names = (f"{settings.seed} {seed.number} {seed.answered}".encode() for seed in seeds)
    numbers = [int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") for name in names]
    request = Request(ids, prompts, config, dataclasses.replace(limits, budgets=budgets), seed=numbers)
    start = time.perf_counter()
    output = model.run(request)
    new = [row[width : width + count].tolist() for row, count in zip(output.sequences, output.new_tokens, strict=True)]
    report.seconds += time.perf_counter() - start
    report.new_tokens += sum(output.new_tokens)
    report.steps += output.steps
    report._stepped += sum(output.new_tokens) - len(new)
    return new


def _settings(
    model: MedusaModel, encoder: ChatEncoder, settings: GenerationConfig, limit: int, config: Any
) -> dict[str, Any]:
    """Return everything that decides what is written, as JSON."""
    told = dataclasses.asdict(settings).items()
    given = {f"generation.{name}": value for name, value in told if name not in ("heads", "quantized")}
    stated = {
        name: value
        for name, value in config.to_diff_dict().items()
        if not name.startswith("_") and name != "transformers_version"
    }
    tree: Any = model.tree
    if isinstance(tree, Tree):
        # Static trees without a copied branch are identified by their choices alone, as in older files.
        tree = (tree.choices, tree.lookup, tree.keep) if tree.lookup or tree.keep else tree.choices
    return given | {
        "model": fingerprint(model.backbone.causal_lm),
        "heads": None if model.heads is None else fingerprint(model.heads),
        "tree": hashlib.blake2b(repr(tree).encode(), digest_size=8).hexdigest(),
        "tokenizer": encoder.fingerprint,
        "length": limit,
        "decoding": stated,
        **encoder.settings,
    }
