"""medusa tune: on a copy of the embedded model with few repeats, what it stores, checks and compares, and refusals."""

import json
import re
import shutil

import pytest
import torch

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.checkpoints import read_heads, write_heads
from medusa_decoding.cli import main
from medusa_decoding.cli import tune as command
from medusa_decoding.demo import CHECKPOINT
from medusa_decoding.tuning import select
from medusa_decoding.tuning.step_timer import Latency

QUICK = ["--nodes", "2,4", "--prefix", "16,64", "--repeats", "1", "--undecided", "auto"]
FLOAT32 = ["--dtype", "float32"]


# The copies are without the accuracies that the checkpoint has: those of the paper are taken then.
WITHOUT = shutil.ignore_patterns("tuning.json", "calibration.json", "measured.json")


@pytest.fixture
def folder(tmp_path):
    """A copy of the embedded checkpoint's heads (of its base model only a name)."""
    shutil.copytree(CHECKPOINT, tmp_path / "demo", ignore=WITHOUT)
    return tmp_path / "demo" / "heads"


@pytest.fixture(scope="module")
def choice(tmp_path_factory):
    """The tuning file that `QUICK` writes, measured once for all tests that only read it."""
    folder = tmp_path_factory.mktemp("choice")
    shutil.copytree(CHECKPOINT, folder / "demo", ignore=WITHOUT)
    assert main(["tune", "--model", str(folder / "demo" / "heads"), *FLOAT32, *QUICK]) == 0
    return (folder / "demo" / "heads" / "tuning.json").read_text()


@pytest.fixture
def stored(folder, choice):
    """Write a tuning file next to the copy of the heads."""
    (folder / "tuning.json").write_text(choice)
    return folder / "tuning.json"


@pytest.fixture
def tune(folder, capsys):
    """Run the command on the copy: (exit code, standard output, lines of medusa on standard error)."""

    def run(*argv):
        code = main(["tune", "--model", str(folder), *FLOAT32, *map(str, argv)])
        captured = capsys.readouterr()
        return code, captured.out, [line for line in captured.err.splitlines() if line.startswith("medusa: ")]

    return run


def test_a_tuning_is_measured_stored_and_used(tune, folder):
    code, out, _ = tune(*QUICK, "--batch", "2,1", "--json")
    assert code == 0
    figures = json.loads(out)
    file = folder / "tuning.json"
    assert figures.pop("file") == str(file)
    assert json.loads(file.read_text()) == figures
    assert [path.name for path in folder.iterdir() if "partial" in path.name] == []
    assert (figures["dtype"], figures["backend"], figures["processes"]) == ("float32", "eager", 1)
    assert figures["accuracies"]["source"] == "published"
    assert [(case["batch"], case["prefix"]) for case in figures["cases"]] == [(1, 16), (1, 64), (2, 16), (2, 64)]
    for case in figures["cases"]:
        assert [size["nodes"] for size in case["sizes"]] == [1, 2, 4, 8]  # the last is the checkpoint's own
        assert Tree(case["sizes"][3]["choices"]) == Tree.load(folder / "medusa_tree.json")
        for size in case["sizes"]:
            assert size["steps"] == 3
            assert size["low"] <= size["median"] <= size["high"]
            assert size["tokens_per_second"] == pytest.approx(size["tokens"] / size["seconds"])
        # One round tells nothing about others.
        assert (case["choices"], case["nodes"], case["speedup"], case["gain"]) == ("auto", None, None, None)
        # The paper's sum for the published accuracies, 0.56 for the first head's best.
        assert [size["tokens"] for size in case["sizes"][:2]] == pytest.approx([1.0, 1.56])
    held = {(entry["batch"], entry["nodes"]) for entry in figures["step_times"]["step_times"]}
    assert held == {(batch, nodes) for batch in (1, 2) for nodes in (1, 2, 4, 8)}
    with MedusaModel.from_pretrained(folder, dtype="float32") as model:
        choice = model.tree_choice()
    assert choice.tree == "auto"
    assert choice.reason == "`medusa tune` could not tell its fastest tree from plain decoding"


def synthetic(monkeypatch, ratios):
    """Have steps take made-up times: per round, a tree's step takes `ratios` times 10 ms per node beyond the root's."""

    def time_steps(model, trees, batch, prefix, repeats, on_block):
        rounds = [ratios[number % len(ratios)] for number in range(repeats)]
        return [
            Latency(
                batch,
                prefix,
                prefix + 256,
                tree.num_nodes,
                tuple(0.01 * (1 + ratio * (tree.num_nodes - 1)) for ratio in rounds for _ in range(3)),
            )
            for tree in trees
        ]

    monkeypatch.setattr(command, "time_steps", time_steps)


