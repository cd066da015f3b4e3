"""Selection of a tree: known optima, sources of accuracies, and the selected tree in simulated generations."""

from __future__ import annotations

import copy
import json
import math
import random

import pytest
import torch
from simulation import BETTER, CPU, GOOD, GPU, USELESS, commit

from benchmarks.tune_sweep import Written, judge, sweep
from medusa_decoding import MedusaHeads, Tree
from medusa_decoding.checkpoints.accuracies import (
    CALIBRATION,
    MEASURED,
    PUBLISHED,
    default_accuracies,
    find_accuracies,
    load_accuracies,
)
from medusa_decoding.provenance import fingerprint
from medusa_decoding.trees.tree import most_nodes
from medusa_decoding.tuning.calibration import NONE, Calibration
from medusa_decoding.tuning.select import best_trees, expected_tokens, fastest, load_knowledge, new_case, timed_trees
from medusa_decoding.tuning.step_timer import Latency

HEADS = [[0.6, 0.2], [0.5, 0.1]]


def heads_of(num_heads, num_candidates):
    return MedusaHeads(4, num_candidates, num_heads)


def weighed(accuracies, seconds, texts=None):
    """The best trees of the sizes in `seconds`, with these durations."""
    trees = best_trees(accuracies, sorted(seconds), texts)
    measured = [Latency(1, 128, 512, tree.num_nodes, (seconds[tree.num_nodes],)) for tree in trees]
    return timed_trees(trees, expected_tokens(trees, accuracies, texts), measured)


# By hand: the best trees add paths in the order (0) 0.6, (0, 0) 0.3, (1) 0.2, (1, 0) 0.1, (0, 1) 0.06, (1, 1) 0.02.
TOKENS = {1: 1.0, 2: 1.6, 3: 1.9, 4: 2.1, 5: 2.2, 7: 2.28}


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({1: 1.0, 2: 1.0, 3: 1.0, 4: 1.0, 5: 1.0, 7: 1.0}, 7),  # nothing costs: the largest
        ({1: 1.0, 2: 1.61, 4: 2.2, 7: 2.3}, 1),  # no tree pays
        ({1: 1.0, 2: 1.59, 4: 2.2, 7: 2.3}, 2),  # only the smallest does
        ({1: 1.0, 2: 1.1, 3: 1.2, 4: 1.3, 5: 1.4}, 4),  # 1, 1.4545, 1.5833, 1.6154, 1.5714
        ({1: 1.0, 2: 1.6}, 1),  # equal: the smaller
    ],
)
def test_known_optima(seconds, chosen):
    found = weighed(HEADS, seconds)
    assert [one.tokens for one in found] == pytest.approx([TOKENS[nodes] for nodes in seconds])
    assert fastest(found).tree.num_nodes == chosen
    assert fastest(found).rate == pytest.approx(TOKENS[chosen] / seconds[chosen])


def timed_case(rounds, tokens=1.6):
    """A case of plain decoding and a tree with `tokens` per step, from (plain, tree) milliseconds of each round."""
    trees, durations = [Tree([]), Tree.chain(1)], zip(*rounds, strict=True)
    measured = [
        Latency(1, 128, 512, tree.num_nodes, tuple(0.001 * one for one in of_tree for _ in range(3)))
        for tree, of_tree in zip(trees, durations, strict=True)
    ]
    return new_case(trees, [1.0, tokens], measured)


@pytest.mark.parametrize(
    ("rounds", "chosen"),
    [
        # Steps of 12 to 28 ms on a busy machine: the tree seems slower, and another measurement may say the opposite.
        ([(12, 28), (28, 12), (12, 28), (12, 28), (28, 28), (12, 12), (12, 28)], "auto"),
        ([(28, 12), (12, 28), (28, 28), (12, 28), (28, 28), (12, 12), (12, 28)], "auto"),
        # The same, if the machine is slow for whole rounds: the tree costs 4/3 of a plain step in all of them.
        ([(12, 16), (21, 28), (12, 16), (21, 28), (21, 28), (12, 16), (12, 16)], Tree.chain(1)),
        ([(12, 24), (14, 28), (12, 24), (14, 28), (14, 28), (12, 24), (12, 24)], Tree([])),
        ([(12, 16)], "auto"),  # one round says nothing about others
    ],
)
def test_durations_that_do_not_tell_decide_nothing(rounds, chosen):
    case = timed_case(rounds)
    assert case.tree == chosen
    assert [size.steps for size in case.sizes] == [3 * len(rounds)] * 2
    if len(rounds) == 1:
        assert case.gain is None
        return
    gain, low, high = case.gain
    assert low <= gain <= high
    assert gain == pytest.approx(1.6 * sum(plain for plain, _ in rounds) / sum(tree for _, tree in rounds))
    assert (low > 1, high < 1) == (chosen == Tree.chain(1), chosen == Tree([]))


