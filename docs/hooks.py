"""What the site adds to its pages: the command line, the settings, and links that leave `docs/`.

MkDocs calls the functions `on_..`. Nothing here imports torch.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
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
