"""All operations under pytest: small shapes on a CPU, the most telling ones on a GPU.

    pytest benchmarks/bench_operations.py --benchmark-only

A GPU has MEDUSA_BENCH_SECONDS (60) per operation. Each benchmark of an operation also runs alone, on a GPU, with
options: `python -m benchmarks.bench_tree_attention --help`.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from benchmarks import (
    bench_gumbel_noise,
    bench_heads_topk,
    bench_kv_compact,
    bench_rope_append,
    bench_sampling,
    bench_tree_attention,
    bench_tree_select,
    bench_tree_verify,
    suite,
)

OPERATIONS = (
    bench_tree_attention, bench_heads_topk, bench_tree_verify, bench_kv_compact, bench_rope_append, bench_tree_select,
    bench_sampling, bench_gumbel_noise,
)  # fmt: skip


@pytest.mark.parametrize("bench", OPERATIONS, ids=lambda bench: bench.OP)
def test_operation(benchmark: Any, bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Print a table of our op and its peers, and write its records."""
    place = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases = list(bench.cases()) if place.type == "cuda" else [bench.SMALL]
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    benchmark.group = "seconds of whole tables, which are above"
    with capsys.disabled(), torch.inference_mode():
        run = suite.Run(bench.OP, place, float(os.environ.get("MEDUSA_BENCH_SECONDS", "60")), dtype)
        benchmark.pedantic(suite.go, args=(run, cases, bench.measure), rounds=1, iterations=1)
    assert any("median_us" in record for record in run.records)
