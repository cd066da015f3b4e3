"""Every message of the package's errors and warnings is explained in docs/troubleshooting.md."""

from __future__ import annotations

import hooks
import pages
import pytest

PAGE = (pages.ROOT / "docs" / "troubleshooting.md").read_text()
MESSAGES = hooks.messages()


def test_every_message_has_an_entry():
    parts = hooks.sections(PAGE)
    without = [f"{one.where}: {one.text}" for one in MESSAGES if hooks.section_of(one.text, parts) is None]
    assert without == [], "say in docs/troubleshooting.md what they mean and what to do"


def test_every_entry_is_the_beginning_of_a_message():
    entries = hooks.beginnings(PAGE)
    assert len(entries) == len(set(entries))
    assert [entry for entry in entries if not any(hooks.begins(entry, one.text) for one in MESSAGES)] == []


def test_messages_are_read_from_the_source():
    source = 'raise ValueError(f"--device: expected {wanted}, " + "got none")'
    (call,) = [node for node in hooks.ast.walk(hooks.ast.parse(source)) if hooks._message_argument(node)]
    assert hooks._text(call.args[0]) == "--device: expected {}, got none"


def test_what_python_says_is_found_by_its_beginning():
    said = [one.text for one in MESSAGES if one.text.startswith("--config:")]
    assert said == ["--config: expected a YAML file, got none; `medusa train --init MODEL DATA` writes one"]


@pytest.mark.parametrize(
    ("beginning", "message", "fits"),
    [
        ("tree:", "tree: expected a Tree", True),
        ("tree:", "trees: expected at least one", False),
        ("FILE: expected JSON", "{}: expected JSON, got {}", True),
        ("FILE: expected JSON", "tree: expected JSON, got {}", False),
        ("NAME in FILE: expected", "{} in {}: expected {}", True),
        ("layer N:", "layer {}: expected", True),
    ],
)
def test_names_files_and_numbers_stand_for_what_is_filled_in(beginning, message, fits):
    assert hooks.begins(beginning, message) is fits


def test_the_longest_beginning_decides():
    parts = ["## A\n| `tree:` | a |\n", "## B\n| `NAME: expected` `tree: expected a Tree` | b |\n"]
    assert hooks.section_of("tree: expected a Tree, got {}", parts) == 1
    assert hooks.section_of("tree: expected {}", parts) == 0
    assert hooks.section_of("{}: expected {}", parts) == 1
    assert hooks.section_of("else", parts) is None


def test_the_site_lists_a_message_in_its_section():
    page = hooks.with_messages(PAGE)
    chat = page[page.index("## medusa chat") :].split("\n## ")[0]
    assert "`/stats: expected an answer before it, got none so far`" in chat
    assert all("expected an answer before it" not in part for part in page.split("\n## ") if part not in chat)
