"""Figures in README and docs are those of the records, and every claim has a record or a reason for having none."""

from pathlib import Path

import pytest

from benchmarks import trace

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_figure_has_its_record(page):
    assert list(trace.problems(page.read_text(encoding="utf-8"))) == []


def test_every_name_means_a_record_and_is_used():
    pages = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    used = {
        found[key].split("/")[0] for found in trace.FIGURE.finditer(pages) for key in ("place", "over") if found[key]
    }
    for found in trace.BY_VALUE.finditer(pages):
        used.update(found["names"].split())
    assert used == trace.names().keys()
    assert all(trace.records_of(name) for name in used)
