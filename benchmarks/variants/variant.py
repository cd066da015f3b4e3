"""One variant: what is trained, and its training run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.evaluation.interval import Interval
from medusa_decoding.training import Config, train

BASE = CHECKPOINT / "base"
Say = Callable[[str], None]
Figures = dict[str, Any]


@dataclass(frozen=True)
class Variant:
    """One row or column of a table.

    Attributes:
        name: how the table names it.
        sections: of a `training.Config`, over those that all variants share; None for the model as it is.
        has_heads: whether its heads are measured.
        source: name of the variant that it is a conversion of.
        storage: what the heads' projections are converted to.
    """

    name: str
    sections: Mapping[str, Any] | None = None
    has_heads: bool = True
    source: str | None = None
    storage: Literal["int8", "fp8"] | None = None

    @property
    def folder(self) -> str:
        """Name of the folder that it is trained in."""
        return file_name(self.source or self.name)


def config(variant: Variant, shared: Mapping[str, Any], folder: Path) -> Config:
    """Return the training run of a variant; what neither it nor `shared` says is the method's own (appendix B)."""
    values = dict(shared)
    for name, section in (variant.sections or {}).items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, Mapping) else section
    values["output"] = {"folder": str(folder), "trackers": [], "keep_checkpoints": 1}
    return Config.of(values)


def train_all(variants: Sequence[Variant], shared: Mapping[str, Any], out: Path, say: Say) -> None:
    """Train every variant in its folder of `out`, unless an earlier call has."""
    for variant in variants:
        folder = out / variant.folder
        if variant.sections is not None and not (folder / "heads").is_dir():
            say(f"training: {variant.name}")
            train(config(variant, shared, folder), resume=True, announce=say)


def file_name(name: str) -> str:
    return name.replace(", ", "-").replace(" ", "-").replace("'", "").lower()


def chosen(variants: Sequence[Variant], names: Sequence[str]) -> list[Variant]:
    """Return the variants with these names; all without any."""
    known = [variant.name for variant in variants]
    for name in names:
        if name not in known:
            raise ValueError(f"--only: expected some of {', '.join(known)}, got {name}")
    return [variant for variant in variants if not names or variant.name in names]


def as_json(found: Interval | None) -> dict[str, float | None] | None:
    return None if found is None else asdict(found)
