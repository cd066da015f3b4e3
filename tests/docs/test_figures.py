"""Figures in README and docs are those of the records, and every claim has a record or a reason for having none."""

import pytest

from benchmarks import trace

PAGES = trace.pages()


@pytest.mark.parametrize("page", PAGES)
def test_every_figure_has_its_record(page):
    assert list(trace.problems((trace.ROOT / page).read_text(encoding="utf-8"), PAGES[page])) == []


def test_every_name_means_a_record_and_is_used():
    used = set()
    for entry in (entry for entries in PAGES.values() for entry in entries):
        used.update(entry.get("records", "").split())
        for source in entry.get("from", ()):
            if isinstance(source, str):
                found = trace.SOURCE.fullmatch(source)
                used.update(found[key].split("/")[0] for key in ("place", "over") if found[key])
    assert used == trace.names().keys()
    assert all(trace.records_of(name) for name in used)
