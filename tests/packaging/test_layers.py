"""The layers of the package: what may import what, every import counted (lazy and typing-only ones too)."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "medusa_decoding"
# Lowest first; rooms on one line do not import each other. A module or folder that is not named here belongs to the
# longest prefix that is.
LAYERS = """
options progress
files
checks provenance gguf_files
trees linears calibration
heads
backbone
decode
decode.selection decode.adaptive decode.runtime
checkpoints
generation
model
huggingface chat demo
serving
serving.http
serving.launch
serving.ray
training.config_schema
training.config
training.data
training.loss training.distill
training.loop
training
evaluation
tuning
cli
__main__
"""
HEIGHTS = {room: height for height, line in enumerate(LAYERS.split("\n")) for room in line.split()}
LOOSE = 8


def module_name(path: Path, package: Path = PACKAGE) -> str:
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported(name: str, source: str, known: set[str], package: str = PACKAGE.name) -> set[str]:
    """Return the package's modules that a module imports anywhere in its source."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: imports are absolute"
            assert node.module is not None
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    inner = {module.removeprefix(f"{package}.") for module in found if module.startswith(f"{package}.")}
    # `from package import module` is an import of the module, not of the package around it.
    inner &= known
    return {one for one in inner if not any(other.startswith(one + ".") for other in inner)} - {name}


def room(name: str) -> str:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in HEIGHTS:
            return ".".join(parts[:end])
    raise AssertionError(f"{name}: no layer of LAYERS names it")


IMPORTS = {name: imported(name, path.read_text(), set(MODULES)) for name, path in MODULES.items() if name}


def circle(graph: dict[str, set[str]]) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_modules_import_in_no_circle():
    assert circle(IMPORTS) == []


def test_benchmarks_import_in_no_circle():
    package = PACKAGE.parents[1] / "benchmarks"
    modules = {module_name(path, package): path for path in sorted(package.rglob("*.py"))}
    graph = {name: imported(name, path.read_text(), set(modules), package.name) for name, path in modules.items()}
    assert graph["campaign"]
    assert circle(graph) == []


def test_nothing_imports_from_a_higher_layer():
    upward = [
        f"{name} -> {other}"
        for name, others in IMPORTS.items()
        for other in others
        if room(name) != room(other) and HEIGHTS[room(other)] >= HEIGHTS[room(name)]
    ]
    assert upward == []


@pytest.mark.parametrize("depth", [1, 2])
def test_folders_import_in_no_circle(depth):
    """Each folder counts as one; a module directly in the package counts by itself."""

    def folder(name: str) -> str:
        parts = name.split(".")
        return ".".join(parts[:depth])

    graph: dict[str, set[str]] = {}
    for name, others in IMPORTS.items():
        graph.setdefault(folder(name), set()).update(folder(other) for other in others if folder(other) != folder(name))
    assert circle(graph) == []


def test_nothing_imports_what_the_wheel_does_not_hold():
    """benchmarks/ and recipes/ are there in a checkout only."""
    outside = [
        f"{name}: {line.strip()}"
        for name, path in MODULES.items()
        for line in path.read_text().splitlines()
        if line.strip().startswith(("import ", "from ")) and line.split()[1].split(".")[0] in ("benchmarks", "recipes")
    ]
    assert outside == []


def test_few_modules_lie_loose():
    loose = [name for name in MODULES if name and "." not in name and MODULES[name].name != "__init__.py"]
    assert len(loose) <= LOOSE, loose
    assert all(room(name) for name in MODULES if name)


def test_circles_and_imports_are_seen():
    source = "import os\nfrom medusa_decoding.a import b, c\ndef f():\n    import medusa_decoding.d\n"
    assert imported("e", source, {"a", "a.b", "d", "e"}) == {"a.b", "d"}
    assert set(circle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == {"a", "b", "c"}
    assert circle({"a": {"b", "c"}, "b": {"c"}}) == []
