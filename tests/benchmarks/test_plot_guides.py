"""The guides' figures: each is drawn from the committed records, with the numbers that the guides quote."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import plot_guides
from medusa_decoding import Tree
from medusa_decoding.demo import CHECKPOINT

needs_demo = pytest.mark.skipif(
    not (CHECKPOINT / "measured.json").is_file(), reason="the embedded checkpoint is not there"
)


def test_every_path_that_branches_off_has_a_line_of_its_own() -> None:
    tree = Tree([[0], [1], [0, 0], [0, 1], [1, 0]])
    assert plot_guides._places(tree) == [(0, 1), (1, 1), (1, -1), (2, 1), (2, 0), (2, -1)]


@needs_demo
@pytest.mark.slow
def test_figures_show_what_the_guides_quote(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = {path.stem: path.read_text() for path in plot_guides.draw(tmp_path)}
    shown = {name: re.findall(r">\s*([^<>]+?)\s*</text>", text) for name, text in files.items()}
    assert len(set(shown["one-step"]) & {"path", ",", "str", "):", "return", "bytes"}) == 6
    assert "def read_lines(path):" in files["one-step"]
    assert {"1.08", "1.18", "1.42"} <= set(shown["step-cost"])
    assert {"1002", "294", "261", "199"} <= set(shown["heads-cost"])
    assert {"394", "1071", "1446", "970", "1285"} <= set(shown["generations"])
    assert "two blocks per head" in shown["head-kinds"]
