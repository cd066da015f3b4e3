"""Figures of generations for people and for programs, made from the metrics of `generate(metrics=True)`."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from medusa_decoding.generation.metrics import GenerationMetrics


def total(metrics: Sequence[GenerationMetrics]) -> GenerationMetrics:
    """Add up generations, at least one; figures per step and per depth are left out."""
    summed = ("prompt_tokens", "new_tokens", "steps", "prefill_seconds", "decode_seconds")
    sums: dict[str, Any] = {name: sum(getattr(one, name) for one in metrics) for name in summed}
    for name in ("accepted_histogram", "tree_nodes"):
        counted: Counter[int] = sum((Counter(getattr(one, name)) for one in metrics), Counter())
        sums[name] = dict(sorted(counted.items()))
    return GenerationMetrics(depth_acceptance=[], step_seconds=[], **sums)


def as_json(metrics: GenerationMetrics, reused: int | None = None) -> dict[str, Any]:
    """Return the figures of a generation as JSON has them: null if there is nothing to divide by.

    `reused` tokens of the prompt were in the cache; None without a cache across prompts.
    """
    figures = asdict(metrics) | ({} if reused is None else {"reused_tokens": reused})
    del figures["step_seconds"]
    return figures | {name: number_or_null(getattr(metrics, name)) for name in ("tokens_per_step", "tokens_per_second")}


def number_or_null(value: float) -> float | None:
    """Return a number, or None for NaN, which JSON does not have."""
    return None if math.isnan(value) else value


def as_text(metrics: GenerationMetrics, reused: int | None = None) -> str:
    """Return the same figures for a person, in a few lines."""
    cached = "" if reused is None else f", {reused} of them reused from the cache"
    lines = [
        f"{metrics.new_tokens} tokens in {metrics.steps} steps, {metrics.tokens_per_step:.2f} per step, "
        f"{metrics.tokens_per_second:.1f} tokens/s",
        f"prefill {metrics.prefill_seconds:.3f} s ({metrics.prompt_tokens} prompt tokens{cached}), "
        f"decode {metrics.decode_seconds:.3f} s",
    ]
    if metrics.steps:
        lines.append("accepted draft tokens per step: " + _shares(metrics.accepted_histogram))
    if metrics.depth_acceptance:
        depths = ", ".join(f"{depth}: {rate:.0%}" for depth, rate in enumerate(metrics.depth_acceptance, 1))
        lines.append(f"steps that accepted at least so many: {depths}")
    if len(metrics.tree_nodes) > 1:
        lines.append("nodes of the trees: " + _shares(metrics.tree_nodes))
    return "\n".join(lines)


def _shares(counts: dict[int, int]) -> str:
    """Say how often each number came up, in steps and in percent."""
    everything = sum(counts.values())
    return ", ".join(f"{value}: {count} ({count / everything:.0%})" for value, count in counts.items())
