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


@needs_demo
@pytest.mark.slow
def test_figures_show_what_the_guides_quote(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    files = {path.stem: path.read_text() for path in plot_guides.draw(tmp_path)}
    shown = {name: re.findall(r">\s*([^<>]+?)\s*</text>", text) for name, text in files.items()}
    assert plot_guides.REQUEST in files["one-step"]
    depth = Tree.load(CHECKPOINT / "heads" / "medusa_tree.json").depth
    assert {"root", *(f"head {k}" for k in range(1, depth + 1))} <= set(shown["one-step"])
    assert {"1.08", "1.22", "1.46"} <= set(shown["step-cost"])
    assert {"1002", "294", "261", "199"} <= set(shown["heads-cost"])
    assert {"838", "3102", "4210", "2665", "3694"} <= set(shown["generations"])
    assert {"own, two blocks", "shared lm_head"} <= set(shown["head-kinds"])
    assert {"61", "53", "80", "our plain loop"} <= set(shown["published-model"])
    assert {"1917", "1399", "479", "98", "41", "18"} <= set(shown["serve-load"])
