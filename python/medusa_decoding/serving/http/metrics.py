"""Metrics in Prometheus' form: requests and latencies, and the engine's own counts, many of them as vLLM names them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from medusa_decoding.serving.engine import Engine, EngineStats
from medusa_decoding.serving.slots import SHORTEST_REUSE

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_REASONS = ("stop", "length", "abort", "error", "repetition")
"""Why requests of vLLM end; it exposes all of them from the start."""

_COUNTS: tuple[tuple[str, str, Callable[[EngineStats], float | Mapping[int, int] | Mapping[str, int]]], ...] = (
    # Names (two if vLLM has the same; what ends in _total is a counter), words, value (by a label of that name).
    ("medusa_running_rows vllm:num_requests_running", "Generations that run now.", lambda s: s.running),
    ("medusa_queue_length vllm:num_requests_waiting", "Generations that wait.", lambda s: s.waiting),
    ("medusa_slots", "Generations that may run at once.", lambda s: s.slots),
    ("vllm:kv_cache_usage_perc", "Part of the KV cache that running generations use, 0 to 1.",
     lambda s: s.cached / s.capacity),
    ("medusa_steps_total", "Decoding steps.", lambda s: s.steps),
    ("medusa_prompt_tokens_total vllm:prompt_tokens_total", "Tokens of prompts.", lambda s: s.prompt_tokens),
    ("vllm:prefix_cache_queries_total", "Tokens of prompts that were looked up in the cache.",
     lambda s: s.queried_tokens),
    ("medusa_reused_tokens_total vllm:prefix_cache_hits_total",
     "Tokens of prompts whose keys and values were cached.", lambda s: s.reused_tokens),
    ("medusa_new_tokens_total vllm:generation_tokens_total", "Tokens written.", lambda s: s.new_tokens),
    ("medusa_step_seconds_total", "Seconds in decoding steps.", lambda s: s.step_seconds),
    ("medusa_prefill_seconds_total", "Seconds in prefills.", lambda s: s.prefill_seconds),
    ("medusa_steps_by_tree_nodes_total{nodes}", "Decoding steps by nodes per row.", lambda s: s.tree_nodes),
    ("medusa_generations_total{finish}", "Generations by how they ended.", lambda s: s.finished),
    ("vllm:spec_decode_num_drafts_total", "Steps of single generations that had draft tokens.",
     lambda s: sum(count for nodes, count in s.row_steps.items() if nodes > 1)),
    ("vllm:spec_decode_num_draft_tokens_total", "Draft tokens: the nodes of trees without their roots.",
     lambda s: sum(count * (nodes - 1) for nodes, count in s.row_steps.items())),
    ("vllm:spec_decode_num_accepted_tokens_total", "Accepted draft tokens.",
     lambda s: sum(count * length for length, count in s.accepted_histogram.items())),
    ("vllm:spec_decode_num_accepted_tokens_per_pos_total{position}", "Accepted draft tokens by their depth, from 0.",
     lambda s: {depth: sum(count for length, count in s.accepted_histogram.items() if length > depth)
                for depth in range(max(s.accepted_histogram, default=0))}),
)  # fmt: skip


class Metrics:
    """The metrics of one server, in a registry of its own.

    Args:
        engine: counts what it does.
        model: the name of the served model: a label of the metrics with vLLM's names.

    Attributes:
        requests: generation requests by path and outcome: completed, cancelled (the client left), invalid, refused (the
            queue was full), timeout, failed.
        token_gap: seconds from the tokens of one step to those of the next, per choice.
        token_time: seconds per token after the first, per choice.
        latency: seconds from a request to the end of all its choices.
    """

    def __init__(self, engine: Engine, model: str) -> None:
        self._registry = CollectorRegistry()
        self._labels = {"medusa_": {}, "vllm:": {"model_name": model, "engine": "0"}}
        self.requests = Counter(
            "medusa_requests", "Generation requests by outcome.", ("path", "outcome"), registry=self._registry
        )
        words = "Seconds to the first token."
        self._first_token = [
            self._histogram(prefix, "time_to_first_token_seconds", words, _SECONDS) for prefix in self._labels
        ]
        words = "Seconds per token after the first."
        self.token_time = self._histogram("medusa_", "time_per_token_seconds", words, _TOKEN_SECONDS)
        words = "Seconds to the end of a completed request."
        self.latency = self._histogram("medusa_", "request_latency_seconds", words, _SECONDS)
        words = "Seconds from the tokens of one step to those of the next."
        self.token_gap = self._histogram("vllm:", "inter_token_latency_seconds", words, _TOKEN_SECONDS)
        words = "Seconds from a request to the end of each of its choices."
        self._whole = self._histogram("vllm:", "e2e_request_latency_seconds", words, _SECONDS)
        words = "Seconds that each choice has waited for a slot."
        self._waited = self._histogram("vllm:", "request_queue_time_seconds", words, _SECONDS)
        labels = self._labels["vllm:"]
        success = Counter(
            "vllm:request_success", "Choices by how they ended.", (*labels, "finished_reason"), registry=self._registry
        )
        self._success = {reason: success.labels(*labels.values(), reason) for reason in _REASONS}
        blocks = engine.stats().capacity // SHORTEST_REUSE
        config = {"block_size": str(SHORTEST_REUSE), "num_gpu_blocks": str(blocks), "enable_prefix_caching": "True"}
        config["engine"] = labels["engine"]
        words = "The KV cache, as if it had blocks of the shortest prefix that is reused."
        Gauge("vllm:cache_config_info", words, config, registry=self._registry).labels(**config).set(1)
        self._registry.register(_EngineCounts(engine, self._labels))

    def _histogram(self, prefix: str, name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
        labels = self._labels[prefix]
        histogram = Histogram(prefix + name, words, tuple(labels), buckets=buckets, registry=self._registry)
        return histogram.labels(**labels) if labels else histogram

    def first_token(self, seconds: float) -> None:
        """Observe the seconds from a request to the first token of a choice."""
        for histogram in self._first_token:
            histogram.observe(seconds)

    def ended(self, reason: str, seconds: float, waited: float) -> None:
        """Count a choice that ended by "stop", "length" or "error", its seconds, and those of them in the queue."""
        self._success[reason].inc()
        self._whole.observe(seconds)
        self._waited.observe(waited)

    def count(self, path: str, outcome: str) -> None:
        """Count a generation request; other paths are not counted."""
        if path in ("/v1/chat/completions", "/v1/completions"):
            self.requests.labels(path, outcome).inc()

    def text(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics and their content type: OpenMetrics if `Accept` names it, else the classic text."""
        # In OpenMetrics, prometheus_client writes "_" for the colon of vLLM's names unless all names are welcome.
        encode, kind = choose_encoder(accept.replace("openmetrics-text", "openmetrics-text;escaping=allow-utf-8"))
        return encode(self._registry), kind


def outcome(status: int) -> str:
    """Return the outcome of a request that failed with a status."""
    return {429: "refused", 504: "timeout"}.get(status, "failed" if status >= 500 else "invalid")


class _EngineCounts(Collector):
    """Reads the engine's counts when metrics are asked for."""

    def __init__(self, engine: Engine, labels: Mapping[str, Mapping[str, str]]) -> None:
        self._engine, self._labels = engine, labels

    def collect(self) -> Iterator[Metric]:
        """Yield the engine's metrics."""
        stats = self._engine.stats()
        for names, words, read in _COUNTS:
            names, _, differs = names.rstrip("}").partition("{")
            found = read(stats)
            values = sorted(found.items()) if isinstance(found, Mapping) else [("", found)]
            for name in names.split():
                labels = next(labels for prefix, labels in self._labels.items() if name.startswith(prefix))
                family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
                metric = family(name, words, labels=[*labels, *([differs] if differs else [])])
                for value, number in values:
                    metric.add_metric([*labels.values(), str(value)][: len(labels) + bool(differs)], number)
                yield metric
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
