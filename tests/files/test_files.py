"""Files and folders that are written atomically."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from medusa_decoding.files import whole_file, whole_folder, write_json, write_text
from medusa_decoding.files.resumable import ResumableFile, companion


def listing(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir()}


class TestFiles:
    def test_a_file_gets_its_name_when_it_is_complete(self, tmp_path: Path) -> None:
        file = tmp_path / "a.txt"
        file.write_text("old")
        with whole_file(file) as scratch:
            scratch.write_text("ne")
            assert file.read_text() == "old"
            assert scratch.parent == tmp_path
            with open(scratch, "a") as rest:
                rest.write("w")
        assert listing(tmp_path) == {"a.txt": "new"}

    @pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
    def test_an_incomplete_file_leaves_nothing(self, tmp_path: Path, error: BaseException) -> None:
        (tmp_path / "a.txt").write_text("old")

        def stopped(scratch: Path) -> None:
            scratch.write_text("ne")
            raise error

        with pytest.raises(type(error)), whole_file(tmp_path / "a.txt") as scratch:
            stopped(scratch)
        assert listing(tmp_path) == {"a.txt": "old"}

    def test_a_file_that_cannot_be_flushed_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(number: int) -> None:
            raise OSError(28, "No space left on device")

        (tmp_path / "a.txt").write_text("old")
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            write_text(tmp_path / "a.txt", "new")
        assert listing(tmp_path) == {"a.txt": "old"}

    def test_values_outside_json_leave_the_old_file(self, tmp_path: Path) -> None:
        write_json(tmp_path / "a.json", {"b": [1, 2]}, indent=None)
        assert listing(tmp_path) == {"a.json": '{"b": [1, 2]}\n'}
        with pytest.raises(TypeError):
            write_json(tmp_path / "a.json", {"b": {1, 2}})
        assert listing(tmp_path) == {"a.json": '{"b": [1, 2]}\n'}


class TestFolders:
    def test_an_existing_folder_is_replaced_only_when_asked(self, tmp_path: Path) -> None:
        with whole_folder(tmp_path / "parent" / "out") as staging:
            (staging / "old").touch()
            assert not (tmp_path / "parent" / "out").exists()
        with (
            pytest.raises(ValueError, match=r"folder: expected a new one, got .*out"),
            whole_folder(tmp_path / "parent" / "out"),
        ):
            pass
        with whole_folder(tmp_path / "parent" / "out", replace=True) as staging:
            (staging / "new").touch()
        assert [entry.name for entry in (tmp_path / "parent").iterdir()] == ["out"]
        assert listing(tmp_path / "parent" / "out") == {"new": ""}

    def test_an_error_leaves_the_old_folder(self, tmp_path: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "file").write_text("old")

        def stopped(staging: Path) -> None:
            (staging / "file").write_text("ne")
            raise RuntimeError("half")

        with pytest.raises(RuntimeError, match="half"), whole_folder(tmp_path / "out", replace=True) as staging:
            stopped(staging)
        assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
        assert listing(tmp_path / "out") == {"file": "old"}

    @pytest.mark.parametrize("number", [1, 2])
    @pytest.mark.parametrize("done", [False, True])
    def test_ctrl_c_between_two_names_loses_neither(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, done: bool
    ) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "file").write_text("old")
        rename, calls = os.rename, []

        def interrupted(*names: Any) -> None:
            calls.append(names)
            if len(calls) != number:
                rename(*names)
                return
            if done:
                rename(*names)
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "rename", interrupted)
        with pytest.raises(KeyboardInterrupt), whole_folder(tmp_path / "out", True) as staging:
            (staging / "file").write_text("new")
        assert listing(tmp_path / "out") == {"file": "new" if number == 2 and done else "old"}
        assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_settings_may_change_until_the_first_record(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    ResumableFile(path, {"turns": 3}, False, dict)  # a run that failed before it wrote anything
    ResumableFile(path, {"turns": 1}, False, dict)
    part = ResumableFile(companion(path, "part-1"), {"turns": 1}, True, dict)
    for resume, message in ((False, "no records of an earlier run"), (True, "turns: expected 1 .*, got 3")):
        ResumableFile(path, {"turns": 1}, True, dict)
        part.write([{"a": 1}])
        with pytest.raises(ValueError, match=message):
            ResumableFile(path, {"turns": 3}, resume, dict)