@pytest.mark.parametrize(
    ("ratios", "nodes", "reason"),
    [
        # 1.56 tokens are expected of 2 nodes, 1.85 of 4, and 1.80 of the checkpoint's chain of 8.
        ((0.1, 0.11), 2, "tuned on this device for batch 1 and prefix 16"),
        ((0.001, 0.002), 4, "tuned on this device for batch 1 and prefix 16"),
        ((0.9, 1.0), 1, "`medusa tune` found no tree faster here: 0.80 of plain"),
    ],
)
def test_the_chosen_tree_is_used_and_the_reason_said(tune, folder, monkeypatch, capsys, ratios, nodes, reason):
    synthetic(monkeypatch, ratios)
    code, out, _ = tune("--nodes", "2,4", "--prefix", "16")
    assert code == 0
    assert re.search("chosen: plain decoding;" if nodes == 1 else f"chosen: the tree of {nodes} nodes", out)
    assert "  medusa_tree.json" in out
    argv = ["generate", "--model", str(folder), "--dtype", "float32", "--prompt", "import os", "--max-new-tokens", "8"]
    assert main(argv) == 0
    last = capsys.readouterr().err.splitlines()[-1]
    name = "plain decoding" if nodes == 1 else f"{nodes} nodes"
    assert last.endswith(f" s with the prefill, tree: {name}, or tokens copied from the text ({reason})]")


def test_times_that_cannot_tell_are_refused_with_both_spreads(tune, folder, monkeypatch):
    """Steps of 12 to 28 ms on a busy machine: 2 nodes seem slower than plain decoding, by chance."""
    synthetic(monkeypatch, (0.2, 1.8, 0.2, 1.8, 1.8, 0.2, 0.2))
    code, out, [line] = tune("--nodes", "2", "--prefix", "16,64")
    assert code == 2
    assert out.count("undecided: the fastest tree has 0.8") == 2  # 1.56 tokens in 18.9 ms
    assert "12.000..28.000" in out
    assert "stored in" not in out
    assert not (folder / "tuning.json").exists()
    assert line.startswith("medusa: tuning: expected times that can tell the fastest tree from plain decoding, got 0.8")
    assert "times the rate of plain decoding for batch 1 and prefix 16; 0.8" in line
    assert "--undecided auto" in line
    code, out, errors = tune("--nodes", "2", "--prefix", "16,64", "--undecided", "auto")
    assert (code, errors) == (0, [])
    assert [case["choices"] for case in json.loads((folder / "tuning.json").read_text())["cases"]] == ["auto"] * 2
    with MedusaModel.from_pretrained(folder, dtype="float32") as model:
        assert model.tree_choice().tree == "auto"
        assert model._adaptive().times.profile(1, 16 + 256).known()[2] == pytest.approx(0.012)


def test_a_tuning_that_is_refused_keeps_the_stored_one(tune, stored, choice, monkeypatch):
    synthetic(monkeypatch, (0.2, 1.8))
    assert tune("--nodes", "2", "--prefix", "16")[0] == 2
    assert stored.read_text() == choice


def write_prompts(file, texts=("import os\n", "def f(x):\n    return")):
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


@pytest.fixture(scope="module")
def counts(tmp_path_factory):
    """The content of a calibration of the demo model's heads."""
    folder = tmp_path_factory.mktemp("counts")
    argv = ["--prompts", str(write_prompts(folder / "asked.jsonl")), "--max-new-tokens", "20", "--out"]
    assert main(["calibrate", *FLOAT32, *argv, str(folder / "c.json")]) == 0
    return (folder / "c.json").read_text()


@pytest.fixture
def calibration(counts, tmp_path):
    """A calibration of the copy's heads, elsewhere."""
    (tmp_path / "c.json").write_text(counts)
    return tmp_path / "c.json"


def steps_by_hand(texts, choices):
    """Tokens per step along the texts of a calibration file, computed independently."""
    tokens = steps = 0
    for text in (text for of_prompt in texts for text in of_prompt):
        ranks = [[None if rank == "-" else int(rank) for rank in text[i : i + 4]] for i in range(0, len(text), 4)]
        here = 0
        while here < len(ranks):
            here += 1 + max((d for d in range(1, 5) if ranks[here][:d] in choices), default=0)
            steps += 1
        tokens += len(ranks)
    return tokens / steps


