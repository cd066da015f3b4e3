"""medusa tree: show and search, on counts small enough to know the answer."""

import io
import json
import re
import sys

import pytest

from medusa_decoding import Tree
from medusa_decoding.cli import main
from medusa_decoding.tuning.accuracy import NONE, Calibration

# Heads that are right together: behind rank 0 only rank 0, behind rank 1 only rank 1.
TOGETHER = Calibration(2, 2, {(0, 0): 5, (1, 1): 4, (NONE, NONE): 1})


@pytest.fixture
def file(tmp_path):
    TOGETHER.save(tmp_path / "c.json")
    return str(tmp_path / "c.json")


def test_search_compares_both_ways(capsys, file, tmp_path):
    Calibration(2, 2, {(0, 0): 1, (1, 0): 1, (0, NONE): 2}).save(tmp_path / "other.json")
    argv = ["tree", "search", "--calibration", file, "--nodes", "3,5"]
    assert main(argv) == 0
    head, three, five = capsys.readouterr().out.splitlines()
    assert re.split(r"\s{2,}", head.strip())[1:4] == ["if independent", "its tree by paths", "best by paths"]
    assert three.split() == ["3", "1.900", "1.900", "2.000", "+5.3", "%", "1"]
    assert five.split() == ["5", "2.350", "2.400", "2.800", "+19.1", "%", "1"]
    assert main([*argv, "--held-out", str(tmp_path / "other.json"), "--json"]) == 0
    three, five = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert three["nodes"] == 3
    assert three["if_independent"] == {"tree": [[0], [1]], "estimate": 1.9, "tokens": 1.9, "held_out": 2.0}
    assert three["whole_paths"] == {"tree": [[0], [0, 0]], "tokens": 2.0, "held_out": 2.0}
    assert three["different_nodes"] == 1
    assert five["whole_paths"]["tree"] == [[0], [1], [0, 0], [1, 1]]
    assert main([*argv, "--held-out", str(tmp_path / "other.json")]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[-2:] == ["2.000", "2.000"]


def test_search_saves_a_tree_that_show_draws(capsys, file, tmp_path):
    tree = tmp_path / "tree.json"
    assert main(["tree", "search", "--calibration", file, "--nodes", "5", "--save", str(tree)]) == 0
    assert Tree.load(tree) == Tree([[0], [1], [0, 0], [1, 1]])
    capsys.readouterr()
    assert main(["tree", "show", str(tree), "--accuracies", file, "--width", "40"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == ["0   ●", "  ┌─┴─┐", "1 █   █", "  │   │", "2 █   █"]
    assert lines[6] == "5 nodes, depth 2; 2.800 tokens a step"  # of whole paths, not 2.35


def test_show_takes_plain_accuracies_and_shapes(capsys, tmp_path):
    (tmp_path / "a.json").write_text("[[0.5, 0.4], [0.5, 0.4]]")
    assert main(["tree", "show", "cartesian:2,1", "--accuracies", str(tmp_path / "a.json"), "--width", "60"]) == 0
    assert "5 nodes, depth 2; 2.350 tokens a step expected." in capsys.readouterr().out  # 1 + .5 + .4 + .25 + .2
    assert main(["tree", "show", "chain:2+lookup:1"]) == 0
    assert capsys.readouterr().out.splitlines()[:5] == ["0   ●", "  ┌─┴─┐", "1 0   ◇", "  │", "2 0"]


def test_show_draws_an_image(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    image = tmp_path / "tree.png"
    assert main(["tree", "show", "cartesian:3,2", "--image", str(image)]) == 0
    assert image.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert "10 nodes, depth 2" in capsys.readouterr().out


def test_a_terminal_that_knows_ascii_only_gets_ascii(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    assert main(["tree", "show", "cartesian:3", "--width", "40"]) == 0
    assert written.getvalue().decode().splitlines()[:3] == ["0     o", "  +---+---+", "1 0   1   2"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["search", "--calibration", "missing.json"], "missing.json"),
        (["search", "--calibration", "PLAIN"], r"a.json: expected a file that `medusa calibrate` wrote"),
        (["search", "--calibration", "FILE", "--nodes", "8"], "num_nodes: expected at most 7 with these heads, got 8"),
        (["search", "--calibration", "FILE", "--nodes", "2,3", "--save", "t.json"], "--save: expected one size"),
        (["search", "--calibration", "FILE", "--nodes", "2", "--save", "no/such/t.json"], "--save: expected a file in"),
        (["show", "chain:3", "--accuracies", "FILE"], "depth 3, expected at most 2"),
        (["show", "chain:1", "--width", "10"], "width: expected at least 20 columns, got 10"),
        (["show", "chain:1", "--image", "no/such/t.png"], "--image: expected a file in a folder that exists"),
    ],
)
def test_refusals(capsys, file, tmp_path, argv, words):
    (tmp_path / "a.json").write_text("[[0.5, 0.4]]")
    places = {"FILE": file, "PLAIN": str(tmp_path / "a.json")}
    assert main(["tree", *(places.get(word, word) for word in argv)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert re.search(words, line)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["show", "auto"], "expected a tree, got 'auto'"),
        (["search", "--calibration", "x", "--nodes", "257"], "expected at most 256 nodes, got 257"),
        ([], "ACTION"),
    ],
)
def test_arguments_that_cannot_be(capsys, argv, words):
    with pytest.raises(SystemExit) as end:
        main(["tree", *argv])
    assert end.value.code == 2
    assert words in capsys.readouterr().err


def test_without_matplotlib_an_image_is_refused_before_any_work(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["tree", "show", "chain:1", "--image", str(tmp_path / "t.png")]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "medusa-kernels[train]" in captured.err
