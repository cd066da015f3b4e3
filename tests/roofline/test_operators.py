"""Operators of table 5 against numbers worked out by hand, and how times must move."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from medusa_decoding.roofline.devices import Attained, Device
from medusa_decoding.roofline.operators import (
    fused_attention,
    linear,
    step_operators,
    total_seconds,
)
from medusa_decoding.roofline.shapes import SHAPES, HeadShape, ModelShape, shape_of

# b = 2, q = 3, s = 5, n = 4 heads of d = 8, h = 32, i = 48.
SMALL = ModelShape("small", hidden=32, intermediate=48, layers=2, heads=4, kv_heads=2, head_dim=8, vocabulary=100)
UNIT = Device("unit", flops=1.0, bandwidth=1.0, dtype="bfloat16")


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


def test_a_trimmed_vocabulary_larger_than_the_models_is_refused() -> None:
    with pytest.raises(ValueError, match="heads: expected a vocabulary of at most 100, got 101"):
        step_operators(SMALL, HeadShape(1, vocabulary=101), 1, 2, 5)


@pytest.mark.parametrize("field", ["count", "layers", "vocabulary"])
def test_heads_without_a_size_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match=f"heads: expected {field} of at least 1, got 0"):
        HeadShape(**{field: 0})


def test_a_negative_root_rank_is_refused() -> None:
    with pytest.raises(ValueError, match="heads: expected root_rank of at least 0, got -1"):
        HeadShape(root_rank=-1)


def test_time_is_the_longer_of_arithmetic_and_bytes() -> None:
    up = linear("up", 6, 32, 48, times=2)
    assert up.seconds(Device("a", flops=18432, bandwidth=1e9)) == pytest.approx(2)
    assert up.seconds(Device("b", flops=1e9, bandwidth=4032)) == pytest.approx(2)


def test_shares_a_fixed_time_and_tiles() -> None:
    up = linear("up", 6, 32, 48, times=2)
    # 6 rows are computed as 8, at half the peak; 10 microseconds for each of two.
    attained = Attained(compute=0.5, fixed_us=10, tile=4)
    slow = Device("slow", flops=18432, bandwidth=1e9, linear=attained)
    assert up.seconds(slow) == pytest.approx(2 * (8 / 6 / 0.5 + 1e-5))
    narrow = Device("narrow", flops=1e9, bandwidth=4032, linear=Attained(bandwidth=0.25))
    assert up.seconds(narrow) == pytest.approx(8)
    # Attention has its own.
    assert fused_attention("a", 1, 1, 5, SMALL).seconds(slow) == pytest.approx(4 * 5 * 4 * 8 / 18432)


@given(
    batch=st.integers(1, 64), nodes=st.integers(1, 256), prefix=st.integers(1, 8192),
    which=st.sampled_from(["batch", "nodes", "prefix"]), ridge=st.floats(1, 1000), tile=st.sampled_from([1, 64]),
)  # fmt: skip
def test_more_of_anything_is_never_quicker(
    batch: int, nodes: int, prefix: int, which: str, ridge: float, tile: int
) -> None:
    device = Device("d", flops=ridge * 1e12, bandwidth=1e12, linear=Attained(tile=tile))
    less = {"batch": batch, "nodes": nodes, "prefix": prefix}
    more = less | {which: less[which] + 1}
    quicker, slower = (total_seconds(step_operators(SMALL, HeadShape(), **of), device) for of in (less, more))
    assert slower >= quicker


@given(share=st.floats(0.05, 0.99), kind=st.sampled_from(["bandwidth", "compute"]))
def test_less_of_a_peak_is_never_quicker(share: float, kind: str) -> None:
    operators = step_operators(SMALL, None, 4, 16, 100)
    whole = Device("whole", flops=50e12, bandwidth=1e12)
    attained = Attained(**{kind: share})  # type: ignore[arg-type]
    part = Device("part", flops=50e12, bandwidth=1e12, linear=attained, attention=attained)
    assert total_seconds(operators, part) >= total_seconds(operators, whole)
    assert part.ideal() == Device("part", flops=50e12, bandwidth=1e12)


def test_element_size_follows_the_devices_dtype() -> None:
    up = linear("up", 6, 32, 48)
    single = Device("single", flops=1e9, bandwidth=1.0, dtype="float32")
    assert up.seconds(single) == pytest.approx(2 * up.seconds(Device("half", flops=1e9, bandwidth=1.0)))
    assert single.element_bytes == torch.finfo(torch.float32).bits // 8
