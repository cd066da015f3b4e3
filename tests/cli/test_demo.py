"""medusa demo: what it shows at a terminal, and what it says about its trees."""

import json
import re
import shutil

import pytest
from rich.cells import cell_len
from terminals import plain

from medusa_decoding import Tree
from medusa_decoding.cli import demo, main
from medusa_decoding.demo.checking import problem
from medusa_decoding.demo.requests import EXAMPLES, parse


@pytest.mark.parametrize("width", [40, 200])
def test_the_demo_on_a_terminal(capsys, checkpoint, monkeypatch, at_terminal, width):
    monkeypatch.setattr(demo, "CHECKPOINT", checkpoint)
    at_terminal(width)
    assert main(["demo", "--prompt", "xyz", "--max-new-tokens", "9", "--rounds", "1", "--tree", "chain:2"]) == 0
    out = plain(capsys.readouterr().out)
    for words in ("xyz", "plain decoding", "Medusa", "9 tokens", "identical"):
        assert words in out
    assert ("─ transformers" in out) == (width == 200)  # the third panel, where there is room for it
    figures = r" +\d+ +\d+\.\d\d +\d+\.\d\d"
    assert re.search(rf"^Medusa, 3 nodes{figures}$", out, re.MULTILINE)
    race = out[out.index("Coloured") : out.index("tokens/s  ")]
    assert max(cell_len(line.rpartition("\r")[2]) for line in race.splitlines()) <= width


def test_answers_are_checked(capsys, checkpoint, monkeypatch):
    monkeypatch.setattr(demo, "CHECKPOINT", checkpoint)
    argv = ["demo", "--max-new-tokens", "5", "--rounds", "1", "--tree", "chain:2"]
    assert main([*argv, "--json"]) == 0
    checks = json.loads(capsys.readouterr().out)["checks"]
    assert [one["request"] for one in checks] == list(EXAMPLES)
    assert [one["kind"] for one in checks] == ["class", "function", "command line", "query"]
    for one in checks:
        assert one["problem"] == problem(parse(one["request"]), one["answer"])
    monkeypatch.setattr(demo, "problem", lambda request, answer: "boom" if request.kind == "class" else None)
    assert main(argv) == 0
    out = capsys.readouterr().out
    assert re.search(r"^the answer was run and is wrong \(boom\): Write a class Invoice", out, re.MULTILINE)
    assert len(re.findall("^the answer was run and does what was asked: Write ", out, re.MULTILINE)) == 3
    assert out.index(EXAMPLES[0]) < out.index("tokens/s")
    assert main([*argv, "--prompt", "xyz"]) == 0
    assert "not checked: the request is of none of the kinds that the model knows" in capsys.readouterr().out


def test_other_heads_answer_questions_of_their_own(capsys, checkpoint, tmp_path):
    shutil.copytree(checkpoint / "heads", tmp_path / "heads")
    Tree.chain(3).save(tmp_path / "heads" / "medusa_tree.json")
    argv = ["demo", "--model", str(tmp_path / "heads"), "--base-model", str(checkpoint / "base"), "--rounds", "1"]
    assert main([*argv, "--max-new-tokens", "5", "--json"]) == 0
    out = json.loads(capsys.readouterr().out)
    assert out["identical"]
    assert out["fixed_tree"] == "4 nodes"
    assert [one["request"] for one in out["checks"]] == list(demo.QUESTIONS)
    assert all("kind" not in one for one in out["checks"])
    assert main([*argv, "--max-new-tokens", "5", "--prompt", "xyz"]) == 0
    out = capsys.readouterr().out
    assert "checked" not in out
    assert "parameters is asked:\n\nxyz\n" in out
