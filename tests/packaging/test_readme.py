"""README names what CI runs, and leads to files that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def readme(root: Path) -> str:
    return (root / "README.md").read_text()


def test_it_names_the_two_commands_of_a_clean_clone(readme: str) -> None:
    assert re.findall(r"^\$ (make (?:demo|test))\b", readme, flags=re.MULTILINE) == ["make demo", "make test"]


def test_its_links_lead_to_files(root: Path, readme: str) -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)", readme) if not link.startswith("https://")]
    assert len(links) > 20
    assert [link for link in links if not (root / link).exists()] == []


def test_every_guide_of_the_site_is_linked(root: Path, readme: str) -> None:
    pages = {page.name for page in (root / "docs").glob("*.md")} - {"index.md"}
    linked = set(re.findall(r"\]\(docs/([\w-]+\.md)", readme))
    # These two continue pages that are linked.
    assert pages - linked <= {"training-results.md", "trees-measured.md"}
