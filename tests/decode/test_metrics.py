"""GenerationMetrics against cases counted by hand, and against a generation counted from outside."""

import math
import time

import pytest
from models import padded, prompts, tiny
from oracles import taught

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.generation.metrics import GenerationMetrics


def of(accepted, trees, seconds=None, prompt=(5,), new=None):
    """Metrics of a generation whose prefill gave one token per row."""
    new = new or [1 + sum(row) + len(row) for row in accepted]
    return GenerationMetrics.from_steps(list(prompt), new, accepted, trees, seconds or [0.5] + [0.25] * len(trees))


def test_one_row_with_one_tree():
    tree = Tree.chain(3)
    metrics = of([[0, 3, 1, 0]], [tree] * 4, [2.0, 0.5, 0.25, 0.5, 0.75], prompt=[11])
    assert metrics == GenerationMetrics(
        prompt_tokens=11,
        new_tokens=9,
        steps=4,
        accepted_histogram={0: 2, 1: 1, 3: 1},
        depth_acceptance=[2 / 4, 1 / 4, 1 / 4],
        tree_nodes={4: 4},
        prefill_seconds=2.0,
        decode_seconds=2.0,
        step_seconds=[0.5, 0.25, 0.5, 0.75],
    )
    assert metrics.tokens_per_step == 8 / 4
    assert metrics.tokens_per_second == 9 / 4.0


def test_rows_that_end_at_different_steps():
    """Steps are counted per row; trees and times per batch, as long as any row is running."""
    wide, deep = Tree.cartesian([3]), Tree.chain(2)
    metrics = of([[1], [0, 2, 1], []], [wide, deep, deep], [1.0, 0.5, 0.25, 0.125], prompt=[3, 1, 8])
    assert metrics.prompt_tokens == 12
    assert metrics.new_tokens == 3 + 7 + 1
    assert metrics.steps == 4
    assert metrics.accepted_histogram == {0: 1, 1: 2, 2: 1}
    # Depth 1: all four steps reach it; depth 2: the two with the chain.
    assert metrics.depth_acceptance == [3 / 4, 1 / 2]
    assert metrics.tree_nodes == {3: 2, 4: 1}
    assert metrics.step_seconds == [0.5, 0.25, 0.125]
    assert metrics.tokens_per_step == (2 + 1 + 3 + 2) / 4


def test_steps_launched_after_the_end_are_not_counted():
    """On a GPU one step more runs before the host sees the end: neither its tree nor its time belongs to the text."""
    deep = Tree.chain(2)
    metrics = of([[1, 2]], [deep, deep, Tree.chain(4)], [1.0, 0.5, 0.25, 8.0])
    assert metrics.tree_nodes == {3: 2}
    assert metrics.step_seconds == [0.5, 0.25]
    assert metrics.decode_seconds == 0.75
    assert metrics.depth_acceptance == [1.0, 0.5]


def test_a_generation_of_a_prefill_alone():
    metrics = of([[], []], [], [0.5], prompt=[3, 4])
    assert (metrics.new_tokens, metrics.steps, metrics.decode_seconds) == (2, 0, 0)
    assert metrics.accepted_histogram == metrics.tree_nodes == {}
    assert metrics.depth_acceptance == metrics.step_seconds == []
    assert math.isnan(metrics.tokens_per_step)
    assert metrics.tokens_per_second == 4.0
    assert math.isnan(of([[]], [], [0.0]).tokens_per_second)


@pytest.mark.parametrize("batch", [1, 3])
def test_metrics_equal_a_count_from_outside(monkeypatch, batch):
    """A clock that the test advances by one second per pass: prefill 1 s, each step 1 s."""
    model = tiny(hidden_size=128)
    rows = prompts(batch, [9, 4, 13])
    ids, mask = padded(rows)
    plain = model.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False)
    known = [(row.tolist(), text.tolist()) for row, text in zip(rows, plain[:, ids.shape[1] :], strict=True)]
    tree = Tree.cartesian([3, 2])
    with MedusaModel(model, taught(model, known)) as medusa:
        forward, clock, passes = medusa.backbone.forward, [100.0], []

        def counted(*args):
            passes.append(1)
            clock[0] += 1.0
            return forward(*args)

        monkeypatch.setattr(medusa.backbone, "forward", counted)
        monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
        output = medusa.generate(ids, mask, max_new_tokens=30, tree=tree, metrics=True)
        assert medusa.generate(ids, mask, max_new_tokens=2, tree=tree).metrics is None
    metrics = output.metrics
    steps = max(map(len, output.accept_lengths))
    assert sum(map(sum, output.accept_lengths)) > 5 * batch
    assert metrics.prompt_tokens == int(mask.sum())
    assert metrics.new_tokens == 30 * batch
    assert metrics.prefill_seconds == 1.0
    assert metrics.step_seconds == [1.0] * steps
    assert metrics.tree_nodes == {tree.num_nodes: steps}
    assert metrics.tokens_per_second == 30 * batch / (1 + steps)
    assert metrics.steps == sum(map(len, output.accept_lengths))
    assert metrics.tokens_per_step == output.tokens_per_step
