"""What a release says: the section of its version in CHANGELOG.md, if every file has that version."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

CHANGELOG = """\
# Changelog

## [Unreleased]

## [1.10.0] - 2026-12-01

### Added

- A thing, see [docs](docs/x.md).

## [1.1.0] - 2026-11-01

- Older.
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "1.10.0"\n[tool.x]\nminversion = "8.0"\n')
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 1.10.0\n")
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    return tmp_path


def notes(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / ".ci/release-notes"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_section_of_the_tag(root: Path, checkout: Path) -> None:
    done = notes(root, "v1.10.0", str(checkout))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "### Added\n\n- A thing, see [docs](docs/x.md).\n"


@pytest.mark.parametrize(
    ("file", "before", "after", "message"),
    [
        ("pyproject.toml", "1.10.0", "1.1.0", "pyproject.toml: expected version 1.10.0 of tag v1.10.0, got 1.1.0"),
        ("CHANGELOG.md", "[1.10.0]", "[1.2]", "expected a section [1.10.0] with text, got Unreleased, 1.2, 1.1.0"),
    ],
)
def test_what_does_not_fit_the_tag(
    root: Path, checkout: Path, file: str, before: str, after: str, message: str
) -> None:
    text = (checkout / file).read_text()
    assert before in text
    (checkout / file).write_text(text.replace(before, after))
    done = notes(root, "v1.10.0", str(checkout))
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr


def test_this_checkout_has_one_version(root: Path) -> None:
    (version,) = re.findall(r'^version = "(.+)"$', (root / "pyproject.toml").read_text(), flags=re.MULTILINE)
    (cited,) = re.findall(r"^version: (.+)$", (root / "CITATION.cff").read_text(), flags=re.MULTILINE)
    assert cited == version
