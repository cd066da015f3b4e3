"""The rows of a run: reads records, encodes them, splits off held-out data and packs both."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from medusa_decoding.training.config import Config
from medusa_decoding.training.data import encoding, packing
from medusa_decoding.training.data import records as data


@dataclass(frozen=True)
class Rows:
    """The data of a run: packed rows to train on and to measure on, and the reports of reading them.

    `held_out_report` is None without `data.held_out`. `records` are the numbers of training and of held-out records
    that are in the rows. `frequencies` says how often each token is learnt in the training data, `held_out_frequencies`
    the same of held-out data. `lengths` are the numbers of tokens of all examples before any is cut.
    """

    train: packing.PackedDataset
    held_out: packing.PackedDataset | None
    report: data.Report
    held_out_report: data.Report | None
    records: tuple[int, int]
    frequencies: Counter[int]
    held_out_frequencies: Counter[int]
    lengths: tuple[int, ...]

    def sizes(self, length: int) -> dict[str, int]:
        """Return how many rows of `length` tokens there are, what is in them, and percentiles of `lengths`."""
        half, most, longest = np.percentile(self.lengths, (50, 95, 100), method="inverted_cdf").tolist()
        tokens = round(len(self.train) * length * self.train.fill)
        sizes = {"rows": len(self.train), "tokens": tokens, "learnt_tokens": self.frequencies.total()}
        examples = {"median_tokens": half, "p95_tokens": most, "most_tokens": longest}
        return sizes | examples | {"longer_than_a_row": sum(count > length for count in self.lengths)}

    @property
    def learnt(self) -> float:
        """Share of the training rows' positions, with padding, whose token is learnt."""
        return self.frequencies.total() / self.train.positions


def load_rows(config: Config, tokenizer: Any, vocab_size: int | None = None, part: int = 1) -> Rows:
    """Read, encode, split and pack the data of a configuration.

    The model's vocabulary size bounds the ids of tokenized records; without it, the tokenizer's does. Of the training
    records, one of `part` is taken, at random; a smaller part is within each larger one.
    """
    settings = config.data
    if settings.answers == "own":
        raise ValueError(
            "data.answers: expected given or null, to learn the data's answers (`medusa distill` has the model write "
            "its own and learns those), got own"
        )
    encoder = encoding.ChatEncoder.of(tokenizer, settings, vocab_size)
    report = data.Report()
    records = list(data.read_records(settings.train, report, system=settings.system, limit=settings.limit))
    held_out: list[data.Record] = []
    held_out_report = None
    if settings.held_out:
        held_out_report = data.Report()
        trained = {data.prompt_key(record.prompt) for record in records}
        for record in data.read_records(
            settings.held_out, held_out_report, system=settings.system, limit=settings.limit
        ):
            if data.prompt_key(record.prompt) in trained:
                held_out_report.notes["held-out prompts that are also trained on: left out"] += 1
            else:
                held_out.append(record)
    elif config.held_out_share > 0:
        records, held_out = data.split_records(records, config.held_out_share, settings.split_seed)

    if part > 1:
        random.Random(settings.split_seed).shuffle(records)
        records = records[: max(1, len(records) // part)]

    lengths: list[int] = []

    def encode(part: Sequence[data.Record], report: data.Report) -> tuple[list[encoding.Example], int]:
        found, used = [], 0
        for record in part:
            encoded = list(encoding.encode_records([record], encoder, report))
            lengths.extend(len(example.ids) for example in encoded)
            pieces = list(packing.fit(encoded, settings.length, report, settings.overlong))
            found += pieces
            used += bool(pieces)
        return found, used

    if encoder.bare and (conversations := sum(record.text is None for record in records)):
        report.notes["prompt and answer as bare text, because the tokenizer has no chat template"] += conversations
    examples, trained_on = encode(records, report)
    held_out_examples, measured_on = encode(held_out, held_out_report or report)
    largest = max((int(example.ids.max()) for example in [*examples, *held_out_examples]), default=0)
    if vocab_size is not None and largest >= vocab_size:
        raise ValueError(f"data: expected token ids below the model's {vocab_size}, got {largest} from its tokenizer")
    for one in (report, held_out_report):
        if one is not None:
            one.check(settings.max_bad_share)
    fills = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    pad = next((token for token in fills if token is not None and (vocab_size is None or token < vocab_size)), 0)
    train, measured = (
        packing.PackedDataset(part, settings.length, pad, pack=settings.pack) if part else None
        for part in (examples, held_out_examples)
    )
    if train is None:
        raise ValueError(f"data.train: expected something to learn, got nothing; {report}")
    counts: tuple[Counter[int], Counter[int]] = Counter(), Counter()
    for group, frequencies in zip((examples, held_out_examples), counts, strict=True):
        for example in group:
            frequencies.update(example.ids[example.learnt].tolist())
    return Rows(train, measured, report, held_out_report, (trained_on, measured_on), *counts, tuple(lengths))
