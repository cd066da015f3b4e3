"""Commands that write an output folder or a resumable file: a second one is refused."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from medusa_decoding.cli import main
from medusa_decoding.files import only_writer

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
import workshop

HELD = r"another process writes to \S+ \(it holds \S+\.lock\)"


def start(*arguments: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "medusa_decoding", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | (environment or {}),
    )  # fmt: skip


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    base, data = workshop.make_base(tmp_path / "base"), workshop.make_data(tmp_path / "data.jsonl")
    file = tmp_path / "recipe.yaml"
    # Long enough that it never ends by itself here.
    endless = {"epochs": 100_000.0}
    file.write_text(workshop.config(tmp_path / "out", base, data, optimisation=endless).to_yaml())
    return file


@pytest.mark.slow
def test_only_one_training_writes_a_folder_and_a_killed_one_releases_it(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["train", "--config", str(recipe), "--json"]
    two = [start(*command), start(*command)]
    try:
        ended: list[subprocess.Popen[str]] = []
        for _ in range(1200):
            ended = [process for process in two if process.poll() is not None]
            if ended:
                break
            time.sleep(0.1)
        (loser,) = ended
        (winner,) = [process for process in two if process is not loser]
        _, said = loser.communicate()
        assert loser.returncode == 2
        (line,) = [line for line in said.splitlines() if line.startswith("medusa: ")]
        assert re.search(f"output.folder: {HELD}", line), line
        while not list((tmp_path / "out").glob("checkpoints/step-*")):
            assert winner.poll() is None, winner.communicate()
            time.sleep(0.1)
        # A --check is refused in the same way, and another folder is free.
        assert main([*command, "--check", "--resume"]) == 2
        assert re.search(HELD, capsys.readouterr().err)
        assert main([*command, "--check", "--set", f"output.folder={tmp_path / 'out' / 'inner'}"]) == 0
    finally:
        for process in two:
            process.kill()
            process.communicate()
    assert (tmp_path / "out" / ".lock").exists()
    assert main([*command, "--check", "--resume"]) == 0


@pytest.mark.slow
def test_distil_holds_the_folder_that_it_will_train_into(recipe: Path, tmp_path: Path) -> None:
    command = ["distill", "--config", str(recipe)]
    for place, inside, arguments in (
        (tmp_path / "out", True, command),
        (tmp_path / "out" / "generated" / "records.jsonl", False, [*command, "--only-data"]),
    ):
        with only_writer("x", place, inside=inside):
            process = start(*arguments)
            _, said = process.communicate(timeout=120)
        assert process.returncode == 2
        assert re.search(HELD, said), said
    assert not [path for path in tmp_path.glob("out/**/*") if path.is_file()]


@pytest.mark.slow
def test_results_that_take_long_have_one_writer(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"text": "def f(x):"}) + "\n")
    text = ["--prompts", str(prompts), "--max-new-tokens", "8"]
    commands = [["calibrate", *text], ["eval", *text], ["tune", "--nodes", "2", "--repeats", "1", "--prefix", "8"]]
    outs = [tmp_path / f"{command[0]}.json" for command in commands]
    with contextlib.ExitStack() as held:
        for out in outs:
            held.enter_context(only_writer("x", out))
        started = [start(*command, "--out", str(out)) for command, out in zip(commands, outs, strict=True)]
        said = [process.communicate(timeout=180)[1] for process in started]
    assert [process.returncode for process in started] == [2, 2, 2]
    for each in said:
        assert re.search(f"--out: {HELD}", each), each
    assert list(tmp_path.iterdir()) == [prompts]


@pytest.mark.slow
def test_all_processes_of_a_run_end_with_the_message_of_the_main_one(recipe: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    two = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with only_writer("x", tmp_path / "out", inside=True):
        ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
        started = [start("train", "--config", str(recipe), environment=two | rank) for rank in ranks]
        said = [process.communicate(timeout=180)[1] for process in started]
    assert [process.returncode for process in started] == [2, 2]
    first, second = ([line for line in each.splitlines() if line.startswith("medusa: ")] for each in said)
    assert first == second
    assert re.search(f"^medusa: output.folder: {HELD}", first[0])
