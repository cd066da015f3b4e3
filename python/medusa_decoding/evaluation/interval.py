"""Ratios of sums over prompts, with an interval that says how much another draw of prompts would change them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES, SEED, LEVEL = 2000, 0, 0.95
WORDS = f"{LEVEL:.0%}, percentile bootstrap over prompts, {RESAMPLES} resamples, seed {SEED}"


@dataclass(frozen=True)
class Interval:
    """A figure and where it lies.

    Attributes:
        value: over all prompts.
        low, high: the ends of the 95 % interval; None where there is one prompt only.
    """

    value: float
    low: float | None
    high: float | None

    def to_json(self) -> dict[str, float | None]:
        """Return the three by name."""
        return {"value": self.value, "low": self.low, "high": self.high}


def bootstrap(columns: Sequence[Sequence[float]], statistic: Callable[[np.ndarray], np.ndarray]) -> Interval | None:
    """Return a statistic of sums over prompts, with its percentile bootstrap interval.

    Whole prompts are drawn, with all their columns together, as many as there are. The numbers drawn are the same in
    every call.

    Args:
        columns: what to add up, [prompts, C].
        statistic: takes sums [C, ...] to [...].

    Returns:
        None where the statistic is not finite (nothing to divide by).
    """
    table = np.asarray(columns, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(table.sum(0)))
        if not math.isfinite(value):
            return None
        if len(table) < 2:
            return Interval(value, None, None)
        # How often each prompt is drawn, rather than which: the same draws in less memory.
        drawn = np.random.default_rng(SEED).multinomial(len(table), np.full(len(table), 1 / len(table)), RESAMPLES)
        found = statistic((drawn @ table).T)
    outside = (1 - LEVEL) / 2
    low, high = np.quantile(found[np.isfinite(found)], [outside, 1 - outside])
    return Interval(value, float(low), float(high))


def ratio(columns: Sequence[Sequence[float]]) -> Interval | None:
    """Sum of the first column over that of the second."""
    return bootstrap(columns, lambda sums: sums[0] / sums[1])


def ratio_of_rates(columns: Sequence[Sequence[float]]) -> Interval | None:
    """First over second sum, over third over fourth: tokens a second of one way over those of another."""
    return bootstrap(columns, lambda sums: (sums[0] / sums[1]) / (sums[2] / sums[3]))


def ratio_of_two(first: Sequence[Sequence[float]], second: Sequence[Sequence[float]]) -> Interval:
    """Return the ratio of two rates that were found on different prompts, with its 95 % interval.

    The prompts of each side are drawn anew without regard to the other's.
    """

    def rate(sums: np.ndarray) -> np.ndarray:
        return np.asarray(sums[0] / sums[1])

    tables = [np.asarray(rows, dtype=np.float64) for rows in (first, second)]
    value = float(rate(tables[0].sum(0)) / rate(tables[1].sum(0)))
    if min(map(len, tables)) < 2:
        return Interval(value, None, None)
    drawn = []
    for number, table in enumerate(tables):
        chooser = np.random.default_rng(SEED + number)
        often = chooser.multinomial(len(table), np.full(len(table), 1 / len(table)), RESAMPLES)
        with np.errstate(divide="ignore", invalid="ignore"):
            drawn.append(rate((often @ table).T))
    ratios = drawn[0] / drawn[1]
    outside = (1 - LEVEL) / 2
    low, high = np.quantile(ratios[np.isfinite(ratios)], [outside, 1 - outside])
    return Interval(value, float(low), float(high))
