"""medusa tree: show and search, on counts small enough to know the answer."""

import json
import re
import shutil

import pytest
from calibrations import with_counts

from medusa_decoding import Tree
from medusa_decoding.cli import main, tune
from medusa_decoding.tuning.calibration import NONE, Calibration
from medusa_decoding.tuning.step_timer import Latency

# Heads that are right together: after rank 0 only rank 0, after rank 1 only rank 1.
TOGETHER = {(0, 0): 5, (1, 1): 4, (NONE, NONE): 1}


@pytest.fixture
def file(tmp_path):
    with_counts(TOGETHER).save(tmp_path / "c.json")
    return str(tmp_path / "c.json")


# The same as texts: of 8 positions of one, steps with rank 0 alone start at 0, 2, 3, 5, 6.
WALKED = Calibration(2, 2, [[((0, 0), (0, 0), (1, 1)) * 2 + ((0, 0), (0, NONE))], [((1, 1), (NONE, NONE))]])


def test_search_compares_its_methods(capsys, file, tmp_path):
    with_counts({(0, 0): 1, (1, 0): 1, (0, NONE): 2}).save(tmp_path / "other.json")
    argv = ["tree", "search", "--calibration", file, "--nodes", "3,5"]
    assert main(argv) == 0
    out = capsys.readouterr().out
    rows = out.splitlines()[1:7]
    # Walked: 20 tokens, in two steps per text whose first position the tree has not.
    assert [row.split() for row in rows] == [
        ["3", "products", "0", "1.900", "1.900", "1.818"],
        ["3", "paths", "1", "1.750", "2.000", "1.333"],
        ["3", "walk", "0", "1.900", "1.900", "1.818"],
        ["5", "products", "0", "2.350", "2.400", "1.818"],
        ["5", "paths", "1", "2.310", "2.800", "1.818"],
        ["5", "walk", "1", "2.310", "2.800", "1.818"],
    ]
    assert main([*argv, "--held-out", str(tmp_path / "other.json"), "--json"]) == 0
    three, five = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert three["nodes"] == 3
    assert three["products"]["tree"] == [[0], [1]]
    assert three["products"]["expected"]["independent"] == {"value": 1.9, "low": None, "high": None}
    assert three["products"]["held_out"]["paths"]["value"] == 2.0
    assert three["paths"]["tree"] == [[0], [0, 0]]
    assert three["paths"]["different_nodes"] == 1
    assert five["paths"]["tree"] == [[0], [1], [0, 0], [1, 1]]
    assert five["paths"]["held_out"]["paths"]["value"] == 1 + 0.75 + 0.25 + 0.25 + 0.0
    assert main([*argv, "--held-out", str(tmp_path / "other.json")]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[-2:] == ["2.000", "2.000"]


MADE = {"heads": "a1", "base_model": "b1", "prompts": {"count": 2, "hash": "c1", "each": ["d1", "d2"]}}


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"heads": "a2"}, "--held-out: expected heads a1 as in .*c.json, got a2"),
        ({}, "--held-out: expected others than the prompts of .*c.json, got 1 of them"),
        ({"prompts": {"count": 2, "hash": "c2", "each": ["d3", "d4"]}}, None),
    ],
)
def test_held_out_counts_are_of_other_prompts_and_the_same_heads(capsys, tmp_path, other, words):
    overlapping = {"prompts": {"count": 2, "hash": "c2", "each": ["d2", "d3"]}}
    for name, made in (("c", MADE), ("held", MADE | overlapping | other)):
        with_counts(TOGETHER, made=made).save(tmp_path / f"{name}.json")
    argv = ["tree", "search", "--calibration", str(tmp_path / "c.json"), "--held-out", str(tmp_path / "held.json")]
    code = main([*argv, "--nodes", "3"])
    captured = capsys.readouterr()
    if words is None:
        assert code == 0
    else:
        assert (code, captured.out) == (2, "")
        assert re.search(words, captured.err)


def test_search_walks_texts(capsys, tmp_path):
    WALKED.save(tmp_path / "c.json")
    argv = ["tree", "search", "--calibration", str(tmp_path / "c.json"), "--nodes", "2"]
    assert main([*argv, "--json"]) == 0
    [found] = map(json.loads, capsys.readouterr().out.splitlines())
    # 8 and 2 tokens; with rank 0 alone 5 and 2 steps: the first text from 0, 2, 3, 5, 6.
    assert found["paths"]["tree"] == [[0]]
    assert found["paths"]["expected"]["walked"]["value"] == pytest.approx(10 / 7)
    ends = found["paths"]["expected"]["walked"]
    assert (ends["low"], ends["high"]) == (1.0, 1.6)  # one prompt or the other alone
    assert found["walk"]["expected"]["walked"]["value"] == pytest.approx(10 / 7)
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert "1.429 (1.000 to 1.600)" in out
    assert "bootstrap over prompts" in out
    for by, wanted in ((["--by", "products"], [[0]]), ([], found["walk"]["tree"])):
        assert main([*argv, "--save", str(tmp_path / "t.json"), *by]) == 0
        assert Tree.load(tmp_path / "t.json") == Tree(wanted)


