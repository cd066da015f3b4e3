"""Compiles csrc/ behind its C ABI: no torch and no Python headers, so one wheel serves every version of both.

Environment: MEDUSA_BUILD_CUDA=auto|0|1, MEDUSA_CUDA_ARCHS or TORCH_CUDA_ARCH_LIST, CXX, CUDA_HOME or CUDA_PATH.
Everything but the compilation is in pyproject.toml.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build
from setuptools.errors import BaseError

ROOT = Path(__file__).resolve().parent
DEFAULT_ARCHS = ("80", "86", "89", "90")
DEFAULT_CUDA_ROOT = Path("/usr/local/cuda")
CXX_FLAGS = "-std=c++17 -O3 -fPIC -fvisibility=hidden -Wall -Wextra"
# Without --threads: the nvlink calls of several targets write and read one .reg.c at once, and such a build failed.
NVCC_FLAGS = "-std=c++17 -O3 -cudart static -Xcompiler=-fPIC,-fvisibility=hidden"

NINJA = """\
rule cpu
  command = {cxx} {cxx_flags} -shared -MMD -MF $out.d $in -o $out
  depfile = $out.d
  deps = gcc
rule cuda
  command = {nvcc} {nvcc_flags} -shared -MD -MF $out.d $in -o $out
  depfile = $out.d
  deps = gcc
build libmedusa_cpu.so: cpu {csrc}/kv_compact.cpp
"""


class BuildError(BaseError):
    """Something the person who installs has to decide or provide; shown without a traceback."""


class Arch(NamedTuple):
    """A CUDA target: "90", "90a"; with PTX also code that later GPUs can compile for themselves."""

    name: str
    ptx: bool = False

    @property
    def number(self) -> int:
        """The compute capability without its suffix."""
        return int(self.name.rstrip("af"))

    def flags(self) -> list[str]:
        """Return nvcc's options for this target."""
        codes = [f"sm_{self.name}", *([f"compute_{self.name}"] if self.ptx else [])]
        return [f"-gencode=arch=compute_{self.name},code={code}" for code in codes]

    def __str__(self) -> str:
        """Return the form that the environment variables take."""
        return self.name + ("+PTX" if self.ptx else "")


def parse_archs(text: str, variable: str) -> list[Arch]:
    """Read "80;86", "8.0,9.0a" or "8.6+PTX": targets in ascending order, each once."""
    ptx: dict[str, bool] = {}
    for item in re.split(r"[;,\s]+", text.strip(" ;,")):
        match = re.fullmatch(r"(?:(\d{1,2})\.(\d)|(\d{2,3}))([af]?)(\+PTX)?", item)
        if match is None:
            raise BuildError(f"{variable}: expected targets such as 80, 8.6, 9.0a or 8.6+PTX, got {item!r}")
        name = (match[3] or match[1] + match[2]) + match[4]
        ptx[name] = ptx.get(name, False) or match[5] is not None
    return sorted((Arch(name, wanted) for name, wanted in ptx.items()), key=lambda arch: (arch.number, arch.name))


def choose_archs(environ: Mapping[str, str], known: Sequence[int]) -> list[Arch]:
    """Choose the targets: MEDUSA_CUDA_ARCHS, else TORCH_CUDA_ARCH_LIST, else what this nvcc knows of the default."""
    knows = ", ".join(map(str, known))
    for variable in ("MEDUSA_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST"):
        if environ.get(variable, "").strip():
            archs = parse_archs(environ[variable], variable)
            unknown = ", ".join(arch.name for arch in archs if arch.number not in known)
            if unknown:
                raise BuildError(f"{variable}: this nvcc does not know {unknown}; it knows {knows}")
            return archs
    names = [name for name in DEFAULT_ARCHS if int(name) in known]
    if not names:
        raise BuildError(
            f"this nvcc knows none of {', '.join(DEFAULT_ARCHS)}; set MEDUSA_CUDA_ARCHS to some of {knows}"
        )
    return [Arch(name, ptx=name == names[-1]) for name in names]


def cuda_mode(environ: Mapping[str, str]) -> str:
    """Return MEDUSA_BUILD_CUDA: auto, 0 or 1."""
    mode = environ.get("MEDUSA_BUILD_CUDA", "") or "auto"
    if mode not in ("auto", "0", "1"):
        raise BuildError(f"MEDUSA_BUILD_CUDA: expected auto, 0 or 1, got {mode!r}")
    return mode


def find_nvcc(environ: Mapping[str, str], default_root: Path = DEFAULT_CUDA_ROOT) -> tuple[str | None, str]:
    """Return nvcc's path and "", or None and where it was looked for. A set CUDA_HOME or CUDA_PATH decides alone."""
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if environ.get(variable):
            path = shutil.which("nvcc", path=str(Path(environ[variable], "bin")))
            return path, "" if path else f"nvcc was not found in {variable}={environ[variable]}/bin"
    path = shutil.which("nvcc", path=environ.get("PATH", "")) or shutil.which("nvcc", path=str(default_root / "bin"))
    return path, "" if path else f"nvcc was not found on PATH or in {default_root}/bin; CUDA_HOME can point to it"


def choose_nvcc(environ: Mapping[str, str], default_root: Path = DEFAULT_CUDA_ROOT) -> tuple[str | None, str]:
    """Return the nvcc to build with and "", or None and why the CUDA library is left out."""
    mode = cuda_mode(environ)
    if mode == "0":
        return None, "MEDUSA_BUILD_CUDA=0 when it was installed"
    nvcc, missing = find_nvcc(environ, default_root)
    if mode == "1" and nvcc is None:
        raise BuildError(f"MEDUSA_BUILD_CUDA=1 but {missing}")
    return nvcc, missing


