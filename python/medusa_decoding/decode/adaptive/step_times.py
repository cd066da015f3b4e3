"""StepTimes: how long a step takes on this device, by number of nodes, batch and cache rows.

Fed by the steps of running generations, or by an explicit measurement; kept with the model, and beside its checkpoint
as JSON. It does not know what a step commits, nor who runs it.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from medusa_decoding.files import parse_json
from medusa_decoding.trees.tree import Tree

KEPT = 9
"""Samples a size that the median is taken of, the latest ones."""
TRUSTED = 3
"""Samples from which on a size speaks for itself alone."""
HEADS_COST = 0.1
DOUBLING_COST = 0.05
"""What trees are hoped to cost before any was timed: a tenth of a plain step for the heads, a twentieth a doubling."""


class Profile:
    """Step times of one batch size and one number of cache rows.

    A size's time is the lower median of its last samples: slow outliers (a scheduler, a collector) do not move it, and
    of two samples the faster one counts. While a size has fewer than `TRUSTED` samples, what the other sizes let expect
    counts as one more. A size without samples is interpolated in the number of nodes; above the largest known one,
    extrapolated by the growth between the two largest known trees, and by a hopeful constant where only one is known:
    what looks too good is tried and thereby timed, what looks too bad never is.

    Args:
        seeds: times of another number of cache rows at the same batch size, by nodes: believed, scaled to the first own
            sample, until there are own ones.
    """

    def __init__(self, seeds: dict[int, float] | None = None) -> None:
        self.version = 0
        self.checks = 0
        self._samples: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._bounds: dict[int, float] = {}
        self._seeds = dict(seeds or {})
        self._scale = 1.0

    def add(self, nodes: int, seconds: float, first: bool = False) -> None:
        """Take one step's duration.

        Args:
            nodes: nodes of the step's tree, root included.
            seconds: its duration.
            first: whether it was the first such step on its state, which may have made or warmed up something. That
                only adds time, so it counts where it is faster than believed, and where a second first step of a size
                never timed otherwise has come.
        """
        samples = self._samples.get(nodes)
        if first and samples is None and nodes not in self._bounds:
            self._bounds[nodes] = seconds
            self.version += 1
            return
        if first and samples is not None and seconds >= self._medians[nodes]:
            return
        if samples is None:
            samples = self._samples[nodes] = deque(maxlen=KEPT)
            seconds = min(seconds, self._bounds.get(nodes, seconds))
        samples.append(seconds)
        self._medians[nodes] = median = sorted(samples)[(len(samples) - 1) // 2]
        if nodes in self._seeds:
            self._scale = median / self._seeds[nodes]
        self.version += 1

    def samples(self, nodes: int) -> int:
        """Return how many own samples a size has."""
        return len(self._samples.get(nodes, ()))

    def known(self) -> dict[int, float]:
        """Return the times by nodes that rest on samples, or on those of another number of cache rows."""
        return {nodes: seconds * self._scale for nodes, seconds in self._seeds.items()} | self._medians

    def kept(self) -> dict[int, list[float]]:
        """Return the own samples by nodes, oldest first."""
        return {nodes: list(samples) for nodes, samples in self._samples.items()}

    def seconds(self, nodes: int, known: dict[int, float] | None = None) -> float | None:
        """Return the believed duration of a step; None as long as nothing at all is known.

        Args:
            nodes: nodes of the step's tree, root included.
            known: what `known` returns, for callers that ask for many sizes.
        """
        samples = self._samples.get(nodes, ())
        if len(samples) >= TRUSTED:
            return self._medians[nodes]
        expected = self.expected(nodes, known)
        if nodes in self._bounds and not samples:
            return min(self._bounds[nodes], expected) if expected is not None else None
        pool = sorted(samples if expected is None else (*samples, expected))
        return pool[(len(pool) - 1) // 2] if pool else None

    def at_risk(self, nodes: int, known: dict[int, float] | None = None) -> float | None:
        """Return the duration to reckon with where a loss has to stay small.

        As `seconds`; but while a tree has at most one sample, what little was seen of it, or else of the nearest tree
        (cut at three plain steps), weighs as much as what is believed, in the geometric mean.
        """
        known = self.known() if known is None else known
        believed = self.seconds(nodes, known)
        plain = self.seconds(1, known)
        if believed is None or plain is None or nodes == 1 or self.samples(nodes) > 1:
            return believed
        seen = self._bounds | known
        near = min((size for size in seen if size > 1), key=lambda size: abs(math.log2(size / nodes)), default=None)
        if near is None:
            return believed
        return max(believed, math.sqrt(min(seen[near], 3.0 * plain) * believed))

    def expected(self, nodes: int, known: dict[int, float] | None = None) -> float | None:
        """Return what the other sizes let expect of this one; None if they tell nothing."""
        known = self.known() if known is None else known
        if nodes not in self._samples and nodes in known:
            return known[nodes]
        below = sorted(size for size in known if size < nodes)
        above = min((size for size in known if size > nodes), default=None)
        if not below:
            return None  # a plain step has no heads and no tree: trees do not tell its time
        low = below[-1]
        if above is not None:
            share = (nodes - low) / (above - low)
            return known[low] + share * max(known[above] - known[low], 0.0)
        doublings = math.log2(nodes / low)
        if low == 1:
            return known[1] * (1.0 + HEADS_COST + DOUBLING_COST * doublings)
        growth = DOUBLING_COST * known[low]
        if len(below) > 1 and below[-2] > 1:
            growth = max(growth, (known[low] - known[below[-2]]) / math.log2(low / below[-2]))
        return known[low] + growth * doublings


class StepTimes:
    """Step times of one model on one device.

    Args:
        device: names the device and how steps run there, "NVIDIA H200, graph" say.
        model: names the model with its dtype and heads. Times are read back for the same names only.
    """

    def __init__(self, device: str = "", model: str = "") -> None:
        self.device = device
        self.model = model
        self._profiles: dict[tuple[int, int], Profile] = {}

    def profile(self, batch: int, rows: int) -> Profile:
        """Return the times of a batch size and a number of cache rows, made where there are none.

        A new one starts from the same batch size's with the nearest number of rows; other batch sizes tell nothing.
        """
        found = self._profiles.get((batch, rows))
        if found is None:
            near = [
                (abs(math.log2((other + 1) / (rows + 1))), other)
                for (size, other), profile in self._profiles.items()
                if size == batch and profile.known()
            ]
            seeds = self._profiles[batch, min(near)[1]].known() if near else None
            found = self._profiles[batch, rows] = Profile(seeds)
        return found

    def measure(
        self,
        run_step: Callable[[Tree], float],
        trees: Sequence[Tree],
        *,
        batch: int = 1,
        rows: int = 0,
        repeats: int = 5,
    ) -> None:
        """Time trees explicitly.

        Args:
            run_step: runs one step of a tree to its end and returns the seconds it took.
            trees: what to time.
            batch: rows that `run_step` decodes.
            rows: cache rows that it decodes in.
            repeats: timed steps a tree, in turn with the others', behind one that is not timed.

        Raises:
            ValueError: fewer than one repeat, or a duration that is not a positive number.
        """
        if repeats < 1:
            raise ValueError(f"repeats: expected at least 1, got {repeats}")
        for tree in trees:
            run_step(tree)
        found = [(tree.num_nodes, run_step(tree)) for _ in range(repeats) for tree in trees]
        for _, seconds in found:
            _check_seconds("run_step", seconds)
        profile = self.profile(batch, rows)
        for nodes, seconds in found:
            profile.add(nodes, seconds)

    def to_json(self) -> str:
        """Return all samples as JSON, with device and model."""
        times = [
            {"batch": batch, "rows": rows, "nodes": nodes, "seconds": seconds}
            for (batch, rows), profile in sorted(self._profiles.items())
            for nodes, seconds in sorted(profile.kept().items())
        ]
        return json.dumps({"device": self.device, "model": self.model, "step_times": times}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str, *, device: str, model: str) -> StepTimes:
        """Read what `to_json` returned.

        Raises:
            ValueError: times of another device or model, or anything that is not such JSON; it says what.
        """
        data = parse_json(text, "step times")
        if not isinstance(data, dict):
            raise ValueError(f"step times: expected an object, got {type(data).__name__}")
        for name, wanted in (("device", device), ("model", model)):
            if data.get(name) != wanted:
                raise ValueError(f"step times: expected {name} {wanted!r}, got {data.get(name)!r}")
        times = cls(device, model)
        for batch, rows, nodes, seconds in _checked_entries(data.get("step_times")):
            # Before any is made, so that none is seeded by another.
            profile = times._profiles.setdefault((batch, rows), Profile())
            for value in seconds:
                profile.add(nodes, value)
        return times


def _checked_entries(entries: Any) -> Iterable[tuple[int, int, int, list[float]]]:
    if not isinstance(entries, list):
        raise ValueError(f"step_times: expected a list, got {type(entries).__name__}")
    checked = []
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("seconds"), list):
            raise ValueError(f"step_times: expected batch, rows, nodes and a list of seconds, got {entry!r}")
        sizes = []
        for name, least in (("batch", 1), ("rows", 0), ("nodes", 1)):
            value = entry.get(name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"step_times: expected {name} of at least {least}, got {value!r}")
            sizes.append(value)
        for seconds in entry["seconds"]:
            _check_seconds("step_times", seconds)
        checked.append((sizes[0], sizes[1], sizes[2], entry["seconds"]))
    return checked


def _check_seconds(name: str, seconds: Any) -> None:
    number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not number or not math.isfinite(seconds) or seconds <= 0:
        raise ValueError(f"{name}: expected seconds above 0, got {seconds!r}")