def test_search_saves_a_tree_that_show_draws(capsys, file, tmp_path):
    tree = tmp_path / "tree.json"
    assert main(["tree", "search", "--calibration", file, "--nodes", "5", "--save", str(tree)]) == 0
    assert Tree.load(tree) == Tree([[0], [1], [0, 0], [1, 1]])
    capsys.readouterr()
    assert main(["tree", "show", str(tree), "--accuracies", file, "--width", "40"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == ["0   ●", "  ┌─┴─┐", "1 █   █", "  │   │", "2 █   █"]
    assert lines[6] == "5 nodes, depth 2; 2.800 tokens per step"  # of whole paths, not 2.35


@pytest.mark.parametrize(
    ("settings", "name"), [({}, "medusa_tree.json"), ({"temperature": 0.7}, "medusa_tree_sampling.json")]
)
def test_search_saves_into_a_folder_by_the_temperature_of_the_texts(tmp_path, settings, name):
    with_counts(TOGETHER, made={"settings": settings}).save(tmp_path / "c.json")
    (tmp_path / "heads").mkdir()
    argv = ["tree", "search", "--calibration", str(tmp_path / "c.json"), "--nodes", "3"]
    assert main([*argv, "--save", str(tmp_path / "heads")]) == 0
    assert [file.name for file in (tmp_path / "heads").iterdir()] == [name]
    assert Tree.load(tmp_path / "heads" / name) == Tree([[0], [1]])


@pytest.fixture
def heads(checkpoint, tmp_path):
    """A copy of the checkpoint's heads whose base model is where it was."""
    folder = shutil.copytree(checkpoint / "heads", tmp_path / "heads")
    config = json.loads((folder / "config.json").read_text())
    config["base_model_name_or_path"] = str(checkpoint / "base")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def show(capsys, *argv):
    assert main(["tree", "show", *map(str, argv), "--device", "cpu"]) == 0
    return capsys.readouterr().out


def tuned(heads, monkeypatch):
    """Store a tuning: of a tree of two nodes for short prefixes, and of plain decoding for long ones."""

    def time_steps(model, trees, batch, prefix, repeats, on_block):
        factor = 1.1 if prefix < 20 else 3.0
        return [
            Latency(batch, prefix, 300, tree.num_nodes, (0.01 * factor ** (tree.num_nodes > 1),) * 3 * repeats)
            for tree in trees
        ]

    monkeypatch.setattr(tune, "time_steps", time_steps)
    argv = ["--nodes", "2", "--prefix", "10,40", "--dtype", "float32", "--device", "cpu"]
    assert main(["tune", "--model", str(heads), *argv]) == 0


PAIR = ["0 ●", "  │", "1 0"]  # a root with one child


def test_show_says_which_tree_heads_use_without_a_tuning(capsys, heads):
    out = show(capsys, heads)
    assert out.startswith("Tree: auto (no tree was tuned for this device; `medusa tune` does that)\n")
    sizes = re.search(r"Each step picks plain decoding or a tree of ([\d, ]+) nodes\.", out)[1].split(", ")
    assert "The largest, which contains the others:\n0 " in out
    assert f"\n{sizes[-1]} nodes, depth " in out
    Tree.chain(1).save(heads / "medusa_tree.json")
    out = show(capsys, heads)
    assert f"plain decoding or a tree of {', '.join(['2', *sizes])} nodes." in out
    at = out.splitlines().index(f"The one of 2 nodes is {heads / 'medusa_tree.json'}:")
    assert [line.rstrip() for line in out.splitlines()[at + 1 : at + 4]] == PAIR


def test_show_draws_the_tuned_trees_and_says_what_was_not_compared(capsys, heads, monkeypatch):
    tuned(heads, monkeypatch)
    capsys.readouterr()
    out = show(capsys, heads)
    lines = out.splitlines()
    assert lines[0].startswith(f"{heads / 'tuning.json'} holds here: ")
    assert "not compared, because the base model is not loaded: its weights" in lines[1]
    at = lines.index("Batch 1, prefix 10: 2 nodes (tuned on this device for batch 1 and prefix 10)")
    assert [line.rstrip() for line in lines[at + 1 : at + 4]] == PAIR
    assert "Batch 1, prefix 40: plain decoding (`medusa tune` found no tree faster here: 0.52 of plain)" in lines
    file = show(capsys, heads / "tuning.json")
    assert file == "".join(out.partition("Batch 1, prefix 10:")[1:])
    Tree.chain(2).save(heads / "medusa_tree.json")
    assert f"{heads / 'medusa_tree.json'} was not timed and is not used" in show(capsys, heads)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["search", "--calibration", "missing.json"], "missing.json"),
        (["search", "--calibration", "PLAIN"], r"a.json: expected a file that `medusa calibrate` wrote"),
        (["search", "--calibration", "FILE", "--nodes", "8"], "num_nodes: expected at most 7 with these heads, got 8"),
        (["show", "chain:3", "--accuracies", "FILE"], "depth 3, expected at most 2"),
    ],
)
def test_bad_input_is_refused(refused, file, tmp_path, argv, words):
    (tmp_path / "a.json").write_text("[[0.5, 0.4]]")
    places = {"FILE": file, "PLAIN": tmp_path / "a.json"}
    refused(words, "tree", *(places.get(word, word) for word in argv))
