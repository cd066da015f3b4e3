"""The code blocks of the documentation, and how a test runs those of one page.

A page's blocks run in their order, in one temporary folder that also has the checkout's `recipes`:

- ```` ```console ````: each line that begins with `$ ` is a command, also over several lines that end in a backslash.
  The lines after it are its output, in order: numbers and durations may differ, `...` stands for anything, and lines
  may be left out.
  A command whose shown output has a line `medusa: ..` must refuse with exit code 2, any other must succeed.
- ```` ```python ````: all blocks of a page share one namespace.
- ```` ```text output ````: what the block before it prints.
- Any block with `title="NAME"` is the content of that file.
- `<!-- setup: .. -->` holds shell commands that readers do not see, for example to put the files in place that a page
  takes for granted. `$DEMO` is the folder of the embedded checkpoint.

Words after the language say why a test does not run a block: see `NOT_RUN` in docs/hooks.py.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hooks import NOT_RUN

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHOWN = ("text", "json", "yaml", "toml", "bibtex")
"""Languages of blocks that are read and not run."""

_BLOCK = re.compile(
    r"^<!-- setup:(?P<setup>.*?)-->$|^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```$", re.M | re.S
)
# A busy machine's seconds are minutes.
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?: (?:s|min|h \d+ min)\b)?")


@dataclass(frozen=True)
class Block:
    """A code block, or hidden commands, which have the language `setup`."""

    language: str
    words: tuple[str, ...]
    title: str
    body: str
    line: int

    @property
    def runs(self) -> bool:
        return self.language in ("console", "python", "setup") and not set(self.words) & set(NOT_RUN)


def blocks(text: str) -> Iterator[Block]:
    """Yield a page's blocks in their order."""
    for found in _BLOCK.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        if found["setup"] is not None:
            yield Block("setup", (), "", found["setup"], line)
            continue
        title = re.search(r'title="([^"]*)"', found["info"])
        language, *words = re.sub(r'\w+="[^"]*"', "", found["info"]).split() or [""]
        body = re.sub(rf"^{found['indent']}", "", found["body"], flags=re.M)
        yield Block(language, tuple(words), title[1] if title else "", body, line)


def commands(body: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each command of a console block and the lines that are shown as its output."""
    lines = body.splitlines()
    at = 0
    while at < len(lines):
        if not lines[at].startswith("$ "):
            raise ValueError(f"console: expected a command ($ ..) first, got {lines[at]!r}")
        command = lines[at][2:]
        while command.endswith("\\"):
            at += 1
            command = command[:-1] + lines[at].removeprefix(">").strip()
        at += 1
        end = at
        while end < len(lines) and not lines[end].startswith("$ "):
            end += 1
        yield command, lines[at:end]
        at = end


def missing_lines(shown: Sequence[str], printed: str) -> list[str]:
    """Return the shown lines that were not printed, in this order, whatever the numbers."""
    left = printed.splitlines()
    missing = []
    for line in shown:
        if line.strip() in ("", "..."):
            continue
        wanted = re.escape(" ".join(_NUMBER.sub("0", line).split())).replace(re.escape("..."), ".*")
        for place, got in enumerate(left):
            if re.fullmatch(wanted, " ".join(_NUMBER.sub("0", got).split())):
                left = left[place + 1 :]
                break
        else:
            missing.append(line)
    return missing


def run_page(page: Path, folder: Path, demo: Path) -> None:
    """Run a page's blocks in a folder; raise `AssertionError` that names the first block that does not do as shown."""
    environment = os.environ | {
        "DEMO": str(demo),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "python")]),
    }
    (folder / "recipes").symlink_to(ROOT / "recipes")
    names: dict[str, Any] = {"__name__": "__main__"}
    printed = ""
    for block in blocks(page.read_text()):
        where = f"{page.relative_to(ROOT)}:{block.line}"
        if block.title:
            (folder / block.title).write_text(block.body)
        if "output" in block.words:
            missing = missing_lines(block.body.splitlines(), printed)
            assert not missing, f"{where}: not printed: {missing}; printed:\n{printed}"
        if not block.runs or block.title:
            continue
        if block.language == "setup":
            subprocess.run(["bash", "-euc", block.body], cwd=folder, env=environment, check=True)
        elif block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile("\n" * block.line + block.body, str(page), "exec"), names)
            printed = out.getvalue()
        else:
            for command, shown in commands(block.body):
                status, printed = run_command(command, folder, environment)
                refused = any(line.startswith("medusa: ") for line in shown)
                assert status == (2 if refused else 0), f"{where}: {command}: exit code {status}:\n{printed}"
                missing = missing_lines(shown, printed)
                assert not missing, f"{where}: {command}: not printed: {missing}; printed:\n{printed}"


def run_command(command: str, folder: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Run a command; return its exit code and what it prints.

    A plain call of `medusa` runs in this process, which saves importing torch for each.
    """
    if command.startswith("medusa ") and not re.search(r"[|<>;&$`*~]", command):
        from medusa_decoding.cli import main

        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            try:
                status = main(shlex.split(command, comments=True)[1:])
            except SystemExit as end:
                status = int(end.code or 0)
        return status, out.getvalue()
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    return done.returncode, done.stdout
