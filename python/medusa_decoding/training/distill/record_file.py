"""Append generated records to a file, so that a stopped run can continue; see `medusa_decoding.files.resumable`.

`records.jsonl.finished` exists once all records are written.
"""

from __future__ import annotations

import glob
import itertools
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from medusa_decoding.files import read_json_object, whole_file, write_json
from medusa_decoding.files.resumable import ResumableFile, companion


def states_file(path: Path, feature_layers: Sequence[int]) -> Path:
    """Return the companion of a file of records that has hidden states, an `AnswerStates`, those of such layers too."""
    return companion(path, "-".join(["states", *map(str, feature_layers)]))


class RecordFile(ResumableFile):
    """A file of records generated with some settings; its folder is made.

    Attributes:
        earlier: the records of the earlier runs that this one continues (`resume`), without their tokens.
        target: what `append` writes to: the file itself, or a part of it (see `shards`).
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], resume: bool) -> None:
        super().__init__(path, settings, resume, _without_tokens)
        self._made_with, self.target = settings, cast(ResumableFile, self)
        # By the numbers of seeds: digest and number of parts, and the parts in the file.
        self._seeds: dict[int, tuple[str, int]] = {}
        self._written: defaultdict[int, set[int]] = defaultdict(set)
        self._order: list[tuple[int, int]] = []  # number and part of each line
        for known in self.earlier:
            self._note(known["seed"])
        companion(path, "finished").unlink(missing_ok=True)

    def has(self, number: int, digest: str) -> bool:
        """Return whether all records of a seed are in the file; refuse those of another seed that had its number."""
        known, parts = self._seeds.get(number, (digest, 0))
        if known != digest:
            raise ValueError(
                f"data.train: expected the seeds that {self.path} was begun with, got another one in place {number + 1}"
            )
        return 0 < parts == len(self._written[number])

    def append(self, records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Write those records that are not in the file yet as one block, and return them."""
        new = [record for record in records if record["seed"]["part"] not in self._written[record["seed"]["number"]]]
        self.target.write(new)
        for record in new:
            self._note(record["seed"])
        return new

    def join(self) -> None:
        """Append the records in the parts of this file, and remove the parts."""
        for stated in sorted(self.path.parent.glob(f"{glob.escape(self.path.name)}.part-*.settings")):
            part = RecordFile(stated.with_suffix(""), self._made_with, resume=True).path  # without a half-written line
            if part.exists():
                with part.open("rb") as lines:
                    while block := [json.loads(line) for line in itertools.islice(lines, 1000)]:
                        self.earlier += map(_without_tokens, self.append(block))
                part.unlink()
            stated.unlink()

    def finish(self, report: Mapping[str, Any], asked: Any = None) -> None:
        """Put the lines in the order of the seeds, and mark the file as complete: with a report and what was asked.

        Raises `OSError` if the report counts other records, such as those of a part that is missing.
        """
        if len(self._order) != report["records"]:
            raise OSError(f"{self.path}: expected {report['records']} records, got {len(self._order)}; run --resume")
        self._sort()
        write_json(companion(self.path, "finished"), {"asked": asked, "report": report})

    def _note(self, seed: Mapping[str, Any]) -> None:
        self._seeds[seed["number"]] = seed["digest"], seed["parts"]
        self._written[seed["number"]].add(seed["part"])
        self._order.append((seed["number"], seed["part"]))

    def _sort(self) -> None:
        places = sorted(range(len(self._order)), key=self._order.__getitem__)
        if places == list(range(len(places))):
            return
        with self.path.open("rb") as file:
            ends = [0, *itertools.accumulate(map(len, file))]
            with whole_file(self.path) as scratch, scratch.open("wb") as sorted_file:
                for place in places:
                    file.seek(ends[place])
                    sorted_file.write(file.read(ends[place + 1] - ends[place]))
        self._order.sort()


def _without_tokens(record: Any) -> dict[str, Any]:
    """Return what a continued run needs to know of a record."""
    return {key: record[key] for key in ("seed", "cut", "ended", "learnt")}


def saved_states(path: Path, weights: str, feature_layers: Sequence[int]) -> Path | None:
    """Return the `states_file` of a file of records if it exists and is of a model with this fingerprint."""
    stated, file = companion(path, "settings"), states_file(path, feature_layers)
    there = file.is_file() and stated.is_file()
    return file if there and read_json_object(stated).get("model") == weights else None


def finished(path: Path, asked: Any) -> dict[str, Any] | None:
    """Return the report of the run that finished a file, or None if something else was asked for."""
    marker = companion(path, "finished")
    if not (marker.is_file() and path.is_file()):
        return None
    found = read_json_object(marker)
    return found["report"] if found.get("asked") == json.loads(json.dumps(asked)) else None


def asked_of(path: Path) -> dict[str, Any] | None:
    """Return what a finished file of records was asked for with, or None if nothing next to it says so.

    `decoding` in it is the generation config with which answers were decoded, if that is known. Files next to a user's
    own data may be anything, and are no reason to refuse the data.
    """
    try:
        asked = read_json_object(companion(path, "finished")).get("asked") if path.is_file() else None
        decoding = read_json_object(companion(path, "settings")).get("decoding") if asked else None
    except (OSError, ValueError):
        return None
    if not isinstance(asked, dict) or not {"model", "generation", "data"} <= asked.keys():
        return None
    return asked | {"decoding": decoding if isinstance(decoding, dict) else None}
