"""Metrics in Prometheus' form: requests and latencies, and the engine's own counts."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from medusa_decoding.serving.engine import Engine

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


class Metrics:
    """The metrics of one server, in a registry of its own.

    Attributes:
        requests: generation requests by path and outcome: completed, cancelled (the client left), invalid, refused (the
            queue was full), timeout, failed.
        first_token: seconds from a request to each choice's first token.
        token_time: seconds per token after the first, per choice.
        latency: seconds from a request to the end of all its choices.
    """

    def __init__(self, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self.requests = Counter(
            "medusa_requests", "Generation requests by outcome.", ("path", "outcome"), registry=self._registry
        )
        self.first_token = self._histogram("time_to_first_token", "Seconds to the first token.", _SECONDS)
        self.token_time = self._histogram("time_per_token", "Seconds per token after the first.", _TOKEN_SECONDS)
        self.latency = self._histogram("request_latency", "Seconds to the end of a completed request.", _SECONDS)
        self._registry.register(_EngineCounts(engine))

    def _histogram(self, name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"medusa_{name}_seconds", words, buckets=buckets, registry=self._registry)

    def count(self, path: str, outcome: str) -> None:
        """Count a generation request; other paths are not counted."""
        if path in ("/v1/chat/completions", "/v1/completions"):
            self.requests.labels(path, outcome).inc()

    def text(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics and their content type: OpenMetrics if `Accept` names it, else the classic text."""
        encode, kind = choose_encoder(accept)
        return encode(self._registry), kind


def outcome(status: int) -> str:
    """Return the outcome of a request that failed with a status."""
    return {429: "refused", 504: "timeout"}.get(status, "failed" if status >= 500 else "invalid")


class _EngineCounts(Collector):
    """Reads the engine's counts when metrics are asked for."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's metrics."""
        stats = self._engine.stats()
        for name, words, gauge in (
            ("running_rows", "Generations that run now.", stats.running),
            ("queue_length", "Generations that wait.", stats.waiting),
            ("slots", "Generations that may run at once.", stats.slots),
        ):
            yield GaugeMetricFamily(f"medusa_{name}", words, value=gauge)
        for name, words, count in (
            ("steps", "Decoding steps.", stats.steps),
            ("prompt_tokens", "Tokens of prompts.", stats.prompt_tokens),
            ("reused_tokens", "Tokens of prompts whose keys and values were cached.", stats.reused_tokens),
            ("new_tokens", "Tokens written.", stats.new_tokens),
            ("step_seconds", "Seconds in decoding steps.", stats.step_seconds),
            ("prefill_seconds", "Seconds in prefills.", stats.prefill_seconds),
        ):
            yield CounterMetricFamily(f"medusa_{name}", words, value=count)
        nodes = CounterMetricFamily("medusa_steps_by_tree_nodes", "Decoding steps by nodes per row.", labels=["nodes"])
        for number, count in sorted(stats.tree_nodes.items()):
            nodes.add_metric([str(number)], count)
        yield nodes
        finished = CounterMetricFamily("medusa_generations", "Generations by how they ended.", labels=["finish"])
        for reason, count in sorted(stats.finished.items()):
            finished.add_metric([reason], count)
        yield finished
        yield _acceptance(stats.accepted_histogram)


def _acceptance(counts: dict[int, int]) -> HistogramMetricFamily:
    buckets, total = [], 0
    for length in range(max(counts, default=0) + 1):
        total += counts.get(length, 0)
        buckets.append((str(float(length)), total))
    whole = sum(length * count for length, count in counts.items())
    words = "Accepted draft tokens per step and row."
    return HistogramMetricFamily(
        "medusa_accepted_draft_tokens", words, buckets=[*buckets, ("+Inf", total)], sum_value=whole
    )
