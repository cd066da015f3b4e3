"""What the site adds to its pages: the command line, the settings, the messages, and links that leave `docs/`.

MkDocs calls the functions `on_..`. Nothing here imports torch.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CODE = (ROOT / "python" / "medusa_decoding", ROOT / "medusa_kernels")
NOT_RUN = {"gpu": "needs a GPU", "network": "", "hours": "takes long", "terminal": "needs a terminal"}
"""Words that mark a block that no test runs, and what a block's title says of it."""
PICTURES = (".svg", ".png")


def on_config(config: Any) -> Any:
    """Let the functions below import this checkout, whatever is installed."""
    sys.path[:0] = [str(ROOT), str(ROOT / "python")]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pictures outside `docs/` that pages show."""
    from mkdocs.structure.files import File

    for page in files.documentation_pages():
        for target in re.findall(r"\]\(\.\./(benchmarks/[^)#]+)\)", page.content_string):
            if target.endswith(PICTURES) and files.get_file_from_path(target) is None:
                files.append(File.generated(config, target, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fill in what is generated, and make of GitHub's Markdown what MkDocs reads."""
    if page.file.src_uri == "reference/cli.md":
        markdown += command_line()
    elif page.file.src_uri == "reference/settings.md":
        markdown += settings()
    elif page.file.src_uri == "troubleshooting.md":
        markdown = with_messages(markdown)
    markdown = re.sub(r"<!--(?:=| no record: ).*?-->", "", markdown, flags=re.S)  # where figures come from
    markdown = re.sub(r"^( *```\w+)((?: \w+)+)$", _marked, markdown, flags=re.M)
    return re.sub(
        r"\[([^\]]*)\]\((\.\./)+(?!reference|figures)([\w.-]+/?[^)]*)\)", lambda m: _outside(m, config), markdown
    )


def _marked(fence: re.Match[str]) -> str:
    """Say in a block's title why no test runs it."""
    reasons = [NOT_RUN[word] for word in fence[2].split() if NOT_RUN.get(word)]
    return fence[1] + (f' title="{", ".join(reasons)}"' if reasons else "")


def _outside(link: re.Match[str], config: Any) -> str:
    """Lead a link that leaves `docs/` to the repository, or to the picture that `on_files` has added."""
    words, target = link[1], link[3]
    if target.endswith(PICTURES):
        return link[0].replace("(../", "(")
    if not (ROOT / target.partition("#")[0]).exists():
        return link[0]  # another page of the site, or a broken link that MkDocs reports
    return f"[{words}]({config.repo_url}/blob/main/{target})"


def command_line() -> str:
    """Return the help of every command."""
    from medusa_decoding.cli import argument_parser

    os.environ["COLUMNS"] = "100"  # read by argparse
    found = []
    for parser in _commands(argument_parser()):
        found.append(f"\n## {parser.prog}\n\n```text\n{parser.format_help().rstrip()}\n```\n")
    return "".join(found)


def _commands(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield the parsers of all commands, each before its own subcommands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield command
                yield from _commands(command)


def settings() -> str:
    """Return the table of all training settings."""
    from medusa_decoding.training.config import table

    return "\n" + table()


@dataclass(frozen=True)
class Message:
    """A message that the code raises or logs; `{}` stands for what it fills in."""

    text: str
    where: str


def messages() -> list[Message]:
    """Return every message of the package's errors and warnings, read from the source."""
    found = []
    for folder in CODE:
        for path in sorted(folder.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                argument = _message_argument(node)
                text = "" if argument is None else " ".join(_text(argument).split())
                if re.search(r"[a-z]{3}", text):  # not only what another error said
                    found.append(Message(text, f"{path.relative_to(ROOT)}:{node.lineno}"))
    return found


ERRORS = {"ValueError", "OSError", "MemoryError", "FloatingPointError", "RuntimeError", "ModuleNotFoundError"}
"""Errors that reach the user, as does what `argparse` is told; others are reported by these, in their own words."""


def _message_argument(node: ast.AST) -> ast.expr | None:
    """Return the first argument of an error that is made, of `warnings.warn(..)` and of `logger.warning(..)`."""
    if isinstance(node, ast.Call) and node.args:
        name = ast.unparse(node.func)
        if name in ERRORS or name in ("argparse.ArgumentTypeError", "warnings.warn", "logger.warning"):
            return node.args[0]
    return None


def _text(node: ast.expr) -> str:
    """Return a string expression's constant parts, with {} for what is filled in."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[sdr]", "{}", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return "{}"


def beginnings(section: str) -> list[str]:
    """Return what messages of a section begin with: the code in the first column of its tables."""
    cells = re.findall(r"^\| *(`[^|]*)\|", section, re.M)
    return [code for cell in cells for code in re.findall(r"`([^`]+)`", cell)]


def begins(beginning: str, message: str) -> bool:
    """Return whether a message begins so; NAME, FILE and N stand for what is filled in."""
    pattern = re.sub(r"NAME|FILE|\bN\b", r"\\S*?\\{\\}\\S*?", re.escape(beginning))
    return re.match(pattern, message) is not None


def sections(markdown: str) -> list[str]:
    """Split a page before its second-level headings."""
    return re.split(r"^(?=## )", markdown, flags=re.M)


def section_of(message: str, parts: list[str]) -> int | None:
    """Return the section whose beginnings fit a message best: the longest one wins."""
    fits = [(len(one), -place) for place, part in enumerate(parts) for one in beginnings(part) if begins(one, message)]
    return -max(fits)[1] if fits else None


def with_messages(markdown: str) -> str:
    """Add to each section of the page every message that it explains, so that a search for one finds it."""
    parts = sections(re.sub(r"^\| `.*?\|", lambda cell: cell[0].replace("` `", "`<br>`"), markdown, flags=re.M))
    listed: list[set[str]] = [set() for _ in parts]
    for message in messages():
        place = section_of(message.text, parts)
        if place is not None:
            listed[place].add(message.text.replace("{}", "…"))
    for place, texts in enumerate(listed):
        if texts:
            lines = "".join(f"    - `{text}`\n" for text in sorted(texts))
            parts[place] = f'{parts[place].rstrip()}\n\n??? quote "All messages of this section"\n\n{lines}\n'
    return "".join(parts)
