"""How often each head is right: find, read and check the accuracies that are stored with a checkpoint of heads.

They come from `medusa calibrate` (counted on the user's prompts), else from the trainer (counted on held-out data),
else from the accuracies published for Vicuna-7B's heads.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_decoding.files import parse_json, read_json
from medusa_decoding.trees import published

if TYPE_CHECKING:  # files of accuracies are read without torch
    from medusa_decoding.heads import MedusaHeads

CALIBRATION, MEASURED, PUBLISHED = "calibration.json", "measured.json", "published"
"""Sources: the file of `medusa calibrate`, the file of the trainer (both next to the heads), other heads' figures."""
ROUNDING = 1e-6
"""How much the accuracies of one head may exceed 1 in all."""


@dataclass(frozen=True)
class CalibrationSource:
    """The calibration file that accuracies and texts were read from.

    Attributes:
        path: the file's name if it is next to the heads, else its absolute path.
        hash: of its content.
        temperature: at which its texts were sampled, 0 for greedy texts; None if the file does not say.
        checked: whether the file is known to be of these heads and this base model. Fingerprints depend on the dtype,
            so a calibration made in another dtype cannot be checked.
    """

    path: str
    hash: str
    temperature: float | None
    checked: bool

    def __str__(self) -> str:
        """Describe the file and how its texts were written."""
        if self.temperature is None:
            how = "which does not say how its texts were written"
        else:
            how = f"texts drawn at temperature {self.temperature}" if self.temperature else "greedy texts"
        return f"{self.path}, {how}"


@dataclass(frozen=True)
class Accuracies:
    """How often heads are right.

    Attributes:
        source: CALIBRATION, MEASURED or PUBLISHED.
        by_rank: by_rank[k][i] is the share of positions at which the candidate of rank i of head k is right.
        calibration: the file that they were read from, if it is a calibration.
    """

    source: str
    by_rank: list[list[float]]
    calibration: CalibrationSource | None = None

    def __str__(self) -> str:
        """Describe the source."""
        return {
            CALIBRATION: f"{CALIBRATION} (counted on prompts)",
            MEASURED: f"{MEASURED} (counted by the trainer on held-out data)",
        }.get(self.source, "published for Vicuna-7B's heads, not counted for these (see medusa calibrate)")


def default_accuracies(heads: MedusaHeads) -> Accuracies:
    """Return the accuracies published for Vicuna-7B, cut to the number and the candidates of some heads."""
    vicuna_7b = published.ACCURACIES["vicuna-7b-v1.3"]
    return Accuracies(PUBLISHED, [row[: heads.num_candidates] for row in vicuna_7b[: heads.num_heads]])


def find_accuracies(folder: Path, heads: MedusaHeads, base_model: str | None = None) -> Accuracies | None:
    """Read the accuracies stored next to a checkpoint of heads; None if there are none.

    Ranks that these heads, as loaded, do not have are left out, those of other heads or another base model are a
    `ValueError`. `base_model` is the fingerprint of the base model as loaded.
    """
    for source in (CALIBRATION, MEASURED):
        if (folder / source).is_file():
            return load_accuracies(folder / source, source, folder, heads, base_model)
    return None


def load_accuracies(
    file: Path, source: str, folder: Path, heads: MedusaHeads, base_model: str | None = None
) -> Accuracies:
    """Read the accuracies of one file; `source` says which kind of file it is, the rest is as in `find_accuracies`."""
    from medusa_decoding.provenance import fingerprint

    rows = read_accuracies(file)
    if len(rows) != heads.num_heads:
        raise ValueError(f"{file}: expected accuracies of {heads.num_heads} heads, got {len(rows)}")
    content = file.read_bytes()
    values = parse_json(content, file)
    made = values.get("made") if isinstance(values, dict) else None
    made = made if isinstance(made, dict) else {}
    settings = made["settings"] if isinstance(made.get("settings"), dict) else {}
    same_dtype = settings.get("dtype") == str(heads.w1.dtype).removeprefix("torch.")
    if same_dtype:
        if "heads" in made and made["heads"] != fingerprint(heads):
            raise ValueError(f"{file}: expected a calibration of these heads, got one of others")
        if base_model is not None and made.get("base_model", base_model) != base_model:
            raise ValueError(f"{file}: expected texts of this base model, got those of another")
    calibration = None
    if source == CALIBRATION:
        is_next_to_heads = file.resolve().parent == folder.resolve()
        calibration = CalibrationSource(
            file.resolve().name if is_next_to_heads else str(file.resolve()),
            hashlib.blake2b(content, digest_size=8).hexdigest(),
            settings.get("temperature"),
            same_dtype and "heads" in made and "base_model" in made,
        )
    return Accuracies(source, [row[: max_ranks(heads)] for row in rows], calibration)


def read_accuracies(path: str | Path) -> list[list[float]]:
    """Read accuracies of heads, one list per head with one accuracy per rank.

    Args:
        path: JSON in one of these forms: a list of lists; an object with such a list as `accuracies`; an object with
            counts, `hits` (per head, the targets among the n most likely candidates, n from 1) and `total` (targets per
            head); an object with such an object as `accuracy`.

    Accuracies of the n most likely candidates together are a `ValueError`.
    """
    values = read_json(path)
    try:
        if isinstance(values, dict) and isinstance(values.get("accuracy"), dict):
            values = values["accuracy"]
        if isinstance(values, dict) and "accuracies" in values:
            values = values["accuracies"]
        if isinstance(values, dict):
            rows = [
                [(more - less) / total for less, more in zip([0, *hits], hits, strict=False)]
                for hits, total in zip(values["hits"], values["total"], strict=True)
            ]
        else:
            rows = [[float(value) for value in row] for row in values]
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise ValueError(
            f"{path}: expected one list of accuracies per head, or counts (hits, total), in JSON; got {error!r}"
        ) from error
    if not rows or not all(rows) or not all(0 <= value <= 1 for row in rows for value in row):
        raise ValueError(f"{path}: expected one list per head of accuracies in [0, 1], got {rows!r:.80}")
    for head, row in enumerate(rows, start=1):
        if sum(row) > 1 + ROUNDING:
            raise ValueError(
                f"{path}: expected accuracies of each rank alone, which are shares of one whole, got {sum(row):.3f} in "
                f"all for head {head} (are they those of the n most likely together?)"
            )
    return rows


def max_ranks(heads: MedusaHeads) -> int:
    """Return how many candidates of a head can be ranked."""
    from medusa_decoding.heads import MAX_TOP_K

    return min(MAX_TOP_K, heads.num_candidates)
