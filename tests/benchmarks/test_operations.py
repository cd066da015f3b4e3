"""Each benchmark at tiny shapes on the CPU: every peer runs, agrees, and is recorded with its bytes."""

from __future__ import annotations

import dataclasses
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

CPU = torch.device("cpu")
ATTENTION = bench_tree_attention.Case(("a", "b"), heads=4, kv_heads=2, head_dim=64, nodes=5, prefix=37, batch=2)


def measured(module: Any, case: Any, **limits: int) -> dict[str, dict[str, Any]]:
    run = suite.Run(module.OP, CPU, dtype=torch.float32, seconds=0.002, limits=limits)
    with torch.inference_mode():
        suite.go(run, [case], module.measure)
    return {record["implementation"]: record for record in run.records}


@pytest.mark.parametrize(
    ("nodes", "heads", "variants"),
    [(5, 2, {"math"}), (1, 4, {"gqa math", "packed math", "gqa flash", "packed flash"})],
)
def test_attention_peers_agree(nodes: int, heads: int, variants: set[str]) -> None:
    case = dataclasses.replace(ATTENTION, nodes=nodes, heads=heads)
    found = measured(bench_tree_attention, case, flex=1)
    # Keys and values of 37 + N rows for 2 sequences of 2 heads of 64 floats, and q and out.
    expected = 4 * 2 * 64 * (2 * 2 * (37 + nodes) + 2 * nodes * heads)
    assert found["medusa_kernels"]["bytes"] == expected
    assert found["medusa_kernels"]["flop"] == 2 * 2 * 2 * nodes * heads * 64 * (37 + nodes)
    assert set(found["sdpa"]["variants_us"]) == variants
    assert found["flex"]["variant"] == "eager"
    assert "wrong" not in {key for record in found.values() for key in record}
    assert found["medusa_kernels"]["shapes"]["models"] == ["a", "b"]


@pytest.mark.parametrize("weights", ["full", "int8", "fp8", "int4 g128"])
def test_heads_peers_agree(weights: str) -> None:
    case = bench_heads_topk.Case("own", 130, 300, weights, batch=3, heads=2, hidden=128, k=4)
    found = measured(bench_heads_topk, case)
    suffix = "" if weights == "full" else ", float32 weights"
    rooted = found.pop(bench_heads_topk.ROOTED)
    assert set(found) == {"medusa_kernels", f"torch batched{suffix}", f"torch a head{suffix}"}
    assert rooted["bytes"] - found["medusa_kernels"]["bytes"] == 2 * 128 * 128 * 4 + 3 * 2 * 130 * 4
    assert rooted["ours_us"] == pytest.approx(found["medusa_kernels"]["median_us"], abs=0.01)
    blocks = 2 * 128 * 129 * 4
    plain = 2 * 130 * 128 * 4 + blocks
    row = {"full": 128 * 4, "int4 g128": 64 + 2}.get(weights, 128 + 4)
    assert found["medusa_kernels"]["bytes"] == 2 * 130 * row + blocks
    assert found[f"torch batched{suffix}"]["bytes"] == plain
    assert "wrong" not in {key for record in found.values() for key in record}


@pytest.mark.parametrize(("stats", "weights"), [(False, "full"), (True, "full"), (True, "nf4 g64")])
def test_verify_peer_agrees(stats: bool, weights: str) -> None:
    found = measured(bench_tree_verify, bench_tree_verify.Case(300, 7, stats, batch=2, hidden=64, weights=weights))
    weight = 300 * (4 * 64 if weights == "full" else 32 + 4)
    assert found["medusa_kernels"]["bytes"] == weight + 4 * 64 * 14 + 14 * (20 if stats else 8)
    assert "median_us" in found["torch"]


def test_rope_peer_agrees() -> None:
    case = bench_rope_append.Case(("a",), heads=4, kv_heads=2, head_dim=64, nodes=5, prefix=9, batch=3)
    found = measured(bench_rope_append, case)
    # q 4 heads, k and v 2 each, in and out; a row of cosines and one of sines.
    assert found["medusa_kernels"]["bytes"] == 4 * 3 * 5 * 64 * (8 + 4 + 4 + 2)
    assert "median_us" in found["transformers"]


@pytest.mark.parametrize("path", [bench_kv_compact.SCATTERED, bench_kv_compact.IN_PLACE])
def test_compact_peers_agree(path: tuple[int, ...]) -> None:
    case = bench_kv_compact.Case(2, path, batch=2, layers=3, rows=200, head_dim=16)
    found = measured(bench_kv_compact, case)
    moved = 4 if path == bench_kv_compact.SCATTERED else 0
    assert found["medusa_kernels"]["bytes"] == 2 * moved * 3 * 2 * 2 * 2 * 16 * 4
    assert all(
        "median_us" in found[name] for name in ("torch block copy_", "torch block index_copy_", "torch copy_ a layer")
    )


def test_selection_and_noise_peers_agree() -> None:
    found = measured(bench_tree_select, bench_tree_select.Case(nodes=7, depth=2, top_k=3, batch=2))
    assert "median_us" in found["torch operations"]
    # Ten candidates of 12 bytes and seven nodes of 48 per row; for each candidate a depth and a path of three.
    assert found["medusa_kernels"]["bytes"] == 2 * (10 * 12 + 7 * 48) + 10 * (4 + 24)
    found = measured(bench_gumbel_noise, bench_gumbel_noise.Case(vocabulary=103, batch=2, rows=3))
    assert "median_us" in found["torch operations"]
    assert found["medusa_kernels"]["bytes"] == 4 * 2 * 3 * 103


@pytest.mark.parametrize("settings", bench_sampling.SETTINGS)
def test_sampling_draws_the_same_tokens_down_a_whole_path(settings: str) -> None:
    case = bench_sampling.Case(settings, vocabulary=300, nodes=9, batch=2)
    found = measured(bench_sampling, case)
    assert "median_us" in found["transformers' processors"]
    # Five draws from 300 fp32 logits for each of two rows.
    assert found["medusa_kernels"]["bytes"] == 2 * 5 * 300 * 4
    run = suite.Run("sampling", CPU, dtype=torch.float32, copy=1.0)
    [x] = bench_sampling.inputs(case, run, 1)
    drawn = bench_sampling.chosen(case, run, bench_sampling.ours)(x)
    path = [0, *(case.tree.choices.index([0] * depth) + 1 for depth in range(1, 5))]
    assert torch.equal(drawn[:, path[:-1]], x.nodes.tokens[:, path[1:]])
