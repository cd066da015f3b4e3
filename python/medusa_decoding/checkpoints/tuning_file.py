"""`tuning.json` of a checkpoint of heads: what was measured on which device with which model, and what was chosen.

Written by `medusa tune`, read by `MedusaModel.from_pretrained`. It counts only where it was made: another device, other
weights, another dtype or backend refuse it, and say which. Versions of libraries are kept, but refuse nothing. This
module does not know where the file stands (see `places`), how steps are timed (see `latency`), nor which tree is best
(see `choice`).
"""

from __future__ import annotations

import json
import logging
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from medusa_decoding.checkpoints import tuning_paths
from medusa_decoding.decode.adaptive.step_times import KEPT, StepTimes
from medusa_decoding.decode.runtime.steps import resolve_backend
from medusa_decoding.files import read_json, write_json
from medusa_decoding.provenance import device_name, fingerprint, versions
from medusa_decoding.tuning.cases import Case, case_of
from medusa_decoding.tuning.select import Accuracies, Source

if TYPE_CHECKING:
    from medusa_decoding.model import MedusaModel
    from medusa_decoding.tuning.step_timer import Latency

FILE, FORMAT = tuning_paths.FILE, 2
logger = logging.getLogger(__name__)

INDEPENDENT, WALKED = "independent", "walked"
"""How expected tokens were found: heads taken as independent, or by walking along the calibration's texts."""
LIBRARIES = ("torch", "triton", "transformers", "medusa-kernels")
"""What steps are made with."""


@dataclass(frozen=True)
class Place:
    """Where step times hold: what they may not be used without.

    Attributes:
        device: the GPU's name and sizes, or the CPU's name with the number of threads.
        dtype: of activations and cache.
        backend: how steps run.
        processes: that the model is sharded over.
        model: the base model's class and fingerprint.
        heads: their fingerprint.
    """

    device: str
    dtype: str
    backend: str
    processes: int
    model: str
    heads: str

    @classmethod
    def of(cls, model: MedusaModel) -> Place:
        """Look at a model as it is now."""
        if model.heads is None:
            raise ValueError("model: expected one with heads, got one without")
        causal = model.backbone.causal
        return cls(
            **_surroundings(model),
            model=f"{type(causal).__name__} {fingerprint(causal)}",
            heads=fingerprint(model.heads),
        )

    @property
    def here(self) -> str:
        """What step times depend on besides weights."""
        return f"{self.device}, {self.dtype}, {self.backend}, {self.processes}"

    @property
    def base_model(self) -> str:
        """The base model's fingerprint."""
        return self.model.rpartition(" ")[2]

    def differences(self, now: Place) -> list[str]:
        """Say what is not as it was, a sentence's part each: "device: tuned on A, now B"; empty where all is."""
        changed = [name for name, value in asdict(self).items() if getattr(now, name) != value]
        if "dtype" in changed:  # which the fingerprints depend on
            changed = [name for name in changed if name not in ("model", "heads")]
        return [f"{name}: tuned with {getattr(self, name)}, now {getattr(now, name)}" for name in changed]

    def still_holds(self, model: MedusaModel) -> bool:
        """Return whether a model runs where it was when it was compared with this; weights are not looked at."""
        return _surroundings(model).items() <= asdict(self).items()


