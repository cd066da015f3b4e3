"""Compiles csrc/ behind its C ABI: no torch and no Python headers, so one wheel serves every version of both.

Environment: MEDUSA_BUILD_CUDA=auto|0|1, MEDUSA_CUDA_ARCHS or TORCH_CUDA_ARCH_LIST, CXX, CUDA_HOME or CUDA_PATH.
Everything but the compilation is in pyproject.toml.
"""

from __future__ import annotations

import json
import os
import platform
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

# csrc/cpu/isa.cpp is compiled once per instruction set, each of which has the one before it.
AVX2_FLAGS = "-mavx2 -mfma"
AVX512_FLAGS = f"{AVX2_FLAGS} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512"
ISA_FLAGS = {
    "base": "",
    "avx2": AVX2_FLAGS,
    "avx512": AVX512_FLAGS,
    "avx512_vnni": f"{AVX512_FLAGS} -mavx512vnni",
    "avx512_bf16": f"{AVX512_FLAGS} -mavx512vnni -mavx512bf16",
}
MATH_FLAGS = "-fno-math-errno -ffp-contract=fast"

CPU_RULES = """\
rule object
  command = {cxx} {cxx_flags} $flags -MMD -MF $out.d -c $in -o $out
  depfile = $out.d
  deps = gcc
rule link
  command = {cxx} {cxx_flags} $flags $in -pthread -o $out
"""
CUDA_RULES = """\
rule cuda
  command = {nvcc} {nvcc_flags} -shared -MD -MF $out.d $in -o $out
  depfile = $out.d
  deps = gcc
build libmedusa_cuda.so: cuda {csrc}/kv_compact.cu
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


def choose_isas(cxx: str, work: Path) -> tuple[list[str], dict[str, str]]:
    """Return the instruction sets to compile for, and the left out ones of this machine with the compiler's reason."""
    if platform.machine() not in ("x86_64", "AMD64", "amd64"):
        return ["base"], {}
    (work / "empty.cpp").touch()
    left_out = {}
    for name, flags in ISA_FLAGS.items():
        command = [*cxx.split(), *flags.split(), "-c", "empty.cpp", "-o", "empty.o"]
        done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
        # The set that every machine of this kind has is not optional: its errors are shown when csrc is compiled.
        if done.returncode and name != "base":
            errors = [line for line in done.stderr.splitlines() if "error" in line]
            left_out[name] = errors[0] if errors else f"{cxx} {flags} failed"
    return [name for name in ISA_FLAGS if name not in left_out], left_out


def cpu_rules(cxx: str, cxx_flags: str, isas: Sequence[str]) -> tuple[str, str]:
    """Return ninja's rules for the objects of the C++ library, and the objects in the order in which to link them.

    An inline function that several objects contain is linked from the first of them. So better instruction sets come
    later: code for a CPU never calls a copy that needs more than this CPU has.
    """
    has = " ".join(f"-DMEDUSA_HAS_{name.upper()}=1" for name in isas)
    csrc, isa_cpp = ROOT / "csrc", ROOT / "csrc" / "cpu" / "isa.cpp"
    sources = [path for path in sorted([*csrc.glob("*.cpp"), *csrc.glob("cpu/*.cpp")]) if path != isa_cpp]
    objects = [(f"{path.stem}.o", path, has) for path in sources]
    objects += [(f"isa_{name}.o", isa_cpp, f"-DMEDUSA_ISA={name} {MATH_FLAGS} {ISA_FLAGS[name]}") for name in isas]
    rules = CPU_RULES.format(cxx=cxx, cxx_flags=cxx_flags)
    for target, source, flags in objects:
        rules += f"build {target}: object {ninja_path(source)}\n  flags = {flags}\n"
    return rules, " ".join(target for target, _, _ in objects)


def ninja_path(path: Path) -> str:
    """Return a path as build.ninja takes it."""
    return re.sub(r"([$ :])", r"$\1", str(path))


def run_ninja(work: Path, rules: str, *targets: str) -> bool:
    """Build targets in `work`; return whether that succeeded."""
    (work / "build.ninja").write_text(rules)
    ninja = shutil.which("ninja")
    if ninja is None:
        raise BuildError("ninja was not found; build with isolation, or pip install ninja")
    return subprocess.run([ninja, "-C", str(work), *targets], check=False).returncode == 0


def compile_libraries(environ: Mapping[str, str], work: Path) -> dict[str, Any]:
    """Compile into `work` and return the build's facts, which the package ships as build.json."""
    work.mkdir(parents=True, exist_ok=True)
    cxx = find_cxx(environ)
    nvcc, why = choose_nvcc(environ)
    compiler = output_of(*cxx.split(), "--version").splitlines()[0]
    isas, left_out = choose_isas(cxx, work)
    facts: dict[str, Any] = {
        "platform": sysconfig.get_platform(),
        "cpu": {"built": True, "compiler": compiler, "flags": CXX_FLAGS, "isas": isas, "left_out": left_out},
        "cuda": {"built": nvcc is not None, "why": why},
    }
    rules, objects = cpu_rules(cxx, CXX_FLAGS, isas)
    rules += f"build libmedusa_cpu.so: link {objects}\n  flags = -shared\n"
    targets = ["libmedusa_cpu.so"]
    if nvcc is None:
        print(f"medusa-kernels: installing without the CUDA library: {why}", file=sys.stderr)
    else:
        known = [int(line.removeprefix("compute_")) for line in output_of(nvcc, "--list-gpu-arch").split()]
        archs = choose_archs(environ, known)
        release = re.search(r"release ([\d.]+)", output_of(nvcc, "--version"))
        facts["cuda"] |= {"nvcc": release[1] if release else "unknown", "archs": [str(arch) for arch in archs]}
        host = [f"-ccbin {environ['CXX']}"] if environ.get("CXX") else []
        # The static runtime's own symbols stay private to the library.
        exclude = ["-Xlinker --exclude-libs=ALL"] if sys.platform == "linux" else []
        nvcc_flags = " ".join([NVCC_FLAGS, *host, *exclude, *(flag for arch in archs for flag in arch.flags())])
        rules += CUDA_RULES.format(nvcc=nvcc, nvcc_flags=nvcc_flags, csrc=ninja_path(ROOT / "csrc"))
        targets.append("libmedusa_cuda.so")
    if not run_ninja(work, rules, *targets):
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