def test_noise_alone_rarely_decides():
    """A tree that is as fast as plain decoding, on a machine that alternates between 12 and 28 ms per step."""
    draws, decided = random.Random(0), 0
    for _ in range(100):
        rounds = [(draws.choice((12, 28)), draws.choice((12, 28))) for _ in range(7)]
        decided += timed_case(rounds, tokens=1.0).tree != "auto"
    assert decided <= 20


def test_a_second_tree_of_a_size_is_weighed_by_itself():
    """For example the one stored with the heads; ranks and heads without an accuracy count as never right."""
    trees = [Tree([]), Tree.chain(2), Tree.cartesian([2]), Tree([[0], [0, 0], [2], [0, 0, 0]])]
    tokens = expected_tokens(trees, HEADS)
    assert tokens == pytest.approx([1.0, 1.9, 1.8, 1.9])
    measured = [Latency(1, 128, 512, tree.num_nodes, (1.0 + 0.1 * place,) * 6) for place, tree in enumerate(trees)]
    case = new_case(trees, tokens, measured)
    assert case.tree == Tree.chain(2)
    assert [size.tree for size in case.sizes] == trees


def test_bad_sizes_are_refused():
    with pytest.raises(ValueError, match="num_nodes: expected at most 7"):
        weighed(HEADS, {1: 1.0, 8: 1.0})


def test_texts_are_walked_if_available():
    """Rank 0 is right at the first of two positions, rank 1 never; after them, rank 0 at every second position."""
    right, wrong = (0, NONE), (NONE, 0)
    texts = Calibration(2, 2, [((right, wrong) * 9 + (right, (NONE, NONE)),)])
    accuracies = texts.accuracies
    plain, chain, fork = weighed(accuracies, {1: 1.0, 2: 1.5, 3: 2.5}, texts)
    # Steps start at every second position only, where the draft token is right: each accepts one.
    assert (plain.tokens, chain.tokens) == pytest.approx((1.0, 2.0))
    assert chain.tree == Tree([[0]])
    assert fork.tokens == pytest.approx(2.0)
    assert [one.tokens for one in weighed(accuracies, {2: 1.5})] == pytest.approx([1 + 10 / 19])
    assert fastest(weighed(accuracies, {1: 1.0, 2: 1.6}, texts)).tree.num_nodes == 2
    assert fastest(weighed(accuracies, {1: 1.0, 2: 1.6})).tree.num_nodes == 1
    assert best_trees(accuracies, [1, 2], texts) == [Tree([]), Tree([[0]])]


# Sources


def counts(hits, total, **more):
    return json.dumps({"accuracy": {"hits": hits, "total": total}} | more)


def test_a_calibration_takes_precedence_over_the_trainers_accuracies(tmp_path):
    assert find_accuracies(tmp_path, heads_of(2, 9)) is None
    (tmp_path / MEASURED).write_text(counts([[50, 60], [10, 30]], [100, 50]))
    found = find_accuracies(tmp_path, heads_of(2, 9))
    assert found.source == MEASURED
    assert found.by_rank == [pytest.approx([0.5, 0.1]), pytest.approx([0.2, 0.4])]
    (tmp_path / CALIBRATION).write_text(json.dumps({"hits": [[7], [3]], "total": [10, 10]}))
    found = find_accuracies(tmp_path, heads_of(2, 9))
    assert (found.source, found.by_rank) == (CALIBRATION, [[0.7], [0.3]])


def test_ranks_beyond_the_vocabulary_are_left_out(tmp_path):
    (tmp_path / MEASURED).write_text(counts([[5, 6, 7]], [10]))
    assert find_accuracies(tmp_path, heads_of(1, 2)).by_rank == [pytest.approx([0.5, 0.1])]
    assert default_accuracies(heads_of(3, 2)).by_rank == [row[:2] for row in GOOD[:3]]
    assert default_accuracies(heads_of(9, 2)).source == PUBLISHED
    assert most_nodes(map(len, default_accuracies(heads_of(2, 3)).by_rank)) == 1 + 3 + 9


def test_files_of_other_heads_or_damaged_ones_are_named(tmp_path):
    heads, others = heads_of(2, 9), heads_of(2, 8)
    made = {"heads": fingerprint(heads), "settings": {"dtype": "float32"}}
    (tmp_path / CALIBRATION).write_text(counts([[5], [6]], [10, 10], made=made))
    assert find_accuracies(tmp_path, heads).source == CALIBRATION
    assert find_accuracies(tmp_path, others.to(torch.bfloat16)).source == CALIBRATION  # nothing to compare with
    with pytest.raises(ValueError, match=r"calibration.json: expected a calibration of these heads, got one of others"):
        find_accuracies(tmp_path, others.float())
    with pytest.raises(ValueError, match=r"calibration.json: expected accuracies of 3 heads, got 2"):
        find_accuracies(tmp_path, heads_of(3, 9))
    for text in ("{", counts([[11]], [10])):
        (tmp_path / CALIBRATION).write_text(text)
        with pytest.raises(ValueError, match=r"calibration.json: expected"):
            find_accuracies(tmp_path, heads_of(1, 9))


