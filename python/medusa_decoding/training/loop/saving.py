"""Training checkpoints: everything that a run needs to resume, written completely or not at all."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from medusa_decoding.files import read_json_object, whole_folder, write_json

_NAME = re.compile(r"step-(\d{6,})")
_LEFT = re.compile(r"step-\d{6,}|\.step-.*\.(tmp|old)")
WEIGHTS, OPTIMISER, STATE = "weights.pt", "optimiser.pt", "state.json"
BEST = "best-0.pt"  # as earlier versions named it


class Checkpoints:
    """The last checkpoints of a run, as many as it is to `keep`; the main process reads and writes them.

    Each is a folder `step-000200`; one without its `state.json` is being removed.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep

    def all(self) -> list[Path]:
        """Return the complete ones, oldest first."""
        found = [path.parent for path in self.folder.glob(f"step-*/{STATE}") if _NAME.fullmatch(path.parent.name)]
        return sorted(found, key=lambda path: int(path.name.partition("-")[2]))

    def newest(self) -> Path | None:
        """Return the newest complete one."""
        return next(reversed(self.all()), None)

    def last_good(self) -> str:
        """Return which one is the newest as text, for an error."""
        newest = self.newest()
        return "there is no checkpoint yet" if newest is None else f"the last good checkpoint is {newest}"

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

        If it cannot be written (a full disk, say), earlier checkpoints stay, and the error names the newest.
        """
        with self._named_errors():
            for left in {*self.folder.glob("*step-*")} - {*self.all()}:
                if _LEFT.fullmatch(left.name):  # of a run that was killed
                    shutil.rmtree(left)
            with whole_folder(self.folder / f"step-{step:06d}", replace=True) as staging:
                if best is not None:
                    torch.save(dict(best), staging / BEST)
                torch.save(dict(weights), staging / WEIGHTS)
                torch.save(dict(optimiser), staging / OPTIMISER)
                write_json(staging / STATE, state)
            for old in self.all()[: -self.keep]:
                (old / STATE).unlink()  # first: half of a checkpoint must not count as one
                shutil.rmtree(old, ignore_errors=True)

    @contextlib.contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:  # torch's writer has its own errors for a full disk
            free = ""
            with contextlib.suppress(OSError):  # torch's messages do not mention a full disk
                free = f"; {shutil.disk_usage(self.folder).free / 2**20:,.0f} MiB are free there"
            raise OSError(
                f"{self.folder}: the checkpoint could not be written ({error}{free}); {self.last_good()}"
            ) from error

    def load(self, path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Read the weights, the optimiser and the best weights."""

        def read(name: str) -> dict[str, Any]:
            try:
                return dict(torch.load(path / name, map_location="cpu", weights_only=True))
            except Exception as error:  # torch.load raises many types on damaged bytes
                raise damaged(path, f"{name}: {error}") from error

        weights = read(WEIGHTS)
        return weights, read(OPTIMISER), read(BEST) if (path / BEST).is_file() else weights


def damaged(path: Path, reason: str) -> ValueError:
    """Return the error for a checkpoint that a run cannot resume from."""
    return ValueError(
        f"{path}: expected a complete checkpoint, got a damaged one ({reason}); remove this folder to go on from the "
        "one before it, or begin again in another output folder"
    )


def read_state(path: Path) -> dict[str, Any]:
    """Read the state given to `Checkpoints.save`."""
    try:
        return read_json_object(path / STATE)
    except (OSError, ValueError) as error:
        raise damaged(path, str(error)) from error
