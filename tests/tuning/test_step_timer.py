"""Timed steps: which ones run, on which state, in which order, and what is refused. No duration is asserted."""

from __future__ import annotations

import pytest
import torch
from models import heads_for, prompts, tiny, transformers_greedy

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.tuning.step_timer import COUNTED, UNCOUNTED, Latency, interleaved, longest_prefix, time_steps

TREES = [Tree([]), Tree.chain(2), Tree.cartesian([2, 2])]


@pytest.fixture
def model():
    base = tiny(max_position_embeddings=128)
    with MedusaModel(base, heads_for(base), Tree.chain(3)) as made:
        yield made


@pytest.fixture
def steps(model, monkeypatch):
    """Every step that runs: (nodes, tokens of each row before it, whether a row had ended, cache rows)."""
    seen = []
    own = model._steps.prepare

    def prepare(backend):
        step_of = own(backend)

        def spied(tree):
            step = step_of(tree)

            def spy(state, *how):
                ended = bool(state.finished.any())
                seen.append((tree.num_nodes, state.cache.lengths.tolist(), ended, state.cache.capacity))
                return step(state, *how)

            return spy

        return spied

    monkeypatch.setattr(model._steps, "prepare", prepare)
    return seen


@pytest.mark.parametrize(("batch", "prefix"), [(1, 1), (1, 17), (3, 40)])
def test_blocks_of_real_steps_begin_at_the_prefix(model, steps, batch, prefix):
    blocks = []
    found = time_steps(model, TREES, batch=batch, prefix=prefix, repeats=2, on_block=lambda: blocks.append(len(steps)))
    block = UNCOUNTED + COUNTED
    assert blocks == [block * number for number in range(1, 3 * len(TREES) + 1)]
    assert [one.nodes for one in found] == [1, 3, 7]
    for one in found:
        assert (one.batch, one.prefix, len(one.seconds)) == (batch, prefix, 2 * COUNTED)
    for start in range(0, len(steps), block):
        nodes, lengths, _, rows = steps[start]
        assert lengths == [prefix] * batch
        assert rows == found[0].rows >= prefix + 256
        assert {size for size, *_ in steps[start : start + block]} == {nodes}
        # Each step continues from the previous one: it adds at least the root in every row.
        before = lengths
        for _, now, ended, _ in steps[start + 1 : start + block]:
            assert not ended
            assert all(b - a > 0 for a, b in zip(before, now, strict=True))
            before = now


def test_timing_leaves_the_model_unchanged(model):
    time_steps(model, TREES, prefix=30, repeats=1)
    [row] = prompts(1, [9])
    got = model.generate(row[None], max_new_tokens=20).sequences[0, 9:].tolist()
    assert got == transformers_greedy(model.base, row, 20)


def test_rounds_are_interleaved_and_durations_stay_with_their_tree():
    ran = []

    def block(tree):
        ran.append(tree.num_nodes)
        return [10.0 * tree.num_nodes + len(ran) / 100]

    found = interleaved(block, TREES, repeats=20)
    sizes = [tree.num_nodes for tree in TREES]
    assert ran[:3] == sizes
    rounds = [ran[place : place + 3] for place in range(3, len(ran), 3)]
    assert len(rounds) == 20
    assert all(sorted(order) == sizes for order in rounds)
    assert len(set(map(tuple, rounds))) > 3
    for size, seconds in zip(sizes, found, strict=True):
        # The warm-up's (up to 3 hundredths) are not among them.
        expected = [10.0 * size + (place + 1) / 100 for place, nodes in enumerate(ran) if nodes == size and place >= 3]
        assert seconds == pytest.approx(expected)


def test_typical_duration_between_two_speeds_and_without_outliers():
    def typical(seconds):
        return Latency(1, 1, 64, 1, tuple(seconds)).typical

    assert typical([3.0]) == 3.0
    assert typical([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 900.0]) == 1.0
    assert typical([1.0, 2.0] * 10) == pytest.approx(1.5)
    assert typical([4.0, 1.0, 2.0, 3.0]) == 2.5
    assert Latency(1, 1, 64, 1, (1.0, 2.0, 3.0, 4.0, 5.0)).quartiles == (2.0, 4.0)
    assert Latency(1, 1, 64, 1, (7.0,)).quartiles == (7.0, 7.0)


@pytest.mark.parametrize(
    ("trees", "settings", "words"),
    [
        (TREES, {"batch": 0}, "batch: expected a whole number from 1, got 0"),
        (TREES, {"prefix": 116}, r"prefix: expected at most 115 \(the model's context holds 128 tokens\), got 116"),
        ([], {}, r"trees: expected 1 to 16 different ones, got 0 of \[\] nodes"),
        ([Tree.chain(5)], {}, "depth 5, expected at most 4"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(model, steps, trees, settings, words):
    with pytest.raises(ValueError, match=words):
        time_steps(model, trees, **settings)
    assert steps == []


def test_the_longest_prefix_that_fits_is_used(model, steps):
    assert longest_prefix(model, TREES) == 115
    time_steps(model, TREES, prefix=115, repeats=1)
    assert max(max(lengths) for _, lengths, *_ in steps) + 3 <= 128


def test_output_that_is_not_finite_is_an_error(model):
    with torch.no_grad():
        model.backbone.causal_lm.lm_head.weight[0, 0] = torch.nan
    with pytest.raises(FloatingPointError, match="finite"):
        time_steps(model, TREES, prefix=5, repeats=1)
