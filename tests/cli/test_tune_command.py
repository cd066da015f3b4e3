"""medusa tune: on a copy of the embedded model with few repeats, what it stores, checks and compares, and refusals."""

import json
import re
import shutil

import pytest
import torch

from medusa_decoding import MedusaModel, Tree
from medusa_decoding.checkpoints import read_heads, write_heads
from medusa_decoding.cli import main
from medusa_decoding.demo import CHECKPOINT

QUICK = ["--nodes", "2,4", "--prefix", "16,64", "--repeats", "1"]


@pytest.fixture
def folder(tmp_path):
    """A copy of the embedded checkpoint's heads (of its base model only a name)."""
    shutil.copytree(CHECKPOINT, tmp_path / "demo", ignore=shutil.ignore_patterns("tuning.json", "calibration.json"))
    return tmp_path / "demo" / "heads"


@pytest.fixture
def tune(folder, capsys):
    """Run the command on the copy: (exit code, standard output, lines of medusa on standard error)."""

    def run(*argv):
        code = main(["tune", "--model", str(folder), *map(str, argv)])
        captured = capsys.readouterr()
        return code, captured.out, [line for line in captured.err.splitlines() if line.startswith("medusa: ")]

    return run


def test_measured_stored_and_used(tune, folder):
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
        assert [size["nodes"] for size in case["sizes"]] == [1, 2, 4]
        for size in case["sizes"]:
            assert size["steps"] == 3
            assert size["low"] <= size["median"] <= size["high"]
            assert size["tokens_per_second"] == pytest.approx(size["tokens"] / size["seconds"])
        fastest = max(case["sizes"], key=lambda size: size["tokens_per_second"])
        assert case["nodes"] == fastest["nodes"] == len(case["choices"]) + 1
        # The paper's sum for the published accuracies, 0.56 for the first head's best.
        assert [size["tokens"] for size in case["sizes"][:2]] == pytest.approx([1.0, 1.56])
    held = {(entry["batch"], entry["nodes"]) for entry in figures["step_times"]["step_times"]}
    assert held == {(batch, nodes) for batch in (1, 2) for nodes in (1, 2, 4)}
    with MedusaModel.from_pretrained(folder, dtype="float32") as model:
        assert model.tree == Tree(figures["cases"][0]["choices"])


def test_a_table_for_people_with_counts_of_the_heads(tune, folder):
    counts = {"accuracy": {"hits": [[90, 91]] * 4, "total": [100] * 4}}
    (folder / "calibration.json").write_text(json.dumps(counts))
    code, out, _ = tune("--nodes", "5", "--prefix", "20", "--repeats", "1")
    assert code == 0
    assert "accuracies of the heads: calibration.json (counted on prompts)" in out
    assert "batch 1, prefix 20:" in out
    rows = [line for line in out.splitlines() if re.match(r" [* ] +\d+ ", line)]
    assert [int(row[2:].split()[0]) for row in rows] == [1, 5]
    assert sum(row.startswith(" *") for row in rows) == 1
    assert " 4.10 " in rows[1]  # 1 + 0.9 + 0.81 + 0.729 + 0.6561
    assert f"stored in {folder / 'tuning.json'}" in out


def test_another_file(tune, folder, tmp_path):
    out = tmp_path / "mine.json"
    assert tune(*QUICK, "--out", out)[0] == 0
    assert not (folder / "tuning.json").exists()
    assert len(json.loads(out.read_text())["cases"]) == 2
    assert tune("--check", "--out", out)[0] == 0


def test_check(tune, folder):
    file = folder / "tuning.json"
    code, out, [line] = tune("--check")
    assert (code, out) == (2, "")
    assert line == f"medusa: {file}: expected a file that `medusa tune` wrote, got none"
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


def test_sweep(tune, folder, tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("import os\n", "def f(x):\n    return")))
    assert tune(*QUICK)[0] == 0
    argv = ["--sweep", "--prompts", file, "--max-new-tokens", "8", "--rounds", "1"]
    code, out, _ = tune(*argv, "--json")
    assert code == 0
    found = json.loads(out)
    assert (found["texts"], found["max_new_tokens"], found["rounds"], found["prefix"]) == (2, 8, 1, 16)
    assert [tree["nodes"] for tree in found["trees"]] == [1, 2, 4]
    assert found["trees"][0]["tokens_per_step"] == 1.0
    assert found["trees"][2]["tokens_per_step"] >= found["trees"][1]["tokens_per_step"] > 1.0
    rates = {tree["nodes"]: tree["tokens_per_second"] for tree in found["trees"]}
    assert found["chosen_nodes"] == json.loads((folder / "tuning.json").read_text())["cases"][0]["nodes"]
    assert rates[found["best_nodes"]] == max(rates.values())
    assert found["rank"] == 1 + sum(rate > rates[found["chosen_nodes"]] for rate in rates.values())
    assert found["behind"] == pytest.approx(1 - rates[found["chosen_nodes"]] / max(rates.values()))
    code, out, _ = tune(*argv)
    assert code == 0
    assert re.search(r"the chosen tree of \d nodes is number [123] of 3, [\d.]+ % behind the fastest", out)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--prompts", "x.jsonl"], "--prompts: expected --sweep with it"),
        (["--rounds", "2"], "--rounds: expected --sweep with it"),
        (["--sweep"], "--prompts: expected some files with --sweep"),
        (["--out", "no/such/folder/x.json"], "--out: expected a file in a folder that exists"),
        (["--nodes", "300", "--prefix", "8"], "num_nodes: expected"),
        (["--prefix", "512"], r"prefix: expected at most \d+ \(the model's context holds 512 tokens\), got 512"),
        (["--device", "cuda:9"], "--device: expected cpu"),
        (["--backend", "graph"], "backend: expected 'auto', 'eager' or 'compiled' on cpu, got 'graph'"),
    ],
)
def test_refusals(tune, folder, argv, words):
    if "--device" in argv and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    code, out, [line] = tune(*argv)
    assert (code, out) == (2, "")
    assert re.search(words, line)
    assert not (folder / "tuning.json").exists()


@pytest.mark.parametrize(("option", "value"), [("--nodes", "0"), ("--batch", "1,x"), ("--prefix", "")])
def test_counts_are_from_one(tune, option, value):
    with pytest.raises(SystemExit) as end:
        tune(option, value)
    assert end.value.code == 2


def test_a_damaged_calibration_is_named(tune, folder):
    (folder / "calibration.json").write_text("{")
    code, out, [line] = tune(*QUICK)
    assert (code, out) == (2, "")
    assert "calibration.json: expected" in line
