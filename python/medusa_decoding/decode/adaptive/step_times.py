"""StepTimes: how long a decoding step takes on this device, by number of nodes, batch size and cache rows.

`tree="auto"` fills it while it generates; `medusa tune` measures it and stores it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from medusa_decoding.files.values import Positive, WholeFrom1, validated

KEPT = 15
"""Latest samples kept per tree size."""
TRUSTED = 3
"""With fewer samples than this, a seed, or else the estimate from the next smaller size, counts as one more sample."""
RECENT, MOST_SLOWDOWN = 5, 4.0
"""Latest steps that tell how much slower than usual the machine is, and the most that is believed."""
OUTLIER, OUTLIER_MEMORY = 3.0, 32
"""How much slower than usual an outlier is, and over how many steps the share of outliers is taken."""
SETTLED, SETTLED_BY_OUTLIERS = 2, 20
"""Samples below which all may be outliers: without any in the latest steps, and so many more if all steps were some."""
HEADS_COST, DOUBLING_COST = 0.1, 0.05
"""Optimistic cost of a tree that was never timed, in steps: of the heads, and of each doubling of the nodes."""
SEEN_GROWTH = 0.5
"""Part of the timed trees' growth per doubling that is the least for a larger one."""
FEARED_GROWTH = 1.5
"""Pessimistic duration of such a tree, relative to the next smaller one."""


class Profile:
    """Step times for one batch size and one number of cache rows.

    Args:
        seeds: seconds by number of nodes, believed until there are samples.

    Attributes:
        settled: samples below which all of a size may be outliers.
        checks: how often a size was timed again that does not seem the best.
    """

    def __init__(self, seeds: Mapping[int, float] | None = None) -> None:
        self.seeds = dict(seeds or {})
        self._samples: dict[int, deque[float]] = {}
        self._slowdowns: deque[float] = deque([1.0], maxlen=RECENT)
        self._previous = self.checks = 0
        self._outliers, self._judged = 0.25, 2
        self.settled = SETTLED + int(SETTLED_BY_OUTLIERS * self._outliers)

    def observe(self, nodes: int, seconds: float) -> bool:
        """Learn from a step of a generation; return whether estimates may have changed.

        What counts is how sizes compare, but they are timed at different moments, and other programs may slow the
        machine down meanwhile. So a sample is divided by the slowdown that all of the latest steps had at least, and is
        only taken when the size has changed: a run of steps of one size tells nothing about the others. Nor does a step
        that is faster than usual: its size may have been timed by outliers.
        """
        trusted = self.samples(nodes) >= TRUSTED
        repeated, self._previous = nodes == self._previous, nodes
        slowdown = None if trusted and repeated else min(self._slowdowns)
        if trusted or nodes in self.seeds:
            usual = _low(self._samples.get(nodes) or [self.seeds[nodes]])
            self._slowdowns.append(min(max(seconds / usual, 1.0), MOST_SLOWDOWN))
            self._judged = min(self._judged + 1, OUTLIER_MEMORY)
            self._outliers += ((seconds > OUTLIER * usual) - self._outliers) / self._judged
        before, self.settled = self.settled, SETTLED + int(SETTLED_BY_OUTLIERS * self._outliers)
        if slowdown is None:
            return self.settled != before
        self.add(nodes, seconds / slowdown)
        return True

    def add(self, nodes: int, seconds: float) -> None:
        """Add the duration of a step whose tree has `nodes` nodes, root included."""
        self._samples.setdefault(nodes, deque(maxlen=KEPT)).append(seconds)

    def samples(self, nodes: int) -> int:
        """Return how many samples a size has."""
        return len(self._samples.get(nodes, ()))

    def known(self) -> dict[int, float]:
        """Return the seconds of every size that was timed here or is seeded, by nodes."""
        return self.seeds | {nodes: _low(samples) for nodes, samples in self._samples.items()}

    def kept(self) -> dict[int, list[float]]:
        """Return the samples by nodes, oldest first."""
        return {nodes: list(samples) for nodes, samples in self._samples.items()}

    def estimates(self, sizes: Sequence[int]) -> list[tuple[float, float]]:
        """Return a hopeful and a careful estimate of a step's seconds for each size.

        The list is empty until the first size has two samples or a seed. Both are the lower quarter of the samples.
        Hopeful is never more than for a larger tree, and below `TRUSTED` samples the optimistic one counts, if what the
        smaller trees took does not speak against it: what looks good is tried and thereby timed. Careful is then the
        fastest sample. A tree that was never timed gets the careful estimate of the next larger timed one; if there is
        none, it grows by `FEARED_GROWTH` from the next smaller tree's.

        Args:
            sizes: numbers of nodes in ascending order.
        """
        found: list[tuple[float, float]] = []
        seen: list[tuple[int, float]] = []  # nodes and seconds of timed trees
        most = math.inf  # per node: a larger tree takes at most as much longer as it is larger
        timed = self.seeds.keys() | self._samples.keys()
        for place, nodes in enumerate(sizes):
            pool = sorted(self._samples.get(nodes, ()))
            careful = pool[0] if 0 < len(pool) < TRUSTED else 0.0
            if len(pool) < TRUSTED:
                if nodes in self.seeds:
                    pool.append(self.seeds[nodes])
                elif found:
                    doublings = math.log2(nodes / sizes[place - 1])
                    growth = max(DOUBLING_COST, SEEN_GROWTH * _growth(seen)) * doublings + HEADS_COST * (place == 1)
                    pool.append(found[-1][0] * (1.0 + growth))
            if len(pool) < (1 if place or nodes in self.seeds else 2):
                return []
            hopeful = _low(pool)
            careful = max(careful, hopeful)
            if nodes not in timed and place > 1:
                careful = max(careful, FEARED_GROWTH * found[-1][1])
            hopeful, careful = min(hopeful, nodes * most), min(careful, nodes * most)
            if place and self.samples(nodes) >= TRUSTED:
                most = hopeful / nodes
            found.append((hopeful, careful))
            if place and nodes in timed:
                seen.append((nodes, careful))
        fastest, feared = found[-1][0], 0.0
        for place in reversed(range(len(found))):
            hopeful, careful = found[place]
            fastest = min(fastest, hopeful)
            if sizes[place] in timed:
                feared = careful
            found[place] = fastest, feared or careful
        return found


