"""Training checkpoints: everything that a run goes on from, written whole or not at all.

A checkpoint is a folder `step-000200` with the trained weights, the optimiser's and the schedule's state, the random
numbers of each process, and `state.json`. It is written aside and renamed at the end, so that a folder of that name is
complete; then all but the last few are removed. `state.json` has a digest of itself and one of each other file, so that
what was damaged, exchanged or edited is refused. This module does not know models or losses.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import random
import re
import secrets
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from medusa_decoding.files import read_json_object
from medusa_decoding.training.loop.processes import Processes

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
        except (OSError, RuntimeError) as caught:  # torch's writer has errors of its own for a full disk
            error = self._named(caught)
        try:
            processes.together(error)
            try:
                if processes.main:
                    _write_state(staging, state)
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

    def load(self, path: Path, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Read the weights, the optimiser and this process's random numbers; all processes fail if one does.

        Args:
            path: of the checkpoint.
            state: what `read_state` has read from it.

        Raises:
            ValueError: a damaged checkpoint; it names the file.
        """
        return self.processes.each(lambda: self._load(path, state))

    def _load(self, path: Path, state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        own = f"random-{self.processes.rank}.pt"
        found: list[dict[str, Any]] = []
        for name in (WEIGHTS, OPTIMISER, own):
            try:
                if self.processes.main or name == own:
                    _check_records(path / name, state["files"].get(name))
                found.append(dict(torch.load(path / name, map_location="cpu", weights_only=True)))
            except Exception as error:  # torch.load raises many types on damaged bytes
                raise damaged(path, f"{name}: {error}") from error
        weights, optimiser, numbers = found
        return weights, optimiser, numbers


def damaged(path: Path, reason: str) -> ValueError:
    """Return what is said of a checkpoint that a run cannot go on from."""
    return ValueError(
        f"{path}: expected a complete checkpoint, got a damaged one ({reason}); remove this folder to go on from the "
        "one before it, or begin anew in another output folder"
    )


def read_state(path: Path) -> dict[str, Any]:
    """Read what a checkpoint says of itself.

    Returns:
        What was given to `Checkpoints.save`, and `files`, the marks of its files by name.

    Raises:
        ValueError: a damaged file, one that was changed since, or one of a version that wrote no digest.
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


def check_weights(path: Path, weights: Mapping[str, Any], expected: Mapping[str, torch.Tensor]) -> None:
    """Refuse weights that are not those of the run.

    Args:
        path: of the checkpoint, for messages.
        weights: as read from it.
        expected: the run's own by name, of the same shapes and dtypes.

    Raises:
        ValueError: other names, shapes or dtypes, or values that are not finite.
    """
    if weights.keys() != expected.keys():
        apart = min(map(str, weights.keys() ^ expected.keys()))
        raise damaged(path, f"{WEIGHTS}: expected the weights that this run trains, got others, {apart:.80} say")
    try:
        for name, wanted in expected.items():
            _check_tensor(name, weights[name], tuple(wanted.shape), wanted.dtype)
    except ValueError as error:
        raise damaged(path, f"{WEIGHTS}: {error}") from error


def check_optimiser(
    path: Path, saved: Mapping[str, Any], optimiser: torch.optim.Optimizer, schedule: Any, step: int
) -> None:
    """Refuse the state of another optimiser or schedule, or of another step; weights that are divided are not covered.

    Args:
        path: of the checkpoint, for messages.
        saved: as read from it: `optimiser` and `schedule`.
        optimiser: the run's, fresh.
        schedule: the run's, fresh.
        step: how many steps of the stage are done.

    Raises:
        ValueError: other groups, settings, shapes or rates, or values that are not finite.
    """
    try:
        rates, groups, states = saved["schedule"], saved["optimiser"]["param_groups"], saved["optimiser"]["state"]
        if rates["last_epoch"] != step or rates["base_lrs"] != schedule.base_lrs:
            raise ValueError(f"the schedule is not that of step {step}")
        due = [rate * factor(step) for rate, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
        for group, fresh, rate in zip(groups, optimiser.state_dict()["param_groups"], due, strict=True):
            other = [name for name, value in fresh.items() if name != "lr" and group.get(name, value) != value]
            if other or not math.isclose(group["lr"], rate, rel_tol=1e-9):
                raise ValueError(f"a group has another {(*other, 'lr')[0]}")
        shapes = {
            number: tuple(weight.shape)
            for group, held in zip(groups, optimiser.param_groups, strict=True)
            for number, weight in zip(group["params"], held["params"], strict=True)
        }
        for number, values in states.items():
            for name, value in values.items():
                if name in ("exp_avg", "exp_avg_sq"):
                    _check_tensor(f"{name} of {number}", value, shapes[number], value.dtype)
                elif isinstance(value, torch.Tensor) and not _is_finite(value):
                    raise ValueError(f"{name} of {number} is not finite")
        own = {"step", "exp_avg", "exp_avg_sq"} if type(optimiser) is torch.optim.AdamW else set()
        if any(not own <= values.keys() or not 0 <= int(values.get("step", 0)) <= step for values in states.values()):
            raise ValueError(f"a weight's state is not that of step {step}")
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise damaged(path, f"{OPTIMISER}: {error!r:.200}") from error


def _check_tensor(name: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided or value.is_meta:
        raise ValueError(f"{name}: expected a tensor, got {type(value).__name__}")
    if tuple(value.shape) != shape or value.dtype != dtype:
        raise ValueError(f"{name}: expected {dtype} {list(shape)}, got {value.dtype} {list(value.shape)}")
    if not _is_finite(value):
        raise ValueError(f"{name}: expected finite values, got others")


def _is_finite(value: torch.Tensor) -> bool:
    # A tensor that repeats a small storage could ask for any amount of memory.
    stored = value.numel() * value.itemsize <= value.untyped_storage().nbytes()
    return stored and bool(torch.isfinite(value).all())


def _write_state(folder: Path, state: Mapping[str, Any]) -> None:
    """Write what a checkpoint says of itself, beside its other files."""
    marks = {file.name: _mark(file) for file in sorted(folder.glob("*.pt"))}
    values = json.loads(json.dumps({**state, "files": marks}))  # as it is read again
    (folder / STATE).write_text(json.dumps(values | {"digest": _digest(values)}, indent=1) + "\n", encoding="utf-8")


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=16).hexdigest()


def _mark(file: Path) -> str:
    """Return a digest of a torch file's list of records. It has their checksums, so that the file need not be read."""
    with zipfile.ZipFile(file) as records:
        listed = [(record.filename, record.file_size, record.CRC) for record in records.infolist()]
    return hashlib.blake2b(repr(listed).encode(), digest_size=16).hexdigest()


def _check_records(file: Path, mark: str | None) -> None:
    """Raise `ValueError` unless a file is the one that was marked, byte for byte; torch itself checks no sums."""
    if mark is None or _mark(file) != mark:
        raise ValueError("not the file that the run has written")
    with zipfile.ZipFile(file) as records:
        if any(record.compress_type != zipfile.ZIP_STORED for record in records.infolist()):
            raise ValueError("compressed records, which the run does not write")
        broken = records.testzip()
    if broken is not None:
        raise ValueError(f"another checksum in {broken}")


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
    """Go on from what `random_state` returned.

    Raises:
        Exception: of several types, if it is not that.
    """
    kind, keys, *rest = state["numpy"]
    for given, shape in ((state["torch"], torch.get_rng_state().shape), (keys, (624,))):
        if given.shape != shape:  # before it is copied
            raise ValueError(f"expected {list(shape)} random numbers, got {list(given.shape)}")
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
