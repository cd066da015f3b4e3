"""Training checkpoints: everything that a run needs to resume, written completely or not at all.

A checkpoint is a folder `step-000200`, written under another name and renamed at the end. Its `state.json` has a digest
of itself and of each other file, so that a damaged, exchanged or edited file is refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from medusa_decoding.files import read_json_object

_NAME = re.compile(r"step-(\d{6,})")
WEIGHTS, OPTIMISER, STATE = "weights.pt", "optimiser.pt", "state.json"
BEST = "best-0.pt"  # as earlier versions named it


class Checkpoints:
    """The last checkpoints of a run, as many as it is to `keep`; the main process reads and writes them."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def all(self) -> list[Path]:
        """Return the complete ones, oldest first."""
        if not self.folder.is_dir():
            return []
        found = [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
        return sorted(found, key=lambda path: int(path.name.partition("-")[2]))

    def newest(self) -> Path | None:
        """Return the newest complete one."""
        return next(reversed(self.all()), None)

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        weights: Mapping[str, Any],
        optimiser: Mapping[str, Any],
        best: Mapping[str, Any] | None = None,
    ) -> None:
        """Write a checkpoint after a step of the whole run; older ones go once it is complete.

        It has the weights by name, and the state of optimiser and schedule. `state` has values for JSON. `best` are the
        weights of the best heads, unless they are those of this step.

        Raises:
            OSError: it could not be written (a full disk, say). Earlier checkpoints stay, and the newest is named.
        """
        staging = self.folder / f".step-{step:06d}.tmp"
        with self._named_errors():
            for left in self.folder.glob(".step-*.tmp"):
                shutil.rmtree(left)  # of a run that was killed
            staging.mkdir(parents=True)
            try:
                if best is not None:
                    torch.save(dict(best), staging / BEST)
                torch.save(dict(weights), staging / WEIGHTS)
                torch.save(dict(optimiser), staging / OPTIMISER)
                _write_state(staging, state)
                self._put_in_place(staging, step)
            except BaseException:
                shutil.rmtree(staging, ignore_errors=True)
                raise

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:  # torch's writer has its own errors for a full disk
            newest = self.newest()
            kept = f"the last good one is {newest}" if newest is not None else "there is none before it"
            free = ""
            with contextlib.suppress(OSError):  # torch's messages do not mention a full disk
                free = f"; {shutil.disk_usage(self.folder).free / 2**20:,.0f} MiB are free there"
            raise OSError(f"{self.folder}: the checkpoint could not be written ({error}{free}); {kept}") from error

    def _put_in_place(self, staging: Path, step: int) -> None:
        for file in staging.iterdir():
            with open(file, "rb+") as written:
                os.fsync(written.fileno())
        final = self.folder / f"step-{step:06d}"
        if final.exists():
            shutil.rmtree(final)
        os.rename(staging, final)
        for old in self.all()[: -self.keep]:
            # Renamed first: half of a checkpoint must never have a checkpoint's name.
            gone = old.with_name(f".{old.name}.{secrets.token_hex(4)}.tmp")
            os.rename(old, gone)
            shutil.rmtree(gone, ignore_errors=True)

    def load(self, path: Path, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Read the weights, the optimiser and the best weights.

        Raises:
            ValueError: a damaged checkpoint, or one that does not match its `read_state`; it names the file.
        """

        def read(name: str) -> dict[str, Any]:
            try:
                _check_records(path / name, state["files"].get(name))
                return dict(torch.load(path / name, map_location="cpu", weights_only=True))
            except Exception as error:  # torch.load raises many types on damaged bytes
                raise damaged(path, f"{name}: {error}") from error

        weights = read(WEIGHTS)
        return weights, read(OPTIMISER), read(BEST) if BEST in state["files"] else weights


def damaged(path: Path, reason: str) -> ValueError:
    """Return the error for a checkpoint that a run cannot resume from."""
    return ValueError(
        f"{path}: expected a complete checkpoint, got a damaged one ({reason}); remove this folder to go on from the "
        "one before it, or begin again in another output folder"
    )


def read_state(path: Path) -> dict[str, Any]:
    """Read the state of a checkpoint.

    Returns:
        The state given to `Checkpoints.save`, and `files`, the digests of its files by name.

    Raises:
        ValueError: a damaged or changed file, or one of a version that wrote no digest.
    """
    try:
        found = read_json_object(path / STATE)
    except (OSError, ValueError) as error:
        raise damaged(path, str(error)) from error
    stated = found.pop("digest", None)
    if stated is None:
        raise damaged(path, f"{STATE} has no digest, as every checkpoint of this version has")
    if stated != _digest(found):
        raise damaged(path, f"{STATE} is not what the run has written")
    return found


def _write_state(folder: Path, state: Mapping[str, Any]) -> None:
    marks = {file.name: _mark(file) for file in sorted(folder.glob("*.pt"))}
    values = json.loads(json.dumps({**state, "files": marks}))  # the digest is of what a reader gets
    (folder / STATE).write_text(json.dumps(values | {"digest": _digest(values)}, indent=1) + "\n", encoding="utf-8")


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()


def _mark(file: Path) -> str:
    """Return a digest of a torch file's list of records: it contains their checksums, so the file need not be read."""
    with zipfile.ZipFile(file) as records:
        listed = [(record.filename, record.file_size, record.CRC) for record in records.infolist()]
    return hashlib.blake2b(repr(listed).encode(), digest_size=16).hexdigest()


def _check_records(file: Path, mark: str | None) -> None:
    """Raise `ValueError` unless each record is as it was written; torch itself does not compare checksums."""
    if mark is None or _mark(file) != mark:
        raise ValueError("not the file that the run has written")
    with zipfile.ZipFile(file) as records:
        broken = records.testzip()
    if broken is not None:
        raise ValueError(f"another checksum in {broken}")
