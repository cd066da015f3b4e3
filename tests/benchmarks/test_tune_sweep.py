"""benchmarks.tune_sweep: which tree is chosen for a prompt, and figures by hand."""

import json
import re
import shutil

import pytest

from benchmarks import tune_sweep
from benchmarks.tune_sweep import Swept, Written, judge, sweep
from medusa_decoding import Tree
from medusa_decoding.cli import main
from medusa_decoding.demo import CHECKPOINT


def test_a_sweep_chooses_by_the_length_of_each_prompt(tmp_path, capsys):
    """As in decoding: 2 nodes for short prompts and 4 for long ones here; prompts without room are reported."""
    shutil.copytree(CHECKPOINT, tmp_path / "demo", ignore=shutil.ignore_patterns("tuning.json", "calibration.json"))
    model = ["--model", str(tmp_path / "demo" / "heads"), "--dtype", "float32"]
    quick = ["--nodes", "2,4", "--prefix", "16,64", "--repeats", "1", "--undecided", "auto"]
    assert main(["tune", *model, *quick]) == 0
    tuning = tmp_path / "demo" / "heads" / "tuning.json"
    values = json.loads(tuning.read_text())
    for case, place in zip(values["cases"], (1, 2), strict=True):
        case |= {name: case["sizes"][place][name] for name in ("nodes", "choices")}
    tuning.write_text(json.dumps(values))
    records = [{"text": text} for text in ("import os\n", "x = [1, 2]\n" * 60, "y = 1\n")]
    records.append({"prompt": "z = [3, 4]\n" * 200})  # no text to continue: all of it is asked
    file, out = tmp_path / "texts.jsonl", tmp_path / "records.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    capsys.readouterr()
    tune_sweep.main([*model, "--prompts", str(file), "--max-new-tokens", "8", "--rounds", "1", "--out", str(out)])
    found = json.loads(out.read_text())
    assert (found["benchmark"], found["texts"], found["left_out"]) == ("tune_sweep", 3, 1)
    assert [(case["prefix"], case["texts"], case["chosen_nodes"]) for case in found["cases"]] == [
        (16, 2, 2),
        (64, 1, 4),
    ]
    assert found["behind"] == pytest.approx(
        1 - found["chosen_tokens_per_second"] / max(tree["tokens_per_second"] for tree in found["trees"])
    )
    shown = capsys.readouterr().out
    assert "chosen: 2 nodes for prefix 16, 4 nodes for prefix 64" in shown
    assert re.search(r"what was chosen is number \d of 4, [\d.]+ % (behind|ahead of) the fastest", shown)


def test_sweep_takes_medians_over_rounds_and_shuffles_trees():
    trees, wrote = [Tree([]), Tree.chain(1), Tree.chain(2)], []
    times = {1: [1.0, 5.0, 1.0], 2: [2.0, 2.0, 9.0], 3: [3.0, 3.0, 3.0]}
    seen = {}

    def write(text, tree):
        wrote.append((text, tree.num_nodes))
        number = seen[text, tree.num_nodes] = seen.get((text, tree.num_nodes), -1) + 1
        warm = 1 if text == 0 else 0
        seconds = 1000.0 if number < warm else times[tree.num_nodes][number - warm] * (text + 1)
        return Written(10 * tree.num_nodes, 10, seconds)

    texts = []
    found = sweep(write, trees, texts=2, rounds=3, on_text=lambda: texts.append(len(wrote)))
    assert texts == list(range(4, 22))
    assert wrote[:3] == [(0, 1), (0, 2), (0, 3)]
    orders = [[nodes for _, nodes in wrote[place : place + 3]] for place in range(3, 21, 3)]
    assert all(sorted(order) == [1, 2, 3] for order in orders)
    assert len(set(map(tuple, orders))) > 1
    plain, chain, longer = found
    # Of each text the median of its rounds: 1 s and 2 s for 20 tokens; 2 s and 4 s for 40; 3 s and 6 s for 60.
    assert [one.rate for one in found] == pytest.approx([20 / 3, 40 / 6, 60 / 9])
    assert (plain.low, plain.high) == (pytest.approx(20 / 15), pytest.approx(20 / 3))
    assert (chain.low, longer.tokens_per_step) == (pytest.approx(40 / 27), 3.0)
    assert plain.texts == ((10, 1.0), (10, 2.0))
    # Half as fast in every text: so are all draws of texts.
    slow = Swept(Tree.chain(3), tuple((n, 2 * seconds) for n, seconds in plain.texts), 0.0, 0.0, 1.0)
    of_best = judge([slow.tree] * 2, [plain, slow])["chosen_over_best"]
    assert [of_best[name] for name in ("value", "low", "high")] == pytest.approx([0.5, 0.5, 0.5])


def test_verdicts_by_hand():
    found = [Swept(Tree.chain(n), ((rate, 1.0),), rate, rate, 1.0) for n, rate in ((0, 8), (1, 10), (2, 9))]
    assert judge([Tree.chain(1)], found) == judge([Tree.chain(1)], found[::-1])
    verdict = judge([Tree.chain(0)], found)
    assert [verdict[name] for name in ("rank", "behind", "best_nodes")] == [3, pytest.approx(0.2), 2]
    with pytest.raises(ValueError, match="texts: none has more than one new token"):
        sweep(lambda text, tree: Written(0, 0, 0.0), [Tree([])], 1)


def test_the_best_tree_may_differ_per_text():
    """Each of two trees is faster for one of two texts: selected per text, they are faster than either alone."""
    one = Swept(Tree.chain(1), ((10, 1.0), (10, 4.0)), 4.0, 4.0, 1.0)
    two = Swept(Tree.chain(2), ((10, 2.0), (10, 2.0)), 5.0, 5.0, 1.0)
    verdict = judge([one.tree, two.tree], [one, two])
    assert (verdict["rank"], verdict["best_nodes"]) == (1, two.tree.num_nodes)
    assert (verdict["chosen_tokens_per_second"], verdict["behind"]) == pytest.approx((20 / 3, 1 - 20 / 3 / 5))
    assert verdict["chosen_over_best"]["value"] == pytest.approx(4 / 3)
    worst = judge([two.tree, one.tree], [one, two])
    assert (worst["rank"], worst["chosen_tokens_per_second"]) == (3, pytest.approx(20 / 6))
    assert judge([one.tree] * 2, [one, two])["chosen_tokens_per_second"] == 4.0
