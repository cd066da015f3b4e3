"""Pack examples into rows of one length, several per row, none of which sees another.

Positions restart at 0 with each conversation. With SDPA, eager and flex attention this is enough for transformers to
keep conversations apart if there is neither an attention mask nor a cache (with a cache, conversations see each other).
With flash-attn this works for one row only; several rows need the cumulative lengths that `collate` adds.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from medusa_decoding.training.data.encoding import Example
from medusa_decoding.training.data.records import Report
from medusa_decoding.training.data.targets import IGNORE, number_segments

TEXTS = "texts"
"""Name in a batch of its `Texts`."""


def fit(examples: Iterable[Example], length: int, report: Report, overlong: str = "truncate") -> Iterator[Example]:
    """Yield examples of at most `length` tokens that have something to learn.

    Of longer conversations `overlong` "truncate" keeps the first `length` tokens, "drop" leaves them out, and "split"
    cuts them into pieces that do not see each other. Texts are always split. The report notes what was cut or dropped.
    """
    for example in examples:
        pieces = [example]
        if len(example.ids) > length:
            way = "split" if example.is_text else overlong
            report.notes[f"longer than {length} tokens: {way}"] += 1
            end = {"truncate": 1, "drop": 0, "split": len(example.ids)}[way]
            parts = [slice(start, start + length) for start in range(0, end, length)]
            pieces = [replace(example, ids=example.ids[part], learnt=example.learnt[part]) for part in parts]
        for piece in pieces:
            # The first token of a row is no position's target.
            if piece.learnt[1:].any():
                yield piece
            else:
                report.notes["nothing to learn"] += 1


class PackedDataset(Dataset[dict[str, Tensor]]):
    """Rows of `length` tokens. The same examples give the same rows; shuffle them with a sampler.

    The longest example goes first, each into the row with the least room that is large enough; without `pack`, each has
    a row of its own. The ends of rows are filled with `pad_token_id`, which is neither seen nor learnt.

    Attributes:
        rows: the examples of each row, by number.
    """

    def __init__(self, examples: Sequence[Example], length: int, pad_token_id: int, *, pack: bool = True) -> None:
        lengths = [len(example.ids) for example in examples]
        self.rows = _fill_rows(lengths, length) if pack else [[number] for number in range(len(examples))]
        self._examples, self._length, self._pad = examples, length, pad_token_id

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        """Return a row, int64 [length] each: `input_ids`, `position_ids`, `labels` (ids where learnt, else IGNORE)."""
        ids = np.full(self._length, self._pad, dtype=np.int64)
        labels = np.full(self._length, IGNORE, dtype=np.int64)
        positions = np.zeros(self._length, dtype=np.int64)
        start = 0
        for example in self.examples(number):
            end = start + len(example.ids)
            ids[start:end] = example.ids
            labels[start:end] = np.where(example.learnt, example.ids, IGNORE)
            # Nothing predicts a first token. IGNORE also stops transformers' own shifted loss between conversations.
            labels[start] = IGNORE
            positions[start:end] = np.arange(end - start)
            start = end
        positions[start:] = np.arange(self._length - start)
        found = {"input_ids": ids, "labels": labels, "position_ids": positions}
        return {name: torch.from_numpy(array) for name, array in found.items()}

    def examples(self, number: int) -> list[Example]:
        """Return the examples of a row, in their order."""
        return [self._examples[place] for place in self.rows[number]]

    @property
    def positions(self) -> int:
        """Tokens of all rows, with padding."""
        return len(self.rows) * self._length

    @property
    def fill(self) -> float:
        """Share of the rows' tokens that belong to examples."""
        return sum(len(example.ids) for example in self._examples) / self.positions


def _fill_rows(lengths: Sequence[int], room: int) -> list[list[int]]:
    rows: list[list[int]] = []
    left: list[tuple[int, int, list[int]]] = []  # the room left in rows, since which step, and the row; ascending
    for step, number in enumerate(sorted(range(len(lengths)), key=lambda number: -lengths[number])):
        place = bisect.bisect_left(left, lengths[number], key=lambda entry: entry[0])
        if place < len(left):
            space, _, row = left.pop(place)
        else:
            space, row = room, []
            rows.append(row)
        row.append(number)
        if space > lengths[number]:
            bisect.insort(left, (space - lengths[number], step, row))
    return rows


@dataclass(frozen=True)
class Texts:
    """What losses need of a batch, int64 [B * T] each: on the CPU, they find their targets without waiting for a GPU.

    DDP and FSDP move a batch's tensors to the GPU, but not objects of this class.
    """

    labels: Tensor
    segments: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, batch: dict[str, Any]) -> Texts:
        """Return those of a batch from `collate`, on its device."""
        return cls(batch["labels"].flatten(), number_segments(batch["position_ids"]), batch["input_ids"].flatten())


def collate(rows: Sequence[dict[str, Tensor]], attention: str = "sdpa") -> dict[str, Any]:
    """Stack rows on the CPU, and add the lengths with which flash-attn keeps conversations apart.

    Returns:
        `input_ids`, `labels`, `position_ids`: int64 [B, length]. For flash-attn also `cu_seq_lens_q`, `cu_seq_lens_k`
        (int32 [conversations + 1], over the concatenated rows) and `max_length_q`, `max_length_k` (ints).
    """
    batch: dict[str, Any] = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    if "flash" in attention:
        starts = (batch["position_ids"].flatten() == 0).nonzero().flatten()
        bounds = torch.cat([starts, torch.tensor([batch["position_ids"].numel()])])
        batch["cu_seq_lens_q"] = batch["cu_seq_lens_k"] = bounds.int()
        batch["max_length_q"] = batch["max_length_k"] = int(bounds.diff().max())
    return batch


def model_inputs(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the model's part of a batch, and no cache, with which conversations would mix."""
    return {name: value for name, value in batch.items() if name not in ("labels", TEXTS)} | {"use_cache": False}
