"""Training checkpoints: everything that a run goes on from, written whole or not at all.

A checkpoint is a folder `step-000200` with the trained weights, the optimiser's and the schedule's state, the random
numbers of each process, and `state.json`. It is written aside and renamed at the end, so that a folder of that name is
complete; then all but the last few are removed. This module does not know models or losses.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from medusa_decoding.training.processes import Processes

_NAME = re.compile(r"step-(\d{6,})")
WEIGHTS, OPTIMISER, STATE = "weights.pt", "optimiser.pt", "state.json"


class Checkpoints:
    """The checkpoints of a run.

    Args:
        folder: where they lie.
        keep: the last so many are kept.
        processes: those of the run; all of them call `save`.
    """

    def __init__(self, folder: Path, keep: int, processes: Processes) -> None:
        self.folder, self.keep, self.processes = folder, keep, processes

    def all(self) -> list[Path]:
        """Return the complete ones, oldest first."""
        if not self.folder.is_dir():
            return []
        found = [path for path in self.folder.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]
        return sorted(found, key=lambda path: int(path.name.partition("-")[2]))

    def newest(self) -> Path | None:
        """Return the newest complete one."""
        found = self.all()
        return found[-1] if found else None

    def save(
        self, step: int, state: Mapping[str, Any], weights: Mapping[str, Any], optimiser: Mapping[str, Any]
    ) -> None:
        """Write a checkpoint; older ones go once it is complete.

        Args:
            step: of the whole run.
            state: what JSON can hold.
            weights: tensors by name, of the main process.
            optimiser: its state and the schedule's, likewise.

        Raises:
            OSError: it could not be written (a full disk, say); what was there is left, and named.
        """
        processes, error = self.processes, None
        staging = self.folder / f".step-{step:06d}.tmp"
        try:
            if processes.main:
                for left in self.folder.glob(".step-*.tmp"):
                    shutil.rmtree(left)  # of a run that was killed
                staging.mkdir(parents=True)
        except OSError as caught:
            error = self._named(caught)
        processes.together(error)
        try:
            torch.save(random_state(processes.device), staging / f"random-{processes.rank}.pt")
            if processes.main:
                torch.save(dict(weights), staging / WEIGHTS)
                torch.save(dict(optimiser), staging / OPTIMISER)
                (staging / STATE).write_text(json.dumps(dict(state), indent=1) + "\n", encoding="utf-8")
        except (OSError, RuntimeError) as caught:  # torch's writer has errors of its own for a full disk
            error = self._named(caught)
        try:
            processes.together(error)
            try:
                if processes.main:
                    self._put_in_place(staging, step)
            except OSError as caught:
                error = self._named(caught)
            processes.together(error)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise

    def _put_in_place(self, staging: Path, step: int) -> None:
        """Give a complete checkpoint its name, and remove those that are too many."""
        for file in staging.iterdir():
            with open(file, "rb+") as written:
                os.fsync(written.fileno())
        final = self.folder / f"step-{step:06d}"
        if final.exists():
            shutil.rmtree(final)
        os.rename(staging, final)
        for old in self.all()[: -self.keep]:
            # Renamed first: half of a checkpoint is never found under its name.
            gone = old.with_name(f".{old.name}.{secrets.token_hex(4)}.tmp")
            os.rename(old, gone)
            shutil.rmtree(gone, ignore_errors=True)

    def _named(self, error: BaseException) -> OSError:
        newest = self.newest()
        kept = f"the last good one is {newest}" if newest is not None else "there is none before it"
        # torch's own words for a full disk tell nobody.
        free = ""
        with contextlib.suppress(OSError):
            free = f"; {shutil.disk_usage(self.folder).free / 2**20:,.0f} MiB are free there"
        return OSError(f"{self.folder}: the checkpoint could not be written ({error}{free}); {kept}")

    def load(self, path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Read a checkpoint: its state, weights and optimiser; this process goes on with its random numbers.

        Raises:
            ValueError: a damaged checkpoint; it names the file.
        """
        try:
            state = json.loads((path / STATE).read_text(encoding="utf-8"))
            weights, optimiser = (
                torch.load(path / name, map_location="cpu", weights_only=True) for name in (WEIGHTS, OPTIMISER)
            )
            own = path / f"random-{self.processes.rank}.pt"
            numbers = torch.load(own, map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load raises many types on damaged bytes
            raise ValueError(f"{path}: expected a complete checkpoint, got a damaged one ({error})") from error
        restore_random(numbers, self.processes.device)
        return state, weights, optimiser


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of all random generators that training draws from."""
    kind, keys, *rest = np.random.get_state()
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
    }
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore_random(state: Mapping[str, Any], device: torch.device) -> None:
    """Go on from what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
