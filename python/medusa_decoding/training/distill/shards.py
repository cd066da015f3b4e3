"""Shard seeds over the processes of a run: each appends to a part of the file of records, which the main one joins.

The parts are `records.jsonl.part-0` and so on. A run begins by joining the parts that a stopped one left, so it may
have another number of processes.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist

from medusa_decoding.files import only_writer
from medusa_decoding.files.resumable import ResumableFile, companion
from medusa_decoding.training.distill.record_file import RecordFile

T = TypeVar("T")


class Shards:
    """This process, its `rank` from 0 (the main one), among the `size` ones that answer seeds together.

    With several processes, torch's process group must exist, and each method must be called by all of them.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self._whole: RecordFile  # of the main process
        # One shard may end days before another one. Other groups wait for hours.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(days=30)) if size > 1 else None

    def mine(self, number: int) -> bool:
        """Return whether this process answers the seed with this number."""
        return number % self.size == self.rank

    def gather(self, value: T) -> list[T]:
        """Wait for all processes, and return the value that each one gave, by rank."""
        found: list[Any] = [value] * self.size
        if self.size > 1:
            try:
                dist.all_gather_object(found, value, group=self._group)
            except RuntimeError as error:
                raise ConnectionError("another process of this run failed; see its message") from error
        return found

    def check_folder(self, folder: Path) -> None:
        """Make a folder, and raise `ValueError` in every process unless all of them see what the main one writes."""
        if self.size == 1:
            return
        marker = folder / f".seen-{self.gather(secrets.token_hex(8))[0]}"
        if self.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            marker.touch()
        self.gather(None)
        seen = self.gather(marker.exists())
        if self.rank == 0:
            marker.unlink()
        if not all(seen):
            raise ValueError(
                f"output.folder: expected a folder on a disk that all {self.size} processes share, got {folder}, where "
                f"process {seen.index(False)} does not see a file of the main process"
            )

    @contextlib.contextmanager
    def opened(self, path: Path, settings: Mapping[str, Any], resume: bool) -> Iterator[RecordFile]:
        """Yield the file of records to append to, whose `earlier` and `has` know the records of all earlier runs."""
        with contextlib.ExitStack() as stack:
            if self.rank == 0:
                stack.enter_context(only_writer("out", path))
                self._whole = RecordFile(path, settings, resume)
                self._whole.join()
            self.gather(None)
            file = self._whole if self.size == 1 else RecordFile(path, settings, resume=True)
            if self.size > 1:
                file.target = ResumableFile(companion(path, f"part-{self.rank}"), settings, True, dict)
            yield file

    def finish(self, report: Mapping[str, Any], asked: Any) -> None:
        """Join the parts of the file that is `opened`, and finish it; `report` is about all processes."""
        if self.rank == 0:
            self._whole.join()
            self._whole.finish(report, asked)
        self.gather(None)
