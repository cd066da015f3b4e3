"""Simulated speedups: acceleration over overhead, for batches, prefixes and tree sizes (Medusa paper, appendix G.3).

Overhead is the roofline time of a step with a tree over that of a plain step; the speedup is the number of tokens per
step over the overhead. Speculation pays if that is at least 1. It pays in ranges, because it may stop and begin again:
a longer prefix makes attention slower, which also hides the cost of the tree's rows elsewhere. Launches and kernels
count only if the device's `Attained` was fitted to them, and memory has no limit: a batch that does not fit is
simulated too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from benchmarks.simulator.acceleration import Acceleration
from benchmarks.simulator.devices import Device
from benchmarks.simulator.operators import Operator, step_operators, total_seconds
from benchmarks.simulator.shapes import HeadShape, ModelShape

Range = tuple[int, int]
MOST_BATCH = 4096
MOST_SEQUENCE = 131072


@dataclass(frozen=True)
class Point:
    """The cost and the gain of a step at one point of a sweep.

    Attributes:
        batch: sequences.
        sequence: cached rows of each.
        nodes: of the tree, root included.
        acceleration: tokens per step.
        plain_us: microseconds of a plain step.
        step_us: microseconds of the step with the tree.
    """

    batch: int
    sequence: int
    nodes: int
    acceleration: float
    plain_us: float
    step_us: float

    @property
    def overhead(self) -> float:
        """Step time over plain step time."""
        return self.step_us / self.plain_us

    @property
    def speedup(self) -> float:
        """Acceleration over overhead."""
        return self.acceleration / self.overhead


@dataclass(frozen=True)
class Simulation:
    """A model with heads on a device.

    Attributes:
        device: its peaks.
        shape: the model's sizes.
        heads: the heads' sizes; they count in steps with more than one node.
        acceleration: tokens per step by tree size.
        weight_bytes: bytes per weight; None: those of the device's dtype.
    """

    device: Device
    shape: ModelShape
    heads: HeadShape
    acceleration: Acceleration
    weight_bytes: float | None = None

    def operators(self, batch: int, sequence: int, nodes: int) -> list[Operator]:
        """Return the operators of a step; one node is a plain step."""
        return step_operators(self.shape, self.heads if nodes > 1 else None, batch, nodes, sequence)

    def step_seconds(self, batch: int, sequence: int, nodes: int) -> float:
        """Return the roofline time of a step."""
        return total_seconds(self.operators(batch, sequence, nodes), self.device, self.weight_bytes)

    def point(self, batch: int, sequence: int, nodes: int) -> Point:
        """Simulate one point.

        Raises:
            ValueError: a count below 1, or more nodes than the acceleration covers.
        """
        for name, value in (("batch", batch), ("sequence", sequence), ("nodes", nodes)):
            if value < 1:
                raise ValueError(f"{name}: expected at least 1, got {value}")
        times = [1e6 * self.step_seconds(batch, sequence, count) for count in (1, nodes)]
        return Point(batch, sequence, nodes, self.acceleration(nodes), *times)

    def sweep(self, batches: Sequence[int], sequences: Sequence[int], nodes: Sequence[int]) -> list[Point]:
        """Simulate every combination, nodes running fastest."""
        return [self.point(b, s, n) for s in sequences for b in batches for n in nodes]

    def by_nodes(self, batch: int, sequence: int) -> list[Point]:
        """Simulate every number of nodes that the acceleration covers."""
        return [self.point(batch, sequence, nodes) for nodes in range(1, self.acceleration.most_nodes + 1)]

    def paying_batches(self, sequence: int, nodes: int) -> list[Range]:
        """Return the batches to 4,096 at which a tree is not slower than plain decoding; see `paying`."""
        return paying(lambda batch: self.point(batch, sequence, nodes).speedup, MOST_BATCH)

    def paying_sequences(self, batch: int, nodes: int) -> list[Range]:
        """Return the prefixes to 131,072 at which a tree is not slower than plain decoding; see `paying`."""
        return paying(lambda sequence: self.point(batch, sequence, nodes).speedup, MOST_SEQUENCE)


def best(points: Iterable[Point]) -> Point:
    """Return the fastest point, the first of equal ones."""
    return max(points, key=lambda point: point.speedup)


def paying_nodes(points: Iterable[Point]) -> list[Range]:
    """Return the trees, of more than one node, that are not slower than plain decoding."""
    found: list[Range] = []
    for nodes in sorted(point.nodes for point in points if point.nodes > 1 and point.speedup >= 1):
        if found and found[-1][1] == nodes - 1:
            found[-1] = (found[-1][0], nodes)
        else:
            found.append((nodes, nodes))
    return found


def paying(speedup: Callable[[int], float], most: int) -> list[Range]:
    """Return the ranges, both ends included, in which a speedup is at least 1.

    It tests powers of two and bisects between two that differ, so it misses a range between two adjacent powers of two.

    Args:
        speedup: as a function of the batch or the sequence, from 1.
        most: the largest number tried.
    """
    marks = [1 << power for power in range(most.bit_length()) if 1 << power < most] + [most]
    found: list[Range] = []
    begin = None
    for last, mark in zip([None, *marks], marks, strict=False):
        pays = speedup(mark) >= 1
        if pays == (begin is not None):
            continue
        same, other = last or 0, mark
        while other - same > 1:
            middle = (same + other) // 2
            if (speedup(middle) >= 1) == pays:
                other = middle
            else:
                same = middle
        if begin is None:
            begin = other
        else:
            found.append((begin, same))
            begin = None
    return found if begin is None else [*found, (begin, most)]
