"""Operators of table 5 against numbers worked out by hand, and how times must move."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.simulator.devices import Device
from benchmarks.simulator.operators import (
    fused_attention,
    linear,
    step_operators,
)
from benchmarks.simulator.shapes import SHAPES, HeadShape, ModelShape, shape_of

# b = 2, q = 3, s = 5, n = 4 heads of d = 8, h = 32, i = 48.
SMALL = ModelShape("small", hidden=32, intermediate=48, layers=2, heads=4, kv_heads=2, head_dim=8, vocabulary=100)


def test_projections_as_in_table_5() -> None:
    # 6 rows: 2 * 6 * 32 * 48 operations; 6 * (32 + 48) activations; 32 * 48 weights.
    up = linear("up", 2 * 3, 32, 48)
    assert (up.flops, up.activations, up.weights) == (18432, 480, 1536)
    assert up.bytes() == 4032
    # Weights of half a byte: 480 * 2 + 1536 / 2.
    assert up.bytes(2, 0.5) == 1728


def test_fused_attention_reads_keys_and_values_of_kv_heads_once() -> None:
    # 4 b q s n d operations; 2 b (s n_kv + q n) d = 2 * 2 * (10 + 12) * 8 elements.
    one = fused_attention("attention", 2, 3, 5, SMALL)
    assert (one.flops, one.activations) == (3840, 704)


def test_weights_of_a_step_are_those_of_the_model_but_its_embedding() -> None:
    config = LlamaConfig(
        vocab_size=100, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2) - model.model.embed_tokens.weight.numel()
    assert shape_of(config, "small") == SMALL
    assert sum(o.times * o.weights for o in step_operators(SMALL, None, 1, 1, 5)) == matrices


def test_bytes_of_a_step_at_llama_2_7b_agree_with_the_benchmarks_count() -> None:
    # 13,752,082,432 bytes, from benchmarks/results/nvidia-h200.jsonl: weights, norms, keys and values of 1,025 rows.
    operators = step_operators(SHAPES["llama-2-7b"], None, 1, 1, 1024)
    norms = 65 * 4096 * 2
    cache = 32 * 1025 * 2 * 32 * 128 * 2
    assert sum(o.times * o.weights for o in operators) * 2 + cache + norms == 13752082432
    # Activations of one row add less than a thousandth.
    assert 13752082432 - norms < sum(o.times * o.bytes() for o in operators) < 1.001 * 13752082432


@pytest.mark.parametrize(
    ("heads", "weights", "rows"),
    [
        (HeadShape(3), 3 * 32 * 32 + 3 * 32 * 100, 2),
        (HeadShape(3, vocabulary=10), 3 * 32 * 32 + 3 * 32 * 10, 2),
        (HeadShape(3, shared=True), 3 * 32 * 32 + 32 * 100, 6),
        (HeadShape(3, shared=True, layers=2), 6 * 32 * 32 + 32 * 100, 6),
        (HeadShape(3, root_rank=5), 3 * 32 * 32 + 3 * 32 * 100 + 4 * 5 * 32, 2),
    ],
)
def test_heads_run_at_one_node_a_sequence(heads: HeadShape, weights: int, rows: int) -> None:
    plain = step_operators(SMALL, None, 2, 7, 5)
    added = step_operators(SMALL, heads, 2, 7, 5)[len(plain) :]
    assert sum(o.times * o.weights for o in added) == weights
    assert added[-1].rows == rows
    # Each head multiplies each of the 2 sequences with its own matrices, shared or not.
    vocabulary = heads.vocabulary or 100
    assert sum(o.times * o.flops for o in added) == 2 * 2 * (
        3 * (heads.layers * 32 * 32 + 32 * vocabulary) + 4 * heads.root_rank * 32
    )


def test_time_is_the_longer_of_arithmetic_and_bytes() -> None:
    up = linear("up", 6, 32, 48, times=2)
    assert up.seconds(Device("a", flops=18432, bandwidth=1e9)) == pytest.approx(2)
    assert up.seconds(Device("b", flops=1e9, bandwidth=4032)) == pytest.approx(2)