def _growth(seen: Sequence[tuple[int, float]]) -> float:
    """Return by how much steps grow from the first to the last size, per doubling of the nodes."""
    if len(seen) < 2:
        return 0.0
    (few, fast), (many, slow) = seen[0], seen[-1]
    return max(slow / fast - 1.0, 0.0) / math.log2(many / few)


def _low(samples: Iterable[float]) -> float:
    """Return the lower quarter: what slows a step down only adds time."""
    ordered = sorted(samples)
    return ordered[(len(ordered) - 1) // 4]


class StepTimes:
    """Step times of one model on one device.

    Args:
        device: names the device and how steps run there, for example "NVIDIA H200, graph".
        model: names the model with its dtype and heads. A file is read for the same two names only.

    Attributes:
        making: the fewest seconds of a step that was compiled or captured first; 0 before there was one. The first one
            may take much longer than others, because it loads or compiles kernels. It is not stored.
    """

    def __init__(self, device: str = "", model: str = "") -> None:
        self.device = device
        self.model = model
        self.making = 0.0
        self._profiles: dict[tuple[int, int], Profile] = {}

    def profile(self, batch: int, rows: int) -> Profile:
        """Return the times for a batch size and a number of cache rows.

        Until it can tell the time of a plain step, it is seeded by the profile of the same batch size that can, with
        the nearest number of rows.
        """
        found = self._profiles.setdefault((batch, rows), Profile())
        if not found.estimates([1]):
            others = [(other, profile) for (size, other), profile in self._profiles.items() if size == batch]
            others.sort(key=lambda pair: (abs(math.log2((pair[0] + 1) / (rows + 1))), pair[0]))
            found.seeds = next((profile.known() for _, profile in others if profile.estimates([1])), {})
        return found

    def to_json(self) -> dict[str, Any]:
        """Return all samples as JSON values, with device and model."""
        times = [
            {"batch": batch, "rows": rows, "nodes": nodes, "seconds": seconds}
            for (batch, rows), profile in sorted(self._profiles.items())
            for nodes, seconds in sorted(profile.kept().items())
        ]
        return {"device": self.device, "model": self.model, "step_times": times}

    @classmethod
    def from_json(cls, values: Any, *, device: str, model: str) -> StepTimes:
        """Read what `to_json` returned; times of another device or model are a `ValueError`."""
        if not isinstance(values, dict):
            raise ValueError(f"step times: expected an object, got {type(values).__name__}")
        for name, wanted in (("device", device), ("model", model)):
            if values.get(name) != wanted:
                raise ValueError(f"step times: expected {name} {wanted!r}, got {values.get(name)!r}")
        times = cls(device, model)
        for one in validated(list[_Entry], values.get("step_times")):
            profile = times._profiles.setdefault((one.batch, one.rows), Profile())  # not seeded by another
            for seconds in one.seconds:
                profile.add(one.nodes, seconds)
        return times


@dataclass(frozen=True)
class _Entry:
    batch: WholeFrom1
    rows: Annotated[int, Field(ge=0)]
    nodes: WholeFrom1
    seconds: list[Positive]
