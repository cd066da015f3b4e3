"""`tuning.json` of a checkpoint of heads: measured step times and the trees chosen by them.

A file holds only under the conditions it was made in: another device, other weights, another dtype or backend refuse it
with a message that says which. Library versions are recorded but refuse nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, PlainValidator

from medusa_decoding.backbone.backbone import Backbone
from medusa_decoding.checkpoints.accuracies import Accuracies
from medusa_decoding.checkpoints.tuning_paths import stored_files
from medusa_decoding.decode.adaptive.step_times import StepTimes
from medusa_decoding.decode.runtime.steps import Backend, resolve_backend
from medusa_decoding.files import read_json, write_json
from medusa_decoding.files.values import Positive, WholeFrom1, validated
from medusa_decoding.heads import MAX_TOP_K, MedusaHeads
from medusa_decoding.provenance import device_name, fingerprint
from medusa_decoding.trees.tree import Tree

FORMAT = 2
TREE_FILE, SAMPLING_TREE_FILE = "medusa_tree.json", "medusa_tree_sampling.json"
"""Trees stored with heads, the second for sampling: "auto" may choose them, and `medusa tune` times them."""
UNDECIDED = "auto"
INDEPENDENT, WALKED = "independent", "walked"
"""How expected tokens are computed: as if heads were right independently, or by walking along texts."""
logger = logging.getLogger(__name__)


def _tree(choices: Any) -> Tree | Literal["auto"]:
    return "auto" if choices == UNDECIDED else Tree(choices)


Choices = Annotated[Tree, PlainValidator(Tree), Field(validation_alias="choices")]
ChoicesOrAuto = Annotated[Tree | Literal["auto"], PlainValidator(_tree), Field(validation_alias="choices")]


@dataclass(frozen=True)
class Conditions:
    """What step times depend on; they must not be used under other conditions.

    Attributes:
        device: the GPU's name and sizes, or the CPU's name with the number of threads.
        dtype: of activations and, where that is another one, of the cache.
        backend: how steps run.
        processes: number of processes that the model is sharded over.
        model: the base model's class and fingerprint; empty if it is not loaded, which `differences` leaves out.
        heads: the heads' fingerprint.
    """

    device: str
    dtype: str
    backend: str
    processes: int
    model: str
    heads: str

    @classmethod
    def current(cls, backbone: Backbone, heads: MedusaHeads, backend: Backend) -> Conditions:
        """Return the conditions that a model runs in now."""
        causal = backbone.causal_lm
        model = f"{type(causal).__name__} {fingerprint(causal)}"
        return cls(**_runtime(backbone, backend), model=model, heads=fingerprint(heads))

    @classmethod
    def without_model(
        cls, device: torch.device, dtype: torch.dtype, backend: Backend, heads: MedusaHeads
    ) -> Conditions:
        """Return the conditions that heads would run in with a base model that is not loaded, in one process."""
        return cls(**_named(device, dtype, backend, 1), model="", heads=fingerprint(heads))

    @property
    def runtime(self) -> str:
        """All but the weights."""
        return f"{self.device}, {self.dtype}, {self.backend}, {self.processes}"

    @property
    def base_model(self) -> str:
        """The base model's fingerprint."""
        return self.model.rpartition(" ")[2]

    def differences(self, now: Conditions) -> list[str]:
        """Describe each condition that has changed, such as "device: tuned with A, now B"."""
        changed = [name for name, value in asdict(self).items() if getattr(now, name) not in (value, "")]
        if "dtype" in changed:  # which the fingerprints depend on
            changed = [name for name in changed if name not in ("model", "heads")]
        return [f"{name}: tuned with {getattr(self, name)}, now {getattr(now, name)}" for name in changed]

    def still_hold(self, backbone: Backbone, backend: Backend) -> bool:
        """Return whether a model still runs in these conditions. Weights are not compared again."""
        return _runtime(backbone, backend).items() <= asdict(self).items()


@dataclass(frozen=True)
class TimedTree:
    """One tree with its expected tokens and the measured durations of its steps.

    Attributes:
        tree: the tree; `Tree([])` for plain decoding.
        tokens: expected tokens per step and row, root included.
        seconds: typical duration of a step (see `Latency.typical`).
        median: of the durations.
        low, high: quartiles of the durations.
        steps: how many steps were timed.
    """

    tree: Choices
    tokens: Positive
    seconds: Positive
    median: Positive
    low: Positive
    high: Positive
    steps: WholeFrom1

    @property
    def nodes(self) -> int:
        """Nodes of the tree, root included."""
        return self.tree.num_nodes

    @property
    def rate(self) -> float:
        """Expected tokens per second and row."""
        return self.tokens / self.seconds

    def to_json(self) -> dict[str, Any]:
        """Return all fields and the rate as JSON values."""
        figures = {part.name: getattr(self, part.name) for part in fields(self) if part.name != "tree"}
        return {"nodes": self.nodes, **figures, "tokens_per_second": self.rate, "choices": self.tree.choices}


