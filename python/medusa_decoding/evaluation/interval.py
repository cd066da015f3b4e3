"""Ratios of sums over prompts, with bootstrap intervals: how much would another sample of prompts change them?"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

RESAMPLES, SEED, LEVEL = 2000, 0, 0.95
WORDS = f"{LEVEL:.0%}, percentile bootstrap over prompts, {RESAMPLES} resamples, seed {SEED}"


@dataclass(frozen=True)
class Interval:
    """A figure with its interval.

    Attributes:
        value: over all prompts.
        low, high: the ends of the 95 % interval; None if there is only one prompt.
    """

    value: float
    low: float | None
    high: float | None


def as_text(found: Interval | None, digits: int = 3, unknown: str = "unknown") -> str:
    """Return a figure with its interval as text."""
    if found is None:
        return unknown
    ends = "" if found.low is None else f" ({found.low:.{digits}f} to {found.high:.{digits}f})"
    return f"{found.value:.{digits}f}{ends}"


def bootstrap(columns: Sequence[Sequence[float]], statistic: Callable[[np.ndarray], np.ndarray]) -> Interval | None:
    """Return a statistic of sums over prompts, with its percentile bootstrap interval.

    As many prompts as there are, each with all its columns, are drawn with replacement; every call draws the same ones.

    Args:
        columns: what to add up, [prompts, C].
        statistic: takes sums [C, ...] to [...].

    Returns:
        None if the statistic is not finite (nothing to divide by).
    """
    table = np.asarray(columns, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(statistic(table.sum(0)))
        if not math.isfinite(value):
            return None
        if len(table) < 2:
            return Interval(value, None, None)
        # How often each prompt is drawn, rather than which: the same draws in less memory.
        draws = np.random.default_rng(SEED).multinomial(len(table), np.full(len(table), 1 / len(table)), RESAMPLES)
        found = statistic((draws @ table).T)
    outside = (1 - LEVEL) / 2
    low, high = np.quantile(found[np.isfinite(found)], [outside, 1 - outside])
    return Interval(value, float(low), float(high))


def ratio(columns: Sequence[Sequence[float]]) -> Interval | None:
    """Return the sum of the first column over that of the second."""
    return bootstrap(columns, lambda sums: sums[0] / sums[1])


def ratio_of_rates(columns: Sequence[Sequence[float]]) -> Interval | None:
    """Return first over second sum, over third over fourth: tokens per second of one way over those of another."""
    return bootstrap(columns, lambda sums: (sums[0] / sums[1]) / (sums[2] / sums[3]))
