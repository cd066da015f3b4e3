"""Records of benchmarks: what they say about the command, and what they leave out."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from benchmarks import harness


@pytest.mark.parametrize(
    ("program", "module"),
    [
        ("/somewhere/benchmarks/bench_step.py", "benchmarks.bench_step"),
        ("/somewhere/benchmarks/variants/__main__.py", "benchmarks.variants"),
        ("/somewhere/bin/pytest", "pytest"),
    ],
)
def test_a_record_names_the_command_without_folders(
    results: Any, monkeypatch: pytest.MonkeyPatch, program: str, module: str
) -> None:
    monkeypatch.setattr(sys, "argv", [program, "--out=/home/me/runs", "--model", "../models/small", "8"])
    harness.write_record(
        "some", {"files": ["/home/me/prompts.jsonl", "runs/heads"], "rows": {"a": {"at": "/x/y", "n": 3}}}
    )
    [record] = results.records()
    assert record["command"] == f"python -m {module} --out=runs --model small 8"
    assert record["files"] == ["prompts.jsonl", "runs/heads"]
    assert record["rows"] == {"a": {"at": "y", "n": 3}}
