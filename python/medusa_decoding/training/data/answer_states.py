"""Hidden states of answers, saved while a model writes them, so that training need not compute them again.

`records.jsonl.states` next to `records.jsonl` has one block per record: a hash of its tokens and of which of them are
learnt, a count, and the states from which the model predicted the learnt tokens, in their order: those after the final
norm, followed by those of heads' feature layers, which the file's name then tells (`states-10-20`).
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from medusa_decoding.training.data.encoding import Example

_KEY = 16


class AnswerStates:
    """A file of states [count, (1 + F) H] in one dtype; a half-written block at its end is removed.

    Args:
        file: made by the first `add` if it is missing.
        size: of a state: (1 + F) H.
        dtype: of the states.
    """

    def __init__(self, file: Path, size: int, dtype: torch.dtype) -> None:
        self._file, self._size, self._dtype = file, size, dtype
        self._places: dict[bytes, tuple[int, int]] = {}
        if not file.exists():
            return
        whole, end, row = file.stat().st_size, 0, size * dtype.itemsize
        with file.open("rb") as stream:
            while len(head := stream.read(_KEY + 8)) == _KEY + 8:
                count, start = int.from_bytes(head[_KEY:], "little"), end + len(head)
                if start + count * row > whole:
                    break
                end = start + count * row
                self._places[head[:_KEY]] = start, count
                stream.seek(end)
        if end < whole:
            os.truncate(file, end)

    def add(self, ids: Sequence[int], spans: Iterable[tuple[int, int]], states: Sequence[torch.Tensor]) -> None:
        """Append a record: its tokens, the spans [start, end) of them that are learnt, and its states [(1 + F) H]."""
        data = torch.stack(list(states)).to("cpu", self._dtype).view(torch.uint8).numpy().tobytes()
        key, count = _key(Example.from_spans(ids, spans, "")), len(states)
        with self._file.open("ab") as stream:
            self._places[key] = stream.tell() + _KEY + 8, count
            stream.write(key + count.to_bytes(8, "little") + data)

    def get(self, example: Example) -> torch.Tensor | None:
        """Return an example's states [T, (1 + F) H], zero if the next token is not learnt; None if there are none."""
        start, count = self._places.get(_key(example), (0, 0))
        before = torch.from_numpy(np.flatnonzero(example.learnt[1:]))
        if not count or count != len(before):
            return None
        with self._file.open("rb") as stream:
            stream.seek(start)
            data = bytearray(stream.read(count * self._size * self._dtype.itemsize))
        states = torch.zeros(len(example.ids), self._size, dtype=self._dtype)
        states[before] = torch.frombuffer(data, dtype=self._dtype).view(count, self._size)
        return states


def _key(example: Example) -> bytes:
    content = example.ids.astype(np.int64).tobytes() + example.learnt.tobytes()
    return hashlib.blake2b(content, digest_size=_KEY).digest()
