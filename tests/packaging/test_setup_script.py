"""setup.py's decisions, and what it says when something is missing."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ISAS = ["base", "avx2", "avx512", "avx512_vnni", "avx512_bf16"]
KNOWN = [75, 80, 86, 87, 89, 90, 100, 120]


def executable(path: Path, body: str = "exit 0") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("86,80", ["80", "86"]),
        ("8.0 9.0", ["80", "90"]),
        ("90a;90", ["90", "90a"]),
        ("80;8.0+PTX;80", ["80+PTX"]),
        ("10.0;100;12.0f;9.0", ["90", "100", "120f"]),
    ],
)
def test_arch_forms(setup_script: ModuleType, text: str, expected: list[str]) -> None:
    assert [str(arch) for arch in setup_script.parse_archs(text, "MEDUSA_CUDA_ARCHS")] == expected


@pytest.mark.parametrize("text", ["Hopper", "8.60", "80;;x", "90b"])
def test_arch_forms_that_are_refused(setup_script: ModuleType, text: str) -> None:
    with pytest.raises(setup_script.BuildError, match=r"TORCH_CUDA_ARCH_LIST: expected targets such as .* got '"):
        setup_script.parse_archs(text, "TORCH_CUDA_ARCH_LIST")


@pytest.mark.parametrize(
    ("environ", "known", "expected"),
    [
        ({}, KNOWN, ["80", "86", "89", "90+PTX"]),
        ({}, [70, 80, 86, 87], ["80", "86+PTX"]),
        ({"MEDUSA_CUDA_ARCHS": " ", "TORCH_CUDA_ARCH_LIST": "8.6"}, KNOWN, ["86"]),
        ({"MEDUSA_CUDA_ARCHS": "80;90a", "TORCH_CUDA_ARCH_LIST": "8.6"}, KNOWN, ["80", "90a"]),
    ],
    ids=["default", "older-nvcc", "torch-list", "ours-first"],
)
def test_choice_of_archs(
    setup_script: ModuleType, environ: dict[str, str], known: list[int], expected: list[str]
) -> None:
    assert [str(arch) for arch in setup_script.choose_archs(environ, known)] == expected


def test_where_nvcc_is_looked_for(setup_script: ModuleType, tmp_path: Path) -> None:
    home, on_path, default = (executable(tmp_path / name / "bin" / "nvcc") for name in ("home", "path", "default"))
    path, root = str(on_path.parent), tmp_path / "default"
    find = setup_script.find_nvcc
    assert find({"PATH": path, "CUDA_PATH": str(tmp_path / "home")}, root) == (str(home), "")
    assert find({"PATH": path}, root) == (str(on_path), "")
    assert find({"PATH": str(tmp_path)}, root) == (str(default), "")
    assert find({}, tmp_path) == (None, f"nvcc was not found on PATH or in {tmp_path}/bin; CUDA_HOME can point to it")
    # A toolkit that was named is not silently replaced by another.
    named = {"PATH": path, "CUDA_HOME": str(tmp_path / "gone")}
    assert find(named, root) == (None, f"nvcc was not found in CUDA_HOME={tmp_path}/gone/bin")


# Objects of csrc/cpu as the build sees them, which tell with what they were compiled. They compile quickly.
ISA_CPP = """
#define NAMED(name) ops_##name
#define OPS(name) NAMED(name)
namespace medusa {
int OPS(MEDUSA_ISA)() {
  int has = 1;
#ifdef __AVX2__
  has += 2;
#endif
#ifdef __AVX512BW__
  has += 4;
#endif
#ifdef __AVX512VNNI__
  has += 8;
#endif
#ifdef __AVX512BF16__
  has += 16;
#endif
#ifndef __NO_MATH_ERRNO__
  has = -1;
#endif
  return has;
}
}
"""
DISPATCH_CPP = "".join(
    f"""