@dataclass(frozen=True)
class Tuning:
    """All of a file.

    Attributes:
        place: where it holds.
        accuracies: of the heads, that trees were weighed with.
        cases: by batch and prefix, in ascending order.
        step_times: JSON of a `StepTimes`.
        versions: of libraries, by name.
        weighed: INDEPENDENT or WALKED.
        calibration: the file that accuracies and texts are of; None where they are of none.
    """

    place: Place
    accuracies: Accuracies
    cases: tuple[Case, ...]
    step_times: str
    versions: Mapping[str, str]
    weighed: str = INDEPENDENT
    calibration: Source | None = None

    @classmethod
    def of(
        cls,
        place: Place,
        accuracies: Accuracies,
        cases: Iterable[Case],
        measured: Iterable[Latency],
        weighed: str = INDEPENDENT,
        calibration: Source | None = None,
    ) -> Tuning:
        """Put together what was found."""
        times = StepTimes(*_names(place))
        for one in measured:
            for seconds in _few(one.seconds):
                times.profile(one.batch, one.rows).add(one.nodes, seconds)
        ordered = sorted(cases, key=lambda case: (case.batch, case.prefix))
        return cls(place, accuracies, tuple(ordered), times.to_json(), versions(*LIBRARIES), weighed, calibration)

    def nearest(self, batch: int, prefix: int) -> Case:
        """Return the case of the nearest batch, and of those the one of the nearest prefix, both by their ratio."""

        def distance(case: Case) -> tuple[float, float]:
            return abs(math.log2(case.batch / batch)), abs(math.log2((case.prefix + 1) / (prefix + 1)))

        return min(self.cases, key=distance)

    def times(self) -> StepTimes:
        """Return the step times, for a policy to go on with."""
        device, model = _names(self.place)
        return StepTimes.from_json(self.step_times, device=device, model=model)

    def to_json(self) -> dict[str, Any]:
        """Return all as JSON has it, with the rates that follow."""
        return {
            "format": FORMAT,
            **asdict(self.place),
            "versions": dict(self.versions),
            "accuracies": {"source": self.accuracies.source, "by_rank": self.accuracies.by_rank},
            "weighed": self.weighed,
            "calibration": None if self.calibration is None else asdict(self.calibration),
            "cases": [
                {
                    "batch": case.batch,
                    "prefix": case.prefix,
                    "rows": case.rows,
                    "nodes": case.tree.num_nodes,
                    "choices": case.tree.choices,
                    "speedup": case.chosen.rate / case.sizes[0].rate,
                    "sizes": [size.to_json() for size in case.sizes],
                }
                for case in self.cases
            ],
            "step_times": json.loads(self.step_times),
        }

    @classmethod
    def from_json(cls, values: Any) -> Tuning:
        """Read what `to_json` returned.

        Raises:
            ValueError: anything else; it says what.
        """
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            got = values.get("format") if isinstance(values, dict) else type(values).__name__
            raise ValueError(f"tuning: expected format {FORMAT}, got {got}")
        try:
            place = Place(**{part.name: values[part.name] for part in fields(Place)})
            accuracies = Accuracies(
                str(values["accuracies"]["source"]),
                [[float(value) for value in row] for row in values["accuracies"]["by_rank"]],
            )
            cases = tuple(case_of(case) for case in values["cases"])
            weighed, of_what = values["weighed"], values.get("calibration")  # which older files do not say
            found = cls(
                place,
                accuracies,
                cases,
                json.dumps(values["step_times"]),
                dict(values["versions"]),
                weighed,
                None if of_what is None else Source.from_json(of_what),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"tuning: expected device, model, accuracies, cases and step_times, got {error!r}"
            ) from error
        if not cases:
            raise ValueError("tuning: expected at least one case, got none")
        if weighed not in (INDEPENDENT, WALKED):
            raise ValueError(f"weighed: expected {INDEPENDENT} or {WALKED}, got {weighed!r}")
        found.times()
        return found

    def save(self, path: Path) -> None:
        """Write as JSON; the file appears whole or not at all."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> Tuning:
        """Read a file that `save` wrote.

        Raises:
            ValueError: another or a damaged file; it is named.
            OSError: it cannot be read.
        """
        try:
            return cls.from_json(read_json(path))
        except ValueError as error:  # what json and the decoder raise as well
            raise ValueError(f"{path}: expected a file that `medusa tune` wrote, got: {error}") from error


def load_for(path: Path, model: MedusaModel, place: Place | None = None) -> Tuning:
    """Read a file and compare it with a model as it runs here.

    Args:
        path: the file.
        model: as it runs here.
        place: of the model, where that is known already.

    Raises:
        ValueError: a damaged file, one of another device, model, dtype or backend (it names what has changed), or trees
            that the heads cannot fill.
        OSError: it cannot be read.
    """
    found = Tuning.load(path)
    changed = found.place.differences(place or Place.of(model))
    if changed:
        raise ValueError(f"{path}: {'; '.join(changed)}")
    for case in found.cases:
        model._check_tree(case.tree)
    return found


def find(folder: Path, model: MedusaModel) -> tuple[Path, Tuning] | None:
    """Find what is stored of a checkpoint's folder and holds for a model: the first of all `places`.

    Returns:
        The file and its content; None where nothing is stored.

    Raises:
        ValueError: files, none of which holds; it says why, of each.
    """
    if not tuning_paths.places(folder, ""):
        return None
    place, refused = Place.of(model), []
    for file in tuning_paths.places(folder, place.here):
        try:
            return file, load_for(file, model, place)
        except (ValueError, OSError) as error:
            refused.append(str(error))
    raise ValueError("; and ".join(refused))


def recall(path: Path, model: MedusaModel, level: int = logging.WARNING) -> Tuning | None:
    """Read a file, beside the heads or in the folder for caches, if it is there and holds for a model.

    Args:
        path: the file beside the heads.
        model: as it runs here.
        level: at which it is logged why a file does not hold, where none does.
    """
    if model.heads is None:
        return None
    try:
        found = find(path.parent, model)
    except ValueError as error:
        logger.log(level, "tuning refused (run `medusa tune` again): %s", error)
        return None
    return None if found is None else found[1]


def _surroundings(model: MedusaModel) -> dict[str, Any]:
    backbone = model.backbone
    return {
        "device": device_name(backbone.device),
        "dtype": str(backbone.dtype).removeprefix("torch."),
        "backend": str(resolve_backend(model.backend, backbone.device, backbone.peers.size)),
        "processes": backbone.peers.size,
    }


def _names(place: Place) -> tuple[str, str]:
    """Return what a `StepTimes` calls the device and the model."""
    return f"{place.device}, {place.backend}", f"{place.model}, {place.dtype}, heads {place.heads}"


def _few(seconds: Sequence[float]) -> list[float]:
    """Return as many durations as `StepTimes` keeps: evenly spaced quantiles, so that the median is that of all."""
    if len(seconds) <= KEPT:
        return list(seconds)
    between = statistics.quantiles(seconds, n=KEPT + 1, method="inclusive")
    return between[:KEPT]