def fastest(trees: Sequence[TimedTree]) -> TimedTree:
    """Return the tree with the most tokens per second, the smallest of equally fast ones."""
    return max(trees, key=lambda one: (one.rate, -one.nodes))


@dataclass(frozen=True)
class Case:
    """A tuning case: the tree chosen for one batch size and one prefix length.

    Attributes:
        batch: rows of the batch.
        prefix: tokens of each row before the step.
        rows: rows of the cache.
        tree: the chosen one; `Tree([])` if plain decoding is the fastest, "auto" if the times cannot tell.
        sizes: the trees it was chosen among, in ascending order of nodes; the first one is plain decoding.
        gain: how many times as fast as plain decoding the fastest other tree is, with the ends of the 95 % interval;
            None if there is no other tree or one round.
    """

    batch: WholeFrom1
    prefix: WholeFrom1
    rows: WholeFrom1
    tree: ChoicesOrAuto
    sizes: tuple[TimedTree, ...]
    gain: tuple[Positive, Positive, Positive] | None = None

    def __post_init__(self) -> None:
        known = [size.nodes for size in self.sizes]
        if known[:1] != [1] or known != sorted(known):
            raise ValueError(f"cases: expected sizes in ascending order from 1 on, got {known}")
        if isinstance(self.tree, Tree) and self.chosen is None:
            raise ValueError(f"cases: expected a tree of one of the sizes, got {self.tree.num_nodes} nodes of {known}")

    @property
    def chosen(self) -> TimedTree | None:
        """The entry of the chosen tree in `sizes`; None for "auto"."""
        return next((size for size in self.sizes if size.tree == self.tree), None)

    @property
    def fastest(self) -> TimedTree:
        """The entry with the most tokens per second, whether or not the times can tell."""
        return fastest(self.sizes)

    @property
    def speedup(self) -> float | None:
        """Expected rate of the chosen tree over that of plain decoding; None for "auto"."""
        return None if self.chosen is None else self.chosen.rate / self.sizes[0].rate

    def compared(self, timed: TimedTree) -> tuple[float, float]:
        """Return the plain steps that a timed tree's step takes, and the tokens it makes in a plain step's time."""
        plain = self.sizes[0]
        return timed.seconds / plain.seconds, timed.rate / plain.rate

    def to_json(self) -> dict[str, Any]:
        """Return all fields and the speedup as JSON values."""
        counts = {name: getattr(self, name) for name in ("batch", "prefix", "rows")}
        nodes, choices = (self.tree.num_nodes, self.tree.choices) if isinstance(self.tree, Tree) else (None, UNDECIDED)
        gain = None if self.gain is None else list(self.gain)
        chosen = {"nodes": nodes, "choices": choices, "speedup": self.speedup, "gain": gain}
        return counts | chosen | {"sizes": [size.to_json() for size in self.sizes]}


@dataclass(frozen=True)
class Tuning:
    """The content of a tuning file.

    Attributes:
        conditions: where it holds.
        accuracies: of the heads.
        cases: by batch and prefix, in ascending order.
        step_times: what `StepTimes.to_json` returned.
        versions: of libraries, by name.
    """

    conditions: Conditions
    accuracies: Accuracies
    cases: Annotated[tuple[Case, ...], Field(min_length=1)]
    step_times: dict[str, Any]
    versions: Mapping[str, str]

    @property
    def weighed(self) -> str:
        """How expected tokens were computed: WALKED along the texts of a calibration, or INDEPENDENT without one."""
        return INDEPENDENT if self.accuracies.calibration is None else WALKED

    @property
    def trees(self) -> set[Tree]:
        """Every tree that was timed."""
        return {size.tree for case in self.cases for size in case.sizes}

    def nearest(self, batch: int, prefix: int) -> Case:
        """Return the case with the nearest batch, and among those with the nearest prefix, both by their ratio."""

        def distance(case: Case) -> tuple[float, float]:
            return abs(math.log2(case.batch / batch)), abs(math.log2((case.prefix + 1) / (prefix + 1)))

        return min(self.cases, key=distance)

    def times(self) -> StepTimes:
        """Return the step times as an object that a policy may add to."""
        device, model = step_time_names(self.conditions)
        return StepTimes.from_json(self.step_times, device=device, model=model)

    def to_json(self) -> dict[str, Any]:
        """Return all fields as JSON values, with the rates computed from them."""
        source = self.accuracies.calibration
        return {
            "format": FORMAT,
            **asdict(self.conditions),
            "versions": dict(self.versions),
            "accuracies": {"source": self.accuracies.source, "by_rank": self.accuracies.by_rank},
            "weighed": self.weighed,
            "calibration": None if source is None else asdict(source),
            "cases": [case.to_json() for case in self.cases],
            "step_times": self.step_times,
        }

    @classmethod
    def from_json(cls, values: Any) -> Tuning:
        """Read what `to_json` returned; anything else is a `ValueError` that says what is wrong."""
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            got = values.get("format") if isinstance(values, dict) else type(values).__name__
            raise ValueError(f"tuning: expected format {FORMAT}, got {got}")
        accuracies = values.get("accuracies")
        if isinstance(accuracies, dict):
            accuracies = accuracies | {"calibration": values.get("calibration")}
        found = validated(cls, values | {"conditions": values, "accuracies": accuracies})
        found.times()
        return found

    def save(self, path: Path) -> None:
        """Write as JSON; the file appears whole or not at all."""
        write_json(path, self.to_json())

    @classmethod
    def load(cls, path: Path) -> Tuning:
        """Read a file that `save` wrote; another or a damaged one is a `ValueError` that names it."""
        try:
            return cls.from_json(read_json(path))
        except ValueError as error:  # what json and the decoder raise as well
            raise ValueError(f"{path}: expected a file that `medusa tune` wrote, got: {error}") from error


