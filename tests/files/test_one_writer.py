"""One writer per output path: a second one is refused, and a killed holder releases it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from medusa_decoding import files
from medusa_decoding.files import only_writer

HOLD = """
import runpy, sys
only_writer = runpy.run_path(sys.argv[3])["only_writer"]  # the module alone: the package imports torch
with only_writer("out", sys.argv[1], inside=sys.argv[2] == "inside"):
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(path: Path, where: str = "inside") -> subprocess.Popen[str]:
    """Start a process that holds a path until its standard input ends."""
    command = [sys.executable, "-c", HOLD, str(path), where, files.__file__]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.communicate(timeout=60)


def test_a_second_writer_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "a"
    first = holder(folder)
    expected = rf"^out: another process writes to {folder} \(it holds {folder / '.lock'}\); wait for it"
    with pytest.raises(ValueError, match=expected), only_writer("out", folder, inside=True):
        raise AssertionError("held twice")
    # Neither another folder nor one in it or around it is held.
    for other in (tmp_path / "runs" / "b", folder / "c", tmp_path / "runs"):
        with only_writer("out", other, inside=True):
            pass
    end(first)
    assert not folder.exists()
    with only_writer("out", folder, inside=True):
        (folder / "kept").touch()
    assert [file.name for file in folder.iterdir()] == ["kept"]


def test_a_killed_holder_releases_the_folder(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    first = holder(file, "beside")
    first.send_signal(signal.SIGKILL)
    first.wait(timeout=60)
    end(first)
    assert (tmp_path / ".out.json.lock").exists()
    with only_writer("out", file):
        pass
    assert list(tmp_path.iterdir()) == []


APPEND = """
import runpy, sys
append_line = runpy.run_path(sys.argv[2])["append_line"]
for number in range(200):
    append_line(sys.argv[1], [number % 10] * 10_000)
"""


def test_lines_of_several_processes_do_not_mix(tmp_path: Path) -> None:
    file = tmp_path / "records.jsonl"
    command = [sys.executable, "-c", APPEND, str(file), files.__file__]
    several = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait(timeout=60) for process in several] == [0, 0, 0]
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 600
    assert all(line == [line[0]] * 10_000 for line in lines)


def test_a_line_that_does_not_fit_on_the_disk_is_an_error() -> None:
    with pytest.raises(OSError, match="No space left"):
        files.append_line("/dev/full", [1])


def test_a_device_or_pipe_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(
        ValueError, match=rf"^{pipe}: expected a new name or that of a file, got a folder, device or pipe"
    ):
        files.write_json(pipe, {})
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
    assert pipe.is_fifo()
