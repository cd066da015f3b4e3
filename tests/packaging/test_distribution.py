"""What is shipped: sources without torch or Python headers, whole packages, true metadata."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from medusa_kernels import _native

PACKAGES = ("medusa_kernels", "python/medusa_decoding")


def test_csrc_includes_neither_torch_nor_python(root: Path) -> None:
    sources = [path for path in (root / "csrc").rglob("*") if path.is_file()]
    ours = {path.name for path in sources}
    found = {
        name
        for path in sources
        for name in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), flags=re.MULTILINE)
    }
    # The headers of the C++ library have neither a dot nor a slash.
    others = {name for name in found if not re.fullmatch(r"\w+", name) and Path(name).name not in ours}
    assert others <= {"cuda_runtime_api.h", "immintrin.h", "pthread.h"}


def test_build_requires_only_setuptools_and_ninja(root: Path) -> None:
    (required,) = re.findall(r"^requires = \[(.*)\]$", (root / "pyproject.toml").read_text(), flags=re.MULTILINE)
    names = {re.match(r"[a-z]+", item.strip().strip('"'))[0] for item in required.split(",")}  # type: ignore[index]
    assert names == {"setuptools", "ninja"}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_with_modules_is_a_package(root: Path, package: str) -> None:
    folders = {path.parent for path in (root / package).rglob("*.py")}
    assert folders
    assert [str(folder) for folder in folders if not (folder / "__init__.py").exists()] == []
    assert (root / package / "py.typed").exists()


def test_build_facts_are_shipped() -> None:
    facts = _native.build_info()
    assert facts["cpu"]["built"] is True
    assert facts["cpu"]["compiler"]
    assert facts["cpu"]["isas"][0] == "base"
    # Either what was built, or why not.
    assert bool(facts["cuda"].get("archs")) is facts["cuda"]["built"]
    assert bool(facts["cuda"]["why"]) is not facts["cuda"]["built"]


@pytest.fixture(scope="module")
def distribution() -> importlib.metadata.Distribution:
    # A checkout's egg-info, found where the root is on the path, is no installation.
    for found in importlib.metadata.distributions(name="medusa-kernels"):
        if found.read_text("WHEEL") is not None:
            return found
    pytest.skip("medusa-kernels is not installed here, only on the path")


def test_the_command(distribution: importlib.metadata.Distribution) -> None:
    (command,) = [entry for entry in distribution.entry_points if entry.group == "console_scripts"]
    assert (command.name, command.value) == ("medusa", "medusa_decoding.cli:main")
    assert distribution.metadata["License-Expression"] == "Apache-2.0"


def test_wheel_serves_every_python_3(distribution: importlib.metadata.Distribution) -> None:
    lines = (distribution.read_text("WHEEL") or "").splitlines()
    assert "Root-Is-Purelib: false" in lines
    tags = [line.removeprefix("Tag: ") for line in lines if line.startswith("Tag: ")]
    assert len(tags) == 1
    assert re.fullmatch(r"py3-none-(?!any)\w+", tags[0])