def test_texts_of_a_calibration_are_walked(tune, folder, calibration, monkeypatch):
    texts = json.loads(calibration.read_text())["texts"]
    searched, search = [], select.walked_tree
    monkeypatch.setattr(select, "walked_tree", lambda texts, nodes: searched.append(nodes) or search(texts, nodes))
    argv = ["--nodes", "3,9", "--prefix", "20,40", "--repeats", "1", "--undecided", "auto"]
    argv += ["--calibration", calibration, "--json"]
    code, out, [line] = tune(*argv)
    assert code == 0
    assert line.startswith("medusa: the calibration has 2 texts; a tree searched on so few")
    assert searched == [3, 9]  # once, for both prefixes
    figures = json.loads(out)
    assert (figures["weighed"], figures["accuracies"]["source"]) == ("walked", "calibration.json")
    for size in figures["cases"][0]["sizes"]:
        assert len(size["choices"]) == size["nodes"] - 1
        assert size["tokens"] == pytest.approx(steps_by_hand(texts, size["choices"]))
    # Next to the heads it is found automatically.
    shutil.copy(calibration, folder / "calibration.json")
    code, out, _ = tune("--nodes", "3,9", "--prefix", "20", "--repeats", "1", "--undecided", "auto")
    assert code == 0
    assert json.loads((folder / "tuning.json").read_text())["weighed"] == "walked"
    with MedusaModel.from_pretrained(folder, dtype="float32") as model:
        assert model.tree_choice().reason.startswith("`medusa tune` could not tell")
    # --check reports that it has changed, and that it is gone.
    values = json.loads(calibration.read_text())
    (folder / "calibration.json").write_text(json.dumps(values | {"made": values["made"] | {"more": 1}}))
    code, out, _ = tune("--check", "--json")
    [note] = json.loads(out)["notes"]
    assert re.fullmatch(r"calibration was calibration.json \((\w+)\), is calibration.json \((?!\1)\w+\)", note)
    (folder / "calibration.json").unlink()
    code, out, _ = tune("--check", "--json")
    assert (code, "No such file" in json.loads(out)["notes"][0]) == (0, True)


def test_a_calibration_of_other_heads_is_refused_or_reported_as_unchecked(tune, calibration):
    values = json.loads(calibration.read_text())
    for name, words in (("heads", "a calibration of these heads"), ("base_model", "texts of this base model")):
        calibration.write_text(json.dumps(values | {"made": values["made"] | {name: "0" * 16}}))
        code, out, errors = tune(*QUICK, "--calibration", calibration)
        assert (code, out) == (2, "")
        assert f"c.json: expected {words}" in errors[-1]
    other = values["made"]["settings"] | {"dtype": "bfloat16", "temperature": 0.7}
    calibration.write_text(json.dumps(values | {"made": values["made"] | {"settings": other}}))
    code, out, _ = tune(*QUICK, "--calibration", calibration)
    assert code == 0
    assert f"calibration: {calibration}, texts drawn at temperature 0.7" in out
    assert "not checked to be of these heads and this base model: it has no fingerprints in float32" in out


def test_check_reports_what_has_changed(tune, folder):
    file = folder / "tuning.json"
    code, out, [line] = tune("--check")
    assert (code, out) == (2, "")
    assert line == f"medusa: {folder}: there is no file that `medusa tune` wrote; run it first"
    assert tune(*QUICK)[0] == 0
    code, out, errors = tune("--check")
    assert (code, errors) == (0, [])
    assert out.startswith(f"{file} holds: ")
    assert "since then" not in out
    values = json.loads(file.read_text())
    file.write_text(json.dumps(values | {"versions": values["versions"] | {"torch": "0.1"}}))
    code, out, _ = tune("--check", "--json")
    assert json.loads(out) == {"file": str(file), "holds": True, "notes": [f"torch was 0.1, is {torch.__version__}"]}
    code, out, [line] = tune("--check", "--dtype", "bfloat16")
    assert (code, out, line) == (2, "", f"medusa: {file}: dtype: tuned with float32, now bfloat16")
    checkpoint = read_heads(folder)
    with torch.no_grad():
        checkpoint.heads.w1.mul_(1.5)
    write_heads(checkpoint.heads, folder, base_model="../base")
    code, out, [line] = tune("--check")
    assert (code, out) == (2, "")
    assert "heads: tuned with" in line
    assert "model: tuned with" not in line


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--out", "no/such/folder/x.json"], "--out: expected a file in a folder that exists"),
        (["--prefix", "1024"], r"prefix: expected at most \d+ \(the model's context holds 1024 tokens\), got 1024"),
        (["--backend", "graph"], "backend: expected 'auto', 'eager' or 'compiled' on cpu, got 'graph'"),
    ],
)
def test_bad_input_is_refused(tune, folder, argv, words):
    code, out, [line] = tune(*argv)
    assert (code, out) == (2, "")
    assert re.search(words, line)
    assert not (folder / "tuning.json").exists()
