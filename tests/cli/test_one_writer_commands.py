"""Commands that write an output folder or a resumable file: a second one is refused."""

from __future__ import annotations

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from medusa_decoding.cli import main
from medusa_decoding.files import only_writer

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
import workshop

HELD = r"another process writes to \S+ \(it holds \S+\.lock\)"


def elsewhere(*command: str) -> int:
    """Run a command in a thread of its own, which does not hold the locks of this one."""
    with ThreadPoolExecutor(1) as other:
        return other.submit(main, list(command)).result()


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    base, data = workshop.make_base(tmp_path / "base"), workshop.make_data(tmp_path / "data.jsonl")
    file = tmp_path / "recipe.yaml"
    file.write_text(workshop.config(tmp_path / "out", base, data).to_yaml())
    return file


def test_training_and_distillation_hold_the_folder_that_they_write(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = ["--config", str(recipe)], tmp_path / "out"
    for place, inside, command in (
        (out, True, ["train", *config]),
        (out, True, ["distill", *config]),
        (out / "generated" / "records.jsonl", False, ["distill", *config, "--only-data"]),
    ):
        with only_writer("x", place, inside=inside):
            assert elsewhere(*command) == 2
        assert re.search(HELD, capsys.readouterr().err)
    assert not [path for path in out.glob("**/*") if path.is_file()]


def test_results_that_take_long_have_one_writer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text(json.dumps({"text": "def f(x):"}) + "\n")
    text = ["--prompts", str(prompts), "--max-new-tokens", "8"]
    for command in (["calibrate", *text], ["eval", *text], ["tune", "--nodes", "2", "--repeats", "1"]):
        with only_writer("x", out):
            assert elsewhere(*command, "--out", str(out)) == 2
        assert re.search(f"--out: {HELD}", capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == [prompts]
