"""Have a model write its own training data from seed prompts (Medusa paper, section 2.3.2).

Answers run in the engine of `medusa serve` (`serving.answers`), or at a server (`endpoint`): a seed's next prompt, or
the next seed, starts as soon as an answer ends. The random numbers of an answer depend only on the setting `seed`, the
seed's number and the turn. So neither the batch nor an interruption changes a record, and a finished file, which is in
the order of the seeds, is the same to the byte. (Rounding depends on the other rows of a batch and, with heads, on the
tree of each step. In 16 bits it can decide a token.)
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import itertools
import operator
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

from medusa_decoding.checks import token_list
from medusa_decoding.generation import settings as decoding
from medusa_decoding.model import MedusaModel
from medusa_decoding.provenance import fingerprint
from medusa_decoding.serving.answers import Answer, Answers
from medusa_decoding.training.config import GenerationConfig
from medusa_decoding.training.data.answer_states import AnswerStates
from medusa_decoding.training.data.encoding import ChatEncoder
from medusa_decoding.training.data.records import EXAMPLES, Record
from medusa_decoding.training.data.sources import BadRecordError
from medusa_decoding.training.distill.endpoint import Endpoint, ServedAnswers
from medusa_decoding.training.distill.record_file import states_file
from medusa_decoding.training.distill.seeds import Seed
from medusa_decoding.training.distill.shards import Shards
from medusa_decoding.trees.tree import Tree

LIMITS = ("top_p", "top_k", "min_p")
"""Settings that leave tokens out of sampling."""


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
        exact, encoded: answers of this run with the generated tokens, and with the tokens of their text.
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
    exact: int = 0
    encoded: int = 0
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

    @classmethod
    def total(cls, reports: Sequence[GenerationReport]) -> GenerationReport:
        """Return the report of several processes that have run side by side."""
        added = {name: reduce(operator.add, (vars(one)[name] for one in reports)) for name in vars(reports[0])}
        seconds = max(one.seconds for one in reports)
        return cls(**added | {"examples": added["examples"][:EXAMPLES], "seconds": seconds})

    def __str__(self) -> str:
        earlier = f", {self.before} of them written before" if self.before else ""
        lines = [f"{self.records} records of {self.seeds} seeds{earlier}: {self.answers} answers, {self.tokens} tokens"]
        if self.new_tokens:
            per_step = f"{self.tokens_per_step:.2f} tokens per step, " if self.steps else ""
            lines.append(
                f"{self.new_tokens} tokens in {self.seconds:.1f} s: {per_step}{self.tokens_per_second:.1f} tokens/s"
            )
        if self.encoded:
            lines.append(f"{self.encoded} answers with the tokens of their text, {self.exact} with the generated ones")
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
    how: Distillation,
    seeds: Iterable[Record],
    out: Path,
    *,
    resume: bool = False,
    asked: Any = None,
    save_states: bool = False,
    shards: Shards | None = None,
    progress: Callable[[GenerationReport], None] | None = None,
) -> GenerationReport:
    """Have a model answer the user turns of seeds, and write one record per answered seed.

    Seeds are conversations, whose answers are dropped, and texts, whose first tokens are continued. With
    `turns="each"` there is one record per answer. With `save_states`, the states from which a model without heads
    predicted its answers are kept in `AnswerStates`. `asked` is kept with the report, for `record_file.finished`.

    All processes of `shards` call this, each answers its shard of the seeds, and they keep no states. `progress`
    receives the report so far of the shard after each answer. Returns the report about all seeds.
    """
    model = how.model
    shards = Shards() if shards is None else shards
    with shards.opened(out, how.depends_on(), resume) as file:
        report = GenerationReport()
        for written in file.earlier:
            if shards.mine(written["seed"]["number"]):
                report.add(written)
        report.before = report.records
        if progress is not None:
            progress(report)
        if not file.earlier and shards.rank == 0:  # those of a run that wrote no record may be of another model
            for stale in out.parent.glob(f"{glob.escape(out.name)}.states*"):
                stale.unlink()
        waiting: Iterator[Seed] = (
            seed for seed in _encoded(seeds, how, report, shards) if not file.has(seed.number, seed.digest)
        )
        if (first := next(waiting, None)) is not None:
            waiting = itertools.chain([first], waiting)
            saved = None
            if save_states and shards.size == 1 and isinstance(model, MedusaModel) and model.heads is None:
                backbone = model.backbone
                kept = states_file(out, backbone.feature_layers)
                saved = AnswerStates(kept, backbone.states_size, backbone.dtype)
            with how.answers(states=saved is not None) as answers:
                for seed in how.answered(answers, waiting, report):
                    lines = seed.lines() if not seed.prompt else []
                    if saved is not None:
                        for line, states in zip(lines, seed.states(), strict=False):
                            saved.add(line["input_ids"], line["learnt"], states)
                    for record in file.append(lines):
                        report.add(record)
                    if progress is not None:
                        progress(report)
        report = GenerationReport.total(shards.gather(report))
        shards.finish(report.as_json(), asked)
        return report


class Distillation:
    """How a model answers seeds, one record or several per seed.

    Tokens are drawn from the model's distribution at the temperature, top_p, top_k and min_p of the settings. Those
    that are None, and all other settings except stop strings, are the model's own generation config's. An answer ends
    with one of that config's end tokens or the template's. A record has at most `length` tokens (None: the model's
    context).
    """

    def __init__(
        self,
        model: MedusaModel | Endpoint,
        encoder: ChatEncoder,
        settings: GenerationConfig,
        length: int | None = None,
    ) -> None:
        backbone = model if isinstance(model, Endpoint) else model.backbone
        own = model.generation_config if isinstance(model, Endpoint) else model.backbone.causal_lm.generation_config
        self.model, self._settings, self._encoder = model, settings, encoder
        self._limit = backbone.context_limit if length is None else min(length, backbone.context_limit)
        self._ends = token_list(own.eos_token_id)
        if encoder.end_of_turn is not None and encoder.end_of_turn not in self._ends:
            self._ends.append(encoder.end_of_turn)
        self._config = _decoding(own, settings, self._ends)

    def depends_on(self) -> dict[str, Any]:
        """Return everything that decides what is written, as JSON."""
        model, unsaid = self.model, {"heads", "quantized", "endpoint", "endpoint_model"}
        unsaid |= {"batch_size"} if isinstance(model, Endpoint) else set()
        given = {
            f"generation.{name}": value
            for name, value in dataclasses.asdict(self._settings).items()
            if name not in unsaid
        }
        stated = {
            name: value
            for name, value in self._config.to_diff_dict().items()
            if not name.startswith("_") and name != "transformers_version"
        }
        tree: Any = model.tree
        if isinstance(tree, Tree):
            # Static trees without a copied branch are identified by their choices alone, as in older files.
            tree = (tree.choices, tree.lookup, tree.keep) if tree.lookup or tree.keep else tree.choices
        return given | {
            "model": {"served": model.model} if isinstance(model, Endpoint) else fingerprint(model.backbone.causal_lm),
            "heads": None if model.heads is None else fingerprint(model.heads),
            "tree": hashlib.blake2b(repr(tree).encode(), digest_size=8).hexdigest(),
            "tokenizer": self._encoder.fingerprint,
            "length": self._limit,
            "decoding": stated,
            **self._encoder.settings,
        }

    def seed(self, number: int, record: Record) -> Seed:
        """Return a `Seed` to answer; `number` and the setting `seed` decide its random numbers."""
        return Seed(number, record, self._encoder, self._settings, self._limit)

    def answers(self, states: bool = False) -> Answers:
        """Return what runs the answers, a context manager."""
        slots = self._settings.batch_size
        if isinstance(self.model, Endpoint):
            return ServedAnswers(self.model, slots, self._encoder, self._ends, self._config)
        drawn = _sampling(self._settings, self._config)
        return Answers(self.model, slots, self._limit, states, ends=self._ends, **drawn)

    def answered(self, answers: Answers, waiting: Iterator[Seed], report: GenerationReport) -> Iterator[Seed]:
        """Yield a seed after each of its answers; after the last one it has no prompt."""
        start, settings = time.perf_counter(), self._settings

        def ask(seed: Seed) -> None:
            name = f"{settings.seed} {seed.number} {seed.answered}".encode()
            number = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big")
            answer = Answer(seed, seed.record.where)
            answers.ask(answer, seed.prompt, seed=number, max_new_tokens=min(settings.max_new_tokens, seed.room))

        for answer in answers.each(waiting, ask):
            report.seconds = time.perf_counter() - start
            report.new_tokens += len(answer.tokens)
            report.steps += len(answer.accepted)
            report._stepped += sum(answer.accepted) + len(answer.accepted)
            seed = answer.asked
            if answer.refused is not None:
                report.reject(answer.where, answer.refused)
                continue
            report.exact += answer.exact
            report.encoded += not answer.exact
            seed.take(answer.tokens, self._ends, answer.states)
            if seed.prompt:
                ask(seed)
            yield seed


def _encoded(seeds: Iterable[Record], how: Distillation, report: GenerationReport, shards: Shards) -> Iterator[Seed]:
    for number, record in enumerate(seeds):
        if not shards.mine(number):
            continue
        report.seeds += 1
        try:
            yield how.seed(number, record)
        except BadRecordError as error:
            report.reject(record.where, str(error))


def _sampling(settings: GenerationConfig, config: Any) -> dict[str, Any]:
    """Return how answers are drawn, as `Engine.submit` takes it; what is not named is the model's own."""
    if not config.do_sample:
        return {"do_sample": False}
    given = {name: getattr(settings, name) for name in ("temperature", *LIMITS)}
    return {"do_sample": True, **{name: value for name, value in given.items() if value is not None}}


def _decoding(own: Any, settings: GenerationConfig, ends: Collection[int]) -> Any:
    samples = bool(own.do_sample) if settings.temperature is None else settings.temperature > 0
    limits = {name: getattr(settings, name) for name in LIMITS}
    for name, value in limits.items():
        if value is not None and not samples:
            why = "the model's generation config" if settings.temperature is None else "generation.temperature 0"
            raise ValueError(f"generation.{name}: expected null with greedy answers ({why}), got {value}")
    drawn = {"temperature": settings.temperature, **limits} if samples else {}
    config = decoding.merge_configs(own, None, {"do_sample": samples, "eos_token_id": list(ends), **drawn})
    config.max_length = config.max_new_tokens = None  # each row has its own
    config.num_return_sequences = 1
    return config