def find_cxx(environ: Mapping[str, str]) -> str:
    """Return the command of the host compiler: CXX, else c++, else g++."""
    for candidate in [environ["CXX"]] if environ.get("CXX") else ["c++", "g++"]:
        if shutil.which(candidate.split()[0], path=environ.get("PATH", "")):
            return candidate
    looked = f"CXX={environ['CXX']!r} was not found" if environ.get("CXX") else "neither c++ nor g++ is on PATH"
    raise BuildError(f"a C++17 compiler is needed: {looked}; install g++ or clang++, or set CXX")


def output_of(*command: str) -> str:
    """Return what a command prints."""
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise BuildError(f"{' '.join(command)} failed: {getattr(error, 'stderr', '') or error}") from error


def compile_libraries(environ: Mapping[str, str], work: Path) -> dict[str, Any]:
    """Compile into `work` and return the build's facts, which the package ships as build.json."""
    work.mkdir(parents=True, exist_ok=True)
    cxx = find_cxx(environ)
    nvcc, why = choose_nvcc(environ)
    facts: dict[str, Any] = {
        "platform": sysconfig.get_platform(),
        "cpu": {"built": True, "compiler": output_of(*cxx.split(), "--version").splitlines()[0], "flags": CXX_FLAGS},
        "cuda": {"built": nvcc is not None, "why": why},
    }
    nvcc_flags = NVCC_FLAGS
    targets = ["libmedusa_cpu.so"]
    if nvcc is None:
        print(f"medusa-kernels: installing without the CUDA library: {why}", file=sys.stderr)
    else:
        known = [int(line.removeprefix("compute_")) for line in output_of(nvcc, "--list-gpu-arch").split()]
        archs = choose_archs(environ, known)
        release = re.search(r"release ([\d.]+)", output_of(nvcc, "--version"))
        facts["cuda"] |= {"nvcc": release[1] if release else "unknown", "archs": [str(arch) for arch in archs]}
        compiler = [f"-ccbin {environ['CXX']}"] if environ.get("CXX") else []
        # The static runtime's own symbols stay private to the library.
        exclude = ["-Xlinker --exclude-libs=ALL"] if sys.platform == "linux" else []
        nvcc_flags = " ".join([NVCC_FLAGS, *compiler, *exclude, *(flag for arch in archs for flag in arch.flags())])
        targets.append("libmedusa_cuda.so")
    csrc = re.sub(r"([$ :])", r"$\1", str(ROOT / "csrc"))
    rules = NINJA.format(cxx=cxx, cxx_flags=CXX_FLAGS, nvcc=nvcc, nvcc_flags=nvcc_flags, csrc=csrc)
    if nvcc is not None:
        rules += f"build libmedusa_cuda.so: cuda {csrc}/kv_compact.cu\n"
    (work / "build.ninja").write_text(rules)
    ninja = shutil.which("ninja")
    if ninja is None:
        raise BuildError("ninja was not found; build with isolation, or pip install ninja")
    done = subprocess.run([ninja, "-C", str(work), *targets], check=False)
    if done.returncode:
        hint = "" if nvcc is None else "; MEDUSA_BUILD_CUDA=0 leaves the CUDA library out"
        raise BuildError(f"compiling csrc failed, see above{hint}")
    return facts


class BuildNative(Command):
    """Compiles csrc and puts the libraries and build.json into medusa_kernels/_lib."""

    user_options: ClassVar[list[tuple[str, str | None, str]]] = []

    def initialize_options(self) -> None:
        """Set what setuptools fills in: an editable install builds into the source tree."""
        self.build_lib: str | None = None
        self.build_temp: str | None = None
        self.editable_mode = False

    def finalize_options(self) -> None:
        """Take the folders from the build command."""
        self.set_undefined_options("build", ("build_lib", "build_lib"), ("build_temp", "build_temp"))

    def run(self) -> None:
        """Compile and copy, leaving nothing of an earlier build behind."""
        work = Path(self.build_temp or "build").resolve() / "csrc"
        facts = compile_libraries(os.environ, work)
        target = (ROOT if self.editable_mode else Path(self.build_lib or "build/lib")) / "medusa_kernels" / "_lib"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for kind in ("cpu", "cuda"):
            if facts[kind]["built"]:
                shutil.copy2(work / f"libmedusa_{kind}.so", target)
        (target / "build.json").write_text(json.dumps(facts, indent=2) + "\n")


class Build(build):
    """The standard build, then csrc."""

    sub_commands: ClassVar[list[Any]] = [*build.sub_commands, ("build_native", None)]

    def run(self) -> None:
        """Build afresh: what a kept build folder still holds of removed modules would enter the wheel."""
        for package in ("medusa_kernels", "medusa_decoding"):
            shutil.rmtree(Path(self.build_lib, package), ignore_errors=True)
        super().run()


class Wheel(bdist_wheel):
    """A wheel for one platform and any Python 3."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return py3-none-<platform>: the libraries know nothing of Python."""
        return "py3", "none", super().get_tag()[2]


class NativeDistribution(Distribution):
    """Marks the wheel as belonging to a platform, though setuptools itself compiles nothing."""

    def has_ext_modules(self) -> bool:
        """Return True: the wheel holds compiled libraries."""
        return True


if __name__ == "__main__":
    setup(cmdclass={"build": Build, "build_native": BuildNative, "bdist_wheel": Wheel}, distclass=NativeDistribution)
