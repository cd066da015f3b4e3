"""What pyproject.toml declares is what the packages import."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest requires it on Python 3.10

PACKAGES = ("medusa_kernels", "python/medusa_decoding")
DISTRIBUTIONS = {"yaml": "pyyaml"}
"""The distributions whose name differs from the module's in more than "-" for "_"."""
OPTIONAL = {"bitsandbytes", "datasets", "httpx", "matplotlib", "peft"}
"""Libraries of training, parquet files and pictures. A program that lacks one says so: `checks.import_library`."""


SERVING = {"fastapi", "llguidance", "prometheus-client", "starlette", "uvicorn"}
"""Libraries of `medusa serve`."""
RAY = {"ray"}
"""Libraries of servers and files of prompts over a cluster."""
GGUF = {"gguf"}
"""The library for GGUF files; `check_gguf` says so where it is missing."""


def imported_modules(source: str) -> Iterator[str]:
    """Yield the absolute modules of import statements, and of `import_library` and `import_module` with a name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in ("import_library", "import_module"):
                yield str(node.args[0].value)


def distribution_of(module: str) -> str:
    """Return the distribution that has a module."""
    name = module.partition(".")[0]
    return DISTRIBUTIONS.get(name, name.replace("_", "-"))


@pytest.fixture(scope="module")
def imported(root: Path) -> set[str]:
    own = {"medusa-kernels", "medusa-decoding"}
    return {
        distribution_of(module)
        for package in PACKAGES
        for path in (root / package).rglob("*.py")
        for module in imported_modules(path.read_text())
        if module.partition(".")[0] not in sys.stdlib_module_names
    } - own


@pytest.fixture(scope="module")
def project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text())["project"]


def names(requirements: list[str]) -> set[str]:
    return {re.match(r"[\w-]+", item)[0] for item in requirements}  # type: ignore[index]


def test_every_import_is_declared_and_every_declaration_imported(imported: set[str], project: dict[str, Any]) -> None:
    assert imported - OPTIONAL - SERVING - RAY - GGUF == names(project["dependencies"])


def test_optional_libraries_are_those_of_training(imported: set[str], project: dict[str, Any]) -> None:
    assert imported & OPTIONAL == OPTIONAL
    # The default tracker, which accelerate imports.
    assert names(project["optional-dependencies"]["train"]) == OPTIONAL | {"tensorboard"}


def test_optional_libraries_of_the_server(imported: set[str], project: dict[str, Any]) -> None:
    assert imported & SERVING == SERVING == names(project["optional-dependencies"]["serve"])
    assert imported & RAY == RAY == names(project["optional-dependencies"]["ray"])


def test_development_has_the_optional_libraries(project: dict[str, Any]) -> None:
    assert names(project["optional-dependencies"]["dev"]) >= OPTIONAL | SERVING | RAY | {"gguf"}
