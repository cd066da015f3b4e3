"""A cache of hidden states on disk: a frozen backbone computes the states of each row once, later epochs read them.

One file holds all rows, mapped into memory; another has one byte per row that says whether the row is there. A third
has the fingerprint of the model and the rows.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_decoding.files import only_writer, read_json_object, write_json
from medusa_decoding.training.data.answer_states import AnswerStates
from medusa_decoding.training.data.packing import PackedDataset
from medusa_decoding.training.loop.processes import Processes

STATES, THERE, ABOUT = "states.bin", "there.bin", "about.json"


def fingerprint(rows: PackedDataset, settings: Mapping[str, Any], labels: bool = False) -> str:
    """Return a hash of all rows' tokens and of settings that the states depend on, with `labels` also of those."""
    digest = hashlib.blake2b(json.dumps(dict(settings), sort_keys=True).encode(), digest_size=16)
    for number in range(len(rows)):
        row = rows[number]
        for name in ("input_ids", "position_ids", *(("labels",) if labels else ())):
            digest.update(row[name].numpy().tobytes())
    return digest.hexdigest()


class StateCache:
    """States [length, (1 + F) H] of rows in a folder, which is made if it is missing.

    The key is a `fingerprint`, the shape (rows, length, (1 + F) H). `made` counts the rows that this process has put
    there, in `dtype`.
    """

    def __init__(
        self, folder: Path, key: str, shape: tuple[int, int, int], dtype: torch.dtype, processes: Processes
    ) -> None:
        self.made = 0
        facts = {"fingerprint": key, "shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
        count = math.prod(shape)

        def prepare() -> None:
            # Two processes that make the files at once would truncate what the other has mapped.
            with only_writer("data.cache_hidden", folder, inside=True):
                (_check if (folder / ABOUT).is_file() else _make)(folder, facts, count * dtype.itemsize)

        processes.in_turn(prepare)  # the first process of each disk makes them
        self.dtype = dtype
        self._states = torch.from_file(str(folder / STATES), shared=True, size=count, dtype=dtype).view(shape)
        self._there = torch.from_file(str(folder / THERE), shared=True, size=shape[0], dtype=torch.uint8)
        # A thread that touches CUDA would otherwise take memory of the first GPU.
        own = (torch.cuda.set_device, (processes.device,)) if processes.device.type == "cuda" else (None, ())
        self._thread, self._writing = ThreadPoolExecutor(1, "states", *own), Future[None]()
        self._writing.set_result(None)

    def get(self, rows: Sequence[int], pinned: bool = False) -> Tensor | None:
        """Return the states of rows, a copy [B, length, (1 + F) H] on the CPU, or None if one of them is not there yet.

        From pinned memory, the copy to a GPU overlaps with the host's work.
        """
        numbers = torch.tensor(rows)
        if not bool(self._there[numbers].all()):
            return None
        found = torch.empty(len(rows), *self._states.shape[1:], dtype=self._states.dtype, pin_memory=pinned)
        torch.index_select(self._states, 0, numbers, out=found)
        return found

    def fill(self, rows: PackedDataset, saved: Sequence[AnswerStates]) -> None:
        """Copy saved states into the rows that are not there yet and whose examples all have some."""
        for number in (~self._there.bool()).nonzero().flatten().tolist():
            states = []
            for example in rows.examples(number):
                found = next((one for file in saved if (one := file.get(example)) is not None), None)
                if found is None:
                    break
                states.append(found)
            else:
                row = self._states.new_zeros(self._states.shape[1:])
                torch.cat(states, out=row[: sum(map(len, states))])
                self._write([number], row[None])

    def put(self, rows: Sequence[int], states: Tensor) -> None:
        """Write the states of rows in a thread, unless they are not finite: nothing waits until a GPU has them.

        The next call, and `flush`, wait for the states of this one, and raise its errors.
        """
        self.flush()
        copy, there = states.detach().to(self.dtype), None
        if copy.device.type == "cuda":
            copy = torch.empty_like(copy, device="cpu", pin_memory=True)
            copy.copy_(states, non_blocking=True)
            there = torch.cuda.Event()
            there.record()
        self._writing = self._thread.submit(self._write, rows, copy, there)

    def flush(self) -> None:
        """Wait until all states are written."""
        self._writing.result()

    def _write(self, rows: Sequence[int], states: Tensor, there: torch.cuda.Event | None = None) -> None:
        if there is not None:
            there.synchronize()
        if not bool(torch.isfinite(states).all()):
            return
        self.made += len(rows)
        numbers = torch.tensor(rows)
        self._states[numbers] = states
        self._there[numbers] = 1  # after the states: a kill between the two leaves a row that is computed again


def _make(folder: Path, facts: Mapping[str, Any], size: int) -> None:
    rows, length, _ = facts["shape"]
    free = shutil.disk_usage(folder).free
    if size > free:
        raise OSError(
            f"data.cache_hidden: expected {size / 2**30:.1f} GiB free in {folder} for "
            f"{rows} rows of {length} states, got {free / 2**30:.1f} GiB"
        )
    with open(folder / STATES, "wb") as file:
        # Takes the space now: a write through a memory map cannot report a full disk.
        os.posix_fallocate(file.fileno(), 0, size)
    (folder / THERE).write_bytes(bytes(rows))
    write_json(folder / ABOUT, facts)


def _check(folder: Path, facts: Mapping[str, Any], size: int) -> None:
    found = read_json_object(folder / ABOUT)
    for name, wanted in facts.items():
        if found.get(name) != wanted:
            raise ValueError(
                f"data.cache_hidden: expected an empty folder or the states of these rows and this model, got "
                f"{folder} with another {name}"
            )
    for file, wanted in ((folder / STATES, size), (folder / THERE, facts["shape"][0])):
        if not file.is_file() or file.stat().st_size != wanted:  # torch would extend it with zeros
            raise ValueError(f"{file}: expected {wanted} bytes; remove the folder")
