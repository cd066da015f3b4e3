"""Reading JSON files: whatever is in them, a ValueError that names the file, within bounds of time and memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from limits import MIB, bounded

from medusa_decoding.checkpoints.accuracies import read_accuracies
from medusa_decoding.checkpoints.tuning_file import Tuning
from medusa_decoding.files import parse_json, read_json, read_json_object
from medusa_decoding.tuning.calibration import Calibration

HOSTILE = {
    "cut off": (b'{"a": 1', "does not parse"),
    "not UTF-8": (b'{"a": "\xff"}', "not UTF-8"),
    "nested": (b"[" * 200_000, "nested too deeply"),
    "digits": (b'{"a": ' + b"7" * 5000 + b"}", "more digits"),
}
READERS: dict[str, Callable[[Path], Any]] = {
    "read_json": read_json,
    "read_accuracies": read_accuracies,
    "Calibration.load": Calibration.load,
    "Tuning.load": Tuning.load,
}


@pytest.mark.parametrize("reader", READERS)
def test_hostile_files_are_refused_by_name(reader: str, tmp_path: Path) -> None:
    for name, (content, reason) in HOSTILE.items():
        file = tmp_path / f"{name}.json"
        file.write_bytes(content)
        with bounded(ValueError, seconds=2, memory=64 * MIB) as said:
            READERS[reader](file)
        assert said, name
        assert str(file) in said[0]
        assert reason in said[0]


def test_a_file_above_the_limit_is_not_read(tmp_path: Path) -> None:
    large = tmp_path / "large.json"
    with large.open("wb") as file:
        os.truncate(file.fileno(), 2**40)
    with bounded(ValueError, seconds=0.5, memory=8 * MIB) as said:
        read_json(large)
    assert said == [f"{large}: expected JSON of at most 67,108,864 bytes, got a larger file"]
    small = tmp_path / "small.json"
    small.write_text("[1, 2]")
    assert read_json(small, limit=6) == [1, 2]
    with pytest.raises(ValueError, match="at most 5 bytes"):
        read_json(small, limit=5)


def test_valid_json_is_read(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_bytes(b'\xef\xbb\xbf{"a": [1, 2.5, null, "\xc3\xa9"]}')
    assert read_json(file) == read_json_object(file) == {"a": [1, 2.5, None, "é"]}
    assert parse_json('"x"', "here") == "x"
    file.write_text("[]")
    with pytest.raises(ValueError, match=r"a\.json: expected a JSON object, got list"):
        read_json_object(file)
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none.json")