#ifdef MEDUSA_HAS_{name.upper()}
namespace medusa {{ int ops_{name}(); }}
extern "C" __attribute__((visibility("default"))) int has_{name}() {{ return medusa::ops_{name}(); }}
#endif
"""
    for name in ISAS
)


@pytest.fixture
def checkout(root: Path, tmp_path: Path) -> Path:
    """A copy of what the build reads, with small objects in csrc/cpu; its path holds a space."""
    copy = tmp_path / "a checkout"
    for package in ("medusa_kernels", "python/medusa_decoding"):
        (copy / package).mkdir(parents=True)
        (copy / package / "__init__.py").touch()
    for name in ("setup.py", "pyproject.toml", "LICENSE"):
        shutil.copy(root / name, copy)
    (copy / "README.md").touch()
    shutil.copytree(root / "csrc", copy / "csrc", ignore=shutil.ignore_patterns("cpu"))
    (copy / "csrc" / "cpu").mkdir()
    (copy / "csrc" / "cpu" / "isa.cpp").write_text(ISA_CPP)
    (copy / "csrc" / "cpu" / "dispatch.cpp").write_text(DISPATCH_CPP)
    return copy


def build(checkout: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MEDUSA_", "CUDA_", "TORCH_"))}
    command = [sys.executable, "setup.py", "-q", "build_native"]
    return subprocess.run(command, cwd=checkout, env=kept | environ, capture_output=True, text=True, check=False)


def library_folder(checkout: Path) -> Path:
    (folder,) = (checkout / "build").glob("lib*/medusa_kernels/_lib")
    return folder


def test_build_without_nvcc_says_so_once(checkout: Path) -> None:
    done = build(checkout, CUDA_HOME=str(checkout))
    assert done.returncode == 0, done.stderr
    why = f"nvcc was not found in CUDA_HOME={checkout}/bin"
    assert (done.stdout + done.stderr).count(why) == 1
    facts = json.loads((library_folder(checkout) / "build.json").read_text())
    assert facts["cuda"] == {"built": False, "why": why}
    assert facts["cpu"]["isas"][0] == "base"
    assert ctypes.CDLL(str(library_folder(checkout) / "libmedusa_cpu.so")).medusa_abi_version() == 7


def isas_of(folder: Path) -> dict[str, int]:
    """What each instruction set of a library was compiled with."""
    library = ctypes.CDLL(str(folder / "libmedusa_cpu.so"))
    assert not hasattr(library, "_ZN6medusa8ops_baseEv"), "the tables of functions should be hidden"
    return {name: getattr(library, f"has_{name}")() for name in ISAS if hasattr(library, f"has_{name}")}


def refusing(path: Path, *flags: str) -> Path:
    """A compiler that does not know some flags."""
    refusals = "".join(
        f"""[ "$arg" = {flag} ] && {{ echo "c++: error: unrecognized command-line option '{flag}'" >&2; exit 1; }}\n"""
        for flag in flags
    )
    return executable(path, f'for arg; do\n:\n{refusals}done\nexec c++ "$@"')


@pytest.fixture
def compiled(checkout: Path, setup_script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Compile the copy, on a machine of some kind; return the facts about the C++ library and its folder."""
    monkeypatch.setattr(setup_script, "ROOT", checkout)

    def compile_on(machine: str, cxx: Path) -> tuple[dict[str, Any], Path]:
        monkeypatch.setattr(platform, "machine", lambda: machine)
        work = checkout / "work"
        environ = {"PATH": os.environ["PATH"], "CXX": str(cxx), "MEDUSA_BUILD_CUDA": "0"}
        return setup_script.compile_libraries(environ, work)["cpu"], work

    return compile_on


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs an x86-64 machine")
def test_one_object_per_instruction_set(compiled: Callable[..., Any], tmp_path: Path) -> None:
    facts, work = compiled("x86_64", refusing(tmp_path / "c++"))
    assert facts["isas"] == [name for name in ISAS if name not in facts["left_out"]]
    expected = {"base": 1, "avx2": 3, "avx512": 7, "avx512_vnni": 15, "avx512_bf16": 31}
    assert isas_of(work) == {name: expected[name] for name in facts["isas"]}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs an x86-64 machine")
def test_instruction_sets_that_the_compiler_does_not_know(compiled: Callable[..., Any], tmp_path: Path) -> None:
    facts, work = compiled("x86_64", refusing(tmp_path / "c++", "-mavx512bf16", "-mavx512dq"))
    assert facts["isas"] == ["base", "avx2"]
    assert facts["left_out"] == {
        "avx512": "c++: error: unrecognized command-line option '-mavx512dq'",
        "avx512_vnni": "c++: error: unrecognized command-line option '-mavx512dq'",
        "avx512_bf16": "c++: error: unrecognized command-line option '-mavx512dq'",
    }
    assert list(isas_of(work)) == facts["isas"]


def test_other_machines_have_one_instruction_set(compiled: Callable[..., Any], tmp_path: Path) -> None:
    facts, work = compiled("aarch64", refusing(tmp_path / "c++", "-mavx2"))
    assert (facts["isas"], facts["left_out"]) == (["base"], {})
    assert list(isas_of(work)) == ["base"]


def test_better_instruction_sets_are_linked_later(setup_script: ModuleType) -> None:
    """An inline function is linked from the first object that has it, so from one that every CPU can run."""
    objects = setup_script.cpu_rules("c++", "-O3", ISAS)[1].split()
    assert objects[-len(ISAS) :] == [f"isa_{name}.o" for name in ISAS]
    assert "kv_compact.o" in objects[: -len(ISAS)]
    flags = [set(setup_script.ISA_FLAGS[name].split()) for name in ISAS]
    assert all(fewer < more for fewer, more in itertools.pairwise(flags))


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"MEDUSA_BUILD_CUDA": "1", "CUDA_HOME": "/nonexistent"},
            "MEDUSA_BUILD_CUDA=1 but nvcc was not found in CUDA_",
        ),
        ({"CXX": "false"}, "false --version failed"),
    ],
    ids=["cuda-required", "compiler-broken"],
)
def test_failures_are_one_clear_line(checkout: Path, environ: dict[str, str], message: str) -> None:
    done = build(checkout, **environ)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert message in line


@pytest.mark.slow
def test_cuda_build_records_its_targets(checkout: Path, setup_script: ModuleType) -> None:
    nvcc, missing = setup_script.find_nvcc(os.environ)
    if nvcc is None:
        pytest.skip(missing)
    done = build(checkout, MEDUSA_BUILD_CUDA="1", TORCH_CUDA_ARCH_LIST="8.0+PTX")
    assert done.returncode == 0, done.stderr
    facts = json.loads((library_folder(checkout) / "build.json").read_text())["cuda"]
    assert facts["built"] is True
    assert facts["archs"] == ["80+PTX"]
    assert ctypes.CDLL(str(library_folder(checkout) / "libmedusa_cuda.so")).medusa_abi_version() == 7
