"""The examples run as they are, on the embedded demo model and without a network."""

from __future__ import annotations

import io
import json
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from medusa_decoding.demo import CHECKPOINT

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def run(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run an example with arguments; return what it prints."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(root / "examples" / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def plain_text(prompt: str, new_tokens: int, dtype: str) -> str:
    """The prompt and the greedy text that transformers alone writes after it, without its end token."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT / "base")
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT / "base", dtype=dtype)
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.inference_mode():
        text = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)[0]
    return tokenizer.decode(text, skip_special_tokens=True)


def test_generate(run) -> None:
    printed = run("generate.py", "--prompt", "Write a class Point with x: float.", "--max-new-tokens", "24")
    new, steps, rate = re.search(r"(\d+) tokens in (\d+) steps: ([\d.]+) per step", printed).groups()
    assert int(new) == 24
    # The first token is the prefill's. No step makes less than one token.
    assert float(rate) == pytest.approx(23 / int(steps), abs=0.005)
    assert int(steps) <= 23
    assert re.search(r"^tree: .+ \(.+\)$", printed, flags=re.MULTILINE)


def test_custom_generate(run) -> None:
    prompt = "Write a command line parser with path and --verbose."
    printed = run("custom_generate.py", "--prompt", prompt)
    assert printed == f"{plain_text(prompt, 128, 'float32')}\n\nThe same tokens as before: True\n"


def test_streaming_chat(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Write a class A with x: int.\nWrite a class B with y: int.\n"))
    printed = run("streaming_chat.py", "--max-new-tokens", "8")
    reused = [int(number) for number in re.findall(r"(\d+) tokens from the cache", printed)]
    assert reused[0] == 0
    assert reused[1] >= 8  # the first turn, in the second one's prompt


def test_the_notebook(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # Without Jupyter: its cells are plain Python. Each says what it found in words that are the same everywhere.
    cells = json.loads((root / "examples/quickstart.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert len(sources) >= 6
    names: dict[str, object] = {"__name__": "__main__"}
    for number, source in enumerate(sources):
        exec(compile(source, f"code cell {number}", "exec"), names)
    printed = capsys.readouterr().out
    assert printed.count("True") == 5
    assert "False" not in printed
    stored = [output for cell in cells for output in cell.get("outputs", [])]
    assert {output["output_type"] for output in stored} == {"stream"}
    assert {output["name"] for output in stored} == {"stdout"}
