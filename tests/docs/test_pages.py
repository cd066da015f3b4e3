"""Every command and every piece of Python in the documentation runs, or is marked with what it needs."""

from __future__ import annotations

import re
from pathlib import Path

import pages
import pytest

from medusa_decoding.demo import CHECKPOINT

RUNNABLE = [page for page in pages.PAGES if any(block.runs for block in pages.blocks(page.read_text()))]


def name(page: Path) -> str:
    return str(page.relative_to(pages.ROOT))


@pytest.mark.slow
@pytest.mark.parametrize("page", RUNNABLE, ids=name)
def test_the_blocks_of_a_page_do_what_is_shown(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("COLUMNS", "120")
    pages.run_page(page, tmp_path, CHECKPOINT)


@pytest.mark.parametrize("page", pages.PAGES, ids=name)
def test_every_block_is_run_or_says_why_not(page):
    text = page.read_text()
    for block in pages.blocks(text):
        assert block.language in ("console", "python", "setup", *pages.SHOWN), f"line {block.line}: {block.language!r}"
        unknown = set(block.words) - set(pages.NOT_RUN) - {"output"}
        assert not unknown, f"line {block.line}: {unknown}"
        if block.language == "console":
            assert list(pages.commands(block.body)), f"line {block.line}: no command"
    outside = pages._BLOCK.sub("", text)
    bare = re.findall(r"^(?: {4}|\t)(?:\$ )?(?:medusa|python3?|make|pip|torchrun|accelerate|git) .*$", outside, re.M)
    assert not bare, "commands outside of a console block"


def test_a_block_is_read_with_its_marks_and_its_title():
    text = 'a\n```console gpu\n$ b\n```\n\n  ```json title="c.json"\n  {}\n  ```\n<!-- setup: d\n -->\n'
    assert list(pages.blocks(text)) == [
        pages.Block("console", ("gpu",), "", "$ b\n", 2),
        pages.Block("json", (), "c.json", "{}\n", 6),
        pages.Block("setup", (), "", " d\n ", 9),
    ]


def test_commands_are_told_from_their_output():
    assert list(pages.commands("$ a \\\n    b\nsaid\n\n$ c\n")) == [("a b", ["said", ""]), ("c", [])]
    with pytest.raises(ValueError, match="expected a command"):
        list(pages.commands("a\n"))


@pytest.mark.parametrize(
    ("shown", "missing"),
    [
        (["2 of 3 texts", "1.5 x"], []),
        (["7 of 9 texts"], []),
        (["takes 2 min"], []),
        (["2 of ... texts"], []),
        (["1.5 x", "2 of 3 texts"], ["2 of 3 texts"]),
        (["2 of 3 text"], ["2 of 3 text"]),
    ],
)
def test_shown_lines_must_be_printed_in_order_whatever_the_numbers(shown, missing):
    assert pages.missing_lines(shown, "2 of 3 texts\nelse\n1.52   x\ntakes 90 s\n") == missing


def test_a_page_that_shows_what_is_not_printed_fails(tmp_path, monkeypatch):
    page = pages.ROOT / "docs" / "index.md"
    monkeypatch.setattr(Path, "read_text", lambda self: "```python\nprint(1)\n```\n```text output\none\n```\n")
    with pytest.raises(AssertionError, match="not printed"):
        pages.run_page(page, tmp_path, CHECKPOINT)


def test_clients_are_shown_with_the_versions_that_are_tried():
    files = sorted((pages.ROOT / "tests/clients").glob("requirements*.txt"))
    tried = re.findall(r"^([\w-]+)(?:\[.*\])?(==.+)$", "".join(file.read_text() for file in files), re.M)
    shown = re.findall(r"^\| `([\w-]+)(==[\w.]+)` \|", (pages.ROOT / "docs/serve.md").read_text(), re.M)
    assert set(shown) < set(tried)
    assert {name for name, _ in set(tried) - set(shown)} == {"pytest", "transformers"}
