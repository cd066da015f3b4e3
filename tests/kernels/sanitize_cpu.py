"""Random cases of the CPU ops in C++, for each instruction set of this CPU, with the compiler's sanitizers.

    python tests/kernels/sanitize_cpu.py                # addresses and undefined behaviour, then data races
    python tests/kernels/sanitize_cpu.py --cases 2000 --only thread

The library's sources are compiled as setup.py does, with a driver (sanitize_cpu.cpp) in place of Python. Where the CPU
lacks AVX-512 with products of bfloat16, that set's forms run all the same, with avx512_in_plain.h for its instructions.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DRIVER = Path(__file__).with_suffix(".cpp")
# Frames are kept for the stack traces.
SANITIZERS = {"address": "-fsanitize=address,undefined -fno-sanitize-recover=all", "thread": "-fsanitize=thread"}
FLAGS = "-std=c++17 -O1 -g -fno-omit-frame-pointer -pthread"
ENVIRONMENT = {
    # With a stack of its own, GCC 12's does not align vectors of 64 bytes.
    "ASAN_OPTIONS": "detect_stack_use_after_return=0",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1",
}


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=100, help="cases per instruction set (default: 100)")
    parser.add_argument("--only", choices=sorted(SANITIZERS), help="one sanitizer; else both")
    options = parser.parse_args()
    spec = importlib.util.spec_from_file_location("setup_script", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    setup_script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup_script)

    cxx = setup_script.find_cxx(os.environ)
    runs, plain = instructions(), ""
    if runs and "avx512_bf16" not in runs:
        header = setup_script.ninja_path(DRIVER.with_name("avx512_in_plain.h"))
        # Without sanitizers, which would compile it for five minutes: the driver's arrays lie between protected pages.
        setup_script.ISA_FLAGS["avx512_bf16"] = f"{setup_script.AVX2_FLAGS} -fno-sanitize=all -include {header}"
        plain = " '-D__builtin_cpu_supports(name)=true' -Wno-psabi"
        for name, flag in (("avx512", "avx512f"), ("avx512_vnni", "avx512_vnni")):
            if flag not in runs:
                del setup_script.ISA_FLAGS[name]  # what it has for floats and bytes is in the other set too
    for name, sanitizer in SANITIZERS.items():
        if options.only not in (None, name):
            continue
        start = time.monotonic()
        work = ROOT / "build" / "sanitize" / name
        work.mkdir(parents=True, exist_ok=True)
        isas, _ = setup_script.choose_isas(cxx, work)
        if name == "thread":
            isas = isas[:1]  # what threads share is the same for all
        flags = f"{FLAGS} {sanitizer}{plain}"
        rules, objects = setup_script.cpu_rules(cxx, flags, isas)
        include = str(ROOT / "csrc").replace("$", "$$")
        rules += (
            f"build driver.o: object {setup_script.ninja_path(DRIVER)}\n  flags = '-I{include}' -fno-sanitize=all\n"
        )
        rules += f"build driver: link {objects} driver.o\n"
        if not setup_script.run_ninja(work, rules, "driver"):
            return 2
        print(f"{name}: compiled in {time.monotonic() - start:.0f} s", flush=True)
        start = time.monotonic()
        done = subprocess.run([work / "driver", str(options.cases)], env=ENVIRONMENT | os.environ, check=False)
        print(f"{name}: exit status {done.returncode} after {time.monotonic() - start:.0f} s", flush=True)
        if done.returncode:
            return 1
    return 0


def instructions() -> set[str]:
    """Return the names of what an x86 CPU runs; none for other kinds."""
    return set(Path("/proc/cpuinfo").read_text().split()) if platform.machine() == "x86_64" else set()


if __name__ == "__main__":
    sys.exit(main())