def load_for(path: Path, conditions: Conditions, heads: MedusaHeads) -> Tuning:
    """Read a file and check that it holds under the conditions of a model; a `ValueError` says which have changed."""
    found = Tuning.load(path)
    changed = found.conditions.differences(conditions)
    if changed:
        raise ValueError(f"{path}: {'; '.join(changed)}")
    for case in found.cases:
        if isinstance(case.tree, Tree):
            case.tree.check_fits(heads.num_heads, min(MAX_TOP_K, heads.num_candidates))
    return found


def find(folder: Path, conditions: Conditions, heads: MedusaHeads) -> tuple[Path, Tuning]:
    """Return the first of a folder's tuning files that holds under the conditions of a model, and its content.

    If none holds, a `ValueError` says why, for each file.
    """
    refused = []
    for file in stored_files(folder, conditions.runtime):
        try:
            return file, load_for(file, conditions, heads)
        except (ValueError, OSError) as error:
            refused.append(str(error))
    raise ValueError("; and ".join(refused) or f"{folder}: there is no file that `medusa tune` wrote; run it first")


def recall(folder: Path, backbone: Backbone, heads: MedusaHeads, backend: Backend, level: int) -> Tuning | None:
    """Return the tuning stored for a folder of heads that holds for a model, or None.

    If files are stored but none holds, the reasons are logged at `level`.
    """
    if not stored_files(folder):
        return None
    try:
        return find(folder, Conditions.current(backbone, heads, backend), heads)[1]
    except ValueError as error:
        logger.log(level, "tuning refused (run `medusa tune` again): %s", error)
        return None


def stored_trees(folder: Path, heads: MedusaHeads) -> dict[str, Tree]:
    """Return the trees stored with heads, by the names of their files (`TREE_FILE`, `SAMPLING_TREE_FILE`).

    A damaged file, or a tree that the heads cannot fill, is a `ValueError` that names the file. A dynamic tree or one
    with a copied branch gives a warning and is left out, because its tokens per step cannot be expected from
    accuracies.
    """
    found = {}
    for file in (folder / TREE_FILE, folder / SAMPLING_TREE_FILE):
        if not file.is_file():
            continue
        tree = Tree.load(file)
        try:
            tree.check_fits(heads.num_heads, min(MAX_TOP_K, heads.num_candidates))
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from error
        if tree.keep is None and not tree.lookup:
            found[file.name] = tree
        else:
            logger.warning('%s is not used: "auto" and `medusa tune` choose among static trees; pass it as tree=', file)
    return found


def step_time_names(conditions: Conditions) -> tuple[str, str]:
    """Return the names of device and model in a `StepTimes`."""
    device = f"{conditions.device}, {conditions.backend}"
    return device, f"{conditions.model}, {conditions.dtype}, heads {conditions.heads}"


def _runtime(backbone: Backbone, backend: Backend) -> dict[str, Any]:
    named = _named(backbone.device, backbone.dtype, backend, backbone.peers.size)
    if backbone.cache_dtype is not None:
        named["dtype"] += f", cache in {str(backbone.cache_dtype).removeprefix('torch.')}"
    if backbone.linears.rounds:
        named["dtype"] += ", activations in int8"
    return named


def _named(device: torch.device, dtype: torch.dtype, backend: Backend, processes: int) -> dict[str, Any]:
    return {
        "device": device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "backend": str(resolve_backend(backend, device, processes)),
        "processes": processes,
    }
