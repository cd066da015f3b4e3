"""Hidden states on disk: a frozen backbone's last states of every row, computed once and read in every epoch after.

One file holds all rows, mapped into memory; a byte a row says whether it is there. The folder belongs to one model and
one set of rows, whose fingerprint lies beside them. This module does not know models.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_decoding.training.packing import PackedDataset
from medusa_decoding.training.processes import Processes


def fingerprint(rows: PackedDataset, settings: Mapping[str, Any]) -> str:
    """Return a hash of all rows' tokens and of what the states depend on besides."""
    digest = hashlib.blake2b(json.dumps(dict(settings), sort_keys=True).encode(), digest_size=16)
    for number in range(len(rows)):
        row = rows[number]
        digest.update(row["input_ids"].numpy().tobytes())
        digest.update(row["position_ids"].numpy().tobytes())
    return digest.hexdigest()


class StateCache:
    """States [length, H] of rows, kept in a folder.

    Args:
        folder: made if it is not there.
        key: see `fingerprint`.
        shape: rows, length, H.
        dtype: of the states.
        processes: those of the run.

    Raises:
        ValueError: a folder with the states of other rows or of another model.
        OSError: too little room on the disk; it says how much is needed.
    """

    def __init__(
        self, folder: Path, key: str, shape: tuple[int, int, int], dtype: torch.dtype, processes: Processes
    ) -> None:
        self._shape = shape
        states, there, about = folder / "states.bin", folder / "there.bin", folder / "about.json"
        facts = {"fingerprint": key, "shape": list(shape), "dtype": str(dtype).removeprefix("torch.")}
        size = shape[0] * shape[1] * shape[2] * dtype.itemsize
        error: BaseException | None = None
        if processes.main:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                if about.is_file():
                    _check(about, facts)
                else:
                    free = shutil.disk_usage(folder).free
                    if size > free:
                        raise OSError(
                            f"data.cache_hidden: expected {size / 2**30:.1f} GiB free in {folder} for "
                            f"{shape[0]} rows of {shape[1]} states, got {free / 2**30:.1f} GiB"
                        )
                    with open(states, "wb") as file:
                        # Its room is taken now: writing through a map has no way to report a full disk.
                        os.posix_fallocate(file.fileno(), 0, size)
                    there.write_bytes(bytes(shape[0]))
                    about.write_text(json.dumps(facts) + "\n", encoding="utf-8")
            except (OSError, ValueError) as caught:
                error = caught
        processes.together(error)
        count = shape[0] * shape[1] * shape[2]
        self._states = torch.from_file(str(states), shared=True, size=count, dtype=dtype).view(shape)
        self._there = torch.from_file(str(there), shared=True, size=shape[0], dtype=torch.uint8)

    def get(self, rows: Sequence[int], pinned: bool = False) -> Tensor | None:
        """Return the states of rows, or None if one of them is not there yet.

        Args:
            rows: B numbers of rows.
            pinned: read them into pinned memory, from which a GPU copies while the host goes on.

        Returns:
            A copy, [B, length, H] on the CPU, in the cache's dtype.
        """
        numbers = torch.tensor(rows)
        if not bool(self._there[numbers].all()):
            return None
        found = torch.empty(len(rows), *self._shape[1:], dtype=self._states.dtype, pin_memory=pinned)
        return torch.index_select(self._states, 0, numbers, out=found)

    def put(self, rows: Sequence[int], states: Tensor) -> None:
        """Keep the states of rows."""
        numbers = torch.tensor(rows)
        self._states[numbers] = states.detach().to("cpu", self._states.dtype)
        self._there[numbers] = 1  # behind the states: a kill in between leaves a row that is computed again

    @property
    def filled(self) -> int:
        """How many rows are there."""
        return int(self._there.sum())


def _check(file: Path, facts: Mapping[str, Any]) -> None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file}: expected JSON, got text that does not parse ({error})") from error
    for name, wanted in facts.items():
        if found.get(name) != wanted:
            raise ValueError(
                f"data.cache_hidden: expected an empty folder or the states of these rows and this model, got "
                f"{file.parent} with another {name}"
            )