def test_texts_are_read_from_files_that_have_them(tmp_path):
    kept = Calibration(2, 3, [[((0, 1), (0, 0), (2, NONE))]])
    kept.save(tmp_path / CALIBRATION)
    assert load_knowledge(None, tmp_path, heads_of(2, 3), "")[1] == kept
    with pytest.raises(ValueError, match=r"calibration.json: expected at most 2 ranks, as these heads have, got 3"):
        load_knowledge(None, tmp_path, heads_of(2, 2), "")
    # A file of counts alone is refused with what to do.
    values = kept.to_json()
    (tmp_path / CALIBRATION).write_text(json.dumps({name: values[name] for name in values if name != "format"}))
    with pytest.raises(ValueError, match="format: expected 2, got None; run `medusa calibrate` again"):
        load_knowledge(None, tmp_path, heads_of(2, 3), "")
    (tmp_path / CALIBRATION).rename(tmp_path / MEASURED)
    assert load_knowledge(None, tmp_path, heads_of(2, 3), "")[1] is None


def test_texts_of_another_base_model_are_refused(tmp_path):
    heads = heads_of(2, 9)
    made = {"heads": fingerprint(heads), "base_model": "own", "settings": {"dtype": "float32", "temperature": 0.5}}
    file = tmp_path / CALIBRATION
    file.write_text(counts([[5], [6]], [10, 10], made=made))
    assert find_accuracies(tmp_path, heads, "own").source == CALIBRATION
    with pytest.raises(ValueError, match=r"calibration.json: expected texts of this base model, got those of another"):
        find_accuracies(tmp_path, heads, "other")
    # In another dtype fingerprints cannot be compared: the file is used and reported as unchecked.
    half = find_accuracies(tmp_path, copy.deepcopy(heads).to(torch.bfloat16), "other")
    found = find_accuracies(tmp_path, heads, "own").calibration
    assert (half.source, half.calibration.checked, found.checked) == (CALIBRATION, False, True)
    assert (found.path, found.temperature) == (CALIBRATION, 0.5)
    elsewhere = load_accuracies(file, CALIBRATION, tmp_path / "elsewhere", heads)
    assert elsewhere.calibration.path == str(file.resolve())
    file.write_text(counts([[5], [6]], [10, 10]))
    other = find_accuracies(tmp_path, heads).calibration
    assert (other.temperature, other.checked) == (None, False)
    assert other.hash != found.hash


# Every tree in generations, with a simulated clock


def counted(heads, draws, positions=20_000):
    """Accuracies as a calibration finds them: shares of draws."""
    found = []
    for row in heads:
        hits = [0] * len(row)
        for _ in range(positions):
            left = draws.random()
            for rank, accuracy in enumerate(row):
                if left < accuracy:
                    hits[rank] += 1
                    break
                left -= accuracy
        found.append([count / positions for count in hits])
    return found


def disturbed(seconds, draws):
    """A measured duration: noise, two speeds, and occasional outliers."""
    speed = 1.25 if draws.random() < 0.3 else 1.0
    return seconds * speed * math.exp(0.03 * draws.gauss(0, 1)) * (20.0 if draws.random() < 0.03 else 1.0)


@pytest.mark.parametrize("heads", [BETTER, USELESS, GOOD], ids=["better", "useless", "published"])
@pytest.mark.parametrize("times", [CPU, GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize("seed", range(2))
def test_the_selected_tree_is_within_three_percent_of_the_best(times, heads, seed):
    draws = random.Random(seed)
    accuracies = counted(heads, draws)
    measured = [
        Latency(1, 128, 512, nodes, tuple(disturbed(seconds, draws) for _ in range(60)))
        for nodes, seconds in times.items()
    ]
    trees = best_trees(accuracies, [one.nodes for one in measured])
    pick = fastest(timed_trees(trees, expected_tokens(trees, accuracies), measured))

    def write(text, tree):
        tokens = steps = 0
        while tokens < 2000:
            tokens += commit(tree, heads, draws)
            steps += 1
        return Written(tokens, steps, steps * times[tree.num_nodes])

    found = sweep(write, trees, texts=10, rounds=1)
    verdict = judge([pick.tree] * 10, found)
    assert 0.0 <= verdict["behind"] <= 0.03
    slowest = min(found, key=lambda one: one.rate)
    assert judge([slowest.tree] * 10, found)["behind"] > 0.1  # not every tree would pass
    if heads is USELESS:
        assert pick.tree == Tree([])
