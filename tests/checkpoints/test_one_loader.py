"""Only one module calls the loaders of transformers and peft, and it never runs code of a checkpoint."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

LOADERS = {
    "from_pretrained", "from_config", "from_peft_type", "get_config_dict", "load_adapter", "load_custom_generate",
    "get_class_from_dynamic_module", "get_kernel", "cached_file",
}  # fmt: skip
OURS = {"MedusaModel", "pretrained"}
"""What has functions of these names that are this package's own."""
DOOR = Path("python/medusa_decoding/checkpoints/pretrained.py")


def calls(tree: ast.AST) -> Iterator[tuple[str, str, ast.Call]]:
    """Yield the calls in a module: object and method, by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Attribute):
                owner = node.func.value
                yield owner.id if isinstance(owner, ast.Name) else "..", node.func.attr, node
            elif isinstance(node.func, ast.Name):
                yield "", node.func.id, node


def imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ("transformers", "peft"):
            yield from (alias.name for alias in node.names)


def modules(root: Path) -> dict[Path, ast.AST]:
    found = {
        file.relative_to(root): ast.parse(file.read_text(encoding="utf-8"))
        for folder in ("python", "medusa_kernels", "benchmarks")
        for file in sorted((root / folder).rglob("*.py"))
    }
    assert DOOR in found
    return found


def test_no_other_module_calls_a_loader(root: Path) -> None:
    found = []
    for file, tree in modules(root).items():
        if file == DOOR:
            continue
        found += [f"{file}: {name}" for name in imported(tree) if name.startswith(("Auto", "Peft", "pipeline"))]
        for owner, name, node in calls(tree):
            if name in LOADERS and owner not in OURS:
                found.append(f"{file}:{node.lineno}: {owner}.{name}")
    assert found == []


def test_every_call_disables_remote_code(root: Path) -> None:
    checked = []
    for owner, name, node in calls(ast.parse((root / DOOR).read_text(encoding="utf-8"))):
        if name in ("from_pretrained", "from_config"):
            trusted = [word.value for word in node.keywords if word.arg == "trust_remote_code"]
            assert [ast.unparse(value) for value in trusted] == ["False"], f"{owner}.{name}"
            checked.append(owner)
    assert len(checked) >= 4


def test_nothing_unpickles_objects_or_runs_text(root: Path) -> None:
    found = []
    for file, tree in modules(root).items():
        for owner, name, node in calls(tree):
            words = {word.arg: ast.unparse(word.value) for word in node.keywords}
            unpickles = owner in ("pickle", "dill", "joblib", "cloudpickle") and name in ("load", "loads", "Unpickler")
            if unpickles or (owner == "torch" and name == "load" and words.get("weights_only") != "True"):
                found.append(f"{file}:{node.lineno}: {owner}.{name}")
            if owner == "" and name in ("eval", "exec", "compile", "__import__"):
                found.append(f"{file}:{node.lineno}: {name}")
    assert found == []
