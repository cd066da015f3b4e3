"""medusa calibrate: where the result is written, resuming, and refusals."""

import itertools
import json
import shutil

import pytest

from benchmarks.simulator import __main__ as simulator
from medusa_decoding.cli import main

PROMPTS = [
    {"question_id": 1, "category": "code", "turns": ["def f(x):\n", "def g(x):\n"]},
    {"question_id": 2, "category": "tests", "turns": ["import os\n"]},
    {"category": "code", "text": "a text that is to be continued"},
]
LIMITS = ["--max-new-tokens", "12", "--prompt-tokens", "8"]
HEADS = 3


@pytest.fixture
def file(write_lines):
    return str(write_lines("asked.jsonl", *PROMPTS))


@pytest.fixture
def heads(checkpoint, tmp_path):
    """A copy of the heads' folder that a test may write into."""
    shutil.copytree(checkpoint, tmp_path / "checkpoint")
    return tmp_path / "checkpoint" / "heads"


def test_the_result_is_next_to_the_heads_and_other_commands_read_it(capsys, file, heads):
    assert main(["calibrate", "--model", str(heads), "--prompts", file, *LIMITS]) == 0
    printed = capsys.readouterr().out
    values = json.loads((heads / "calibration.json").read_text())
    # Four texts of 12 tokens; the last three of each are targets only.
    assert values["accuracy"]["total"] == [4 * (12 - HEADS)] * HEADS
    assert (values["made"]["texts"], values["made"]["tokens"]) == (4, 48)
    assert values["made"]["prompts"]["count"] == 3
    # Two turns, then a turn, then a text: 11 positions with a target each, three ranks per position.
    assert [[len(text) for text in texts] for texts in values["texts"]] == [[33, 33], [33], [33]]
    hits = values["accuracy"]["hits"]
    head, first, *_ = printed.splitlines()
    assert head.split() == ["top-1", "top-2", "top-3", "top-5", "top-10"]
    assert first.split()[:3] == ["head", "1", f"{100 * hits[0][0] / 36:.1f}"]
    assert "36 positions in 4 texts (48 tokens, greedy)" in printed
    tree = ["tree", "search", "--calibration", str(heads / "calibration.json"), "--nodes", "16", "--json"]
    assert main(tree) == 0
    walked = json.loads(capsys.readouterr().out)["walk"]["expected"]["walked"]
    assert f" 16  {walked['value']:.3f} ({walked['low']:.3f} to {walked['high']:.3f})" in printed
    assert str(heads / "calibration.json") in printed
    left = {path.name for path in heads.iterdir()}
    assert not {name for name in left if name.endswith((".progress", ".partial"))}

    # The heads are loaded as before, and the file is found readable elsewhere.
    assert main(["generate", "--model", str(heads), "--prompt", "abc", "--max-new-tokens", "4"]) == 0
    capsys.readouterr()
    argv = ["--accuracies", str(heads / "calibration.json"), "--nodes", "2", "--batch", "1", "--json"]
    assert simulator.main(argv) == 0
    [point] = json.loads(capsys.readouterr().out)["points"]
    gains = (more - less for less, more in itertools.pairwise(hits[0]))
    assert point["acceleration"] == pytest.approx(1 + max(hits[0][0], *gains) / 36, abs=1e-3)


def test_limit_json_and_resume(capsys, file, heads, tmp_path):
    out = tmp_path / "c.json"
    argv = ["calibrate", "--model", str(heads), "--prompts", file, *LIMITS, "--out", str(out), "--json"]
    assert main([*argv, "--limit", "1"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values == json.loads(out.read_text())
    assert values["made"]["prompts"]["count"] == 2  # the first of each category
    assert main(argv) == 0
    whole = out.read_bytes()
    out.unlink()
    # A run that was stopped before its first line on the way to the same result.
    made = json.loads(whole)["made"]
    progress = out.with_name("c.json.progress.settings")
    found = ("texts", "tokens", "left_out")
    progress.write_text(json.dumps({name: value for name, value in made.items() if name not in found}))
    assert main([*argv, "--resume"]) == 0
    assert out.read_bytes() == whole
    assert not progress.exists()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "--out is needed, because the embedded demo checkpoint is no folder of yours"),
        (["--out", "no/such/folder/c.json"], "--out: expected a file in a folder that exists"),
        (["--out", "OUT", "--seed", "1"], "--seed needs --temperature above 0"),
        (["--model", "HEADS", "--max-new-tokens", "3"], "max_new_tokens: expected at least 4, .* got 3"),
    ],
)
def test_bad_input_is_refused(refused, file, heads, tmp_path, argv, words):
    places = {"HEADS": heads, "OUT": tmp_path / "c.json"}
    refused(words, "calibrate", "--prompts", file, *LIMITS, *(places.get(word, word) for word in argv))
    assert not (heads / "calibration.json").exists()
    assert not (tmp_path / "c.json").exists()
