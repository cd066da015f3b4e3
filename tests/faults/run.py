"""Apply single faults, one at a time, to a copy of the checkout and check that a test fails for each.

    python -m tests.faults.run [FILES] [--only TEXT] [--jobs N] [--check]

Each YAML file beside this one lists faults of one part of the project:

    - fault: what goes wrong
      file: path of the source
      old: its text, which must occur once
      new: the text with the fault
      test: what to give pytest; at least one of its tests must fail
      emulated: 80     # only for Triton kernels: run them compiled for this target, in tests/emulator

Faults in csrc/ are compiled. `--check` runs every named test without a fault; it must pass. The exit status is 1 if a
fault was not found, or if a run was no verdict because the fault breaks an import.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 600
"""Seconds of one run."""


class Fault(NamedTuple):
    """One change of one source file, and the test that has to fail for it."""

    fault: str
    file: str
    old: str
    new: str
    test: str
    emulated: int | None = None

    def broken(self) -> str:
        """Return the source with the fault; raise `ValueError` unless the text to replace occurs once."""
        source = (ROOT / self.file).read_text()
        if (count := source.count(self.old)) != 1 or self.old == self.new:
            raise ValueError(f"{self.file}: the text of {self.fault!r} occurs {count} times, it must occur once")
        return source.replace(self.old, self.new)


class Copy:
    """A copy of the checkout to run tests in, with the checkout's compiled libraries."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.check_output(listed, cwd=ROOT, text=True).split("\0"):
            if name and (ROOT / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name)
        shutil.copytree(ROOT / "medusa_kernels/_lib", folder / "medusa_kernels/_lib", dirs_exist_ok=True)
        paths = [folder, folder / "python", folder / "tests"]
        self.environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
        }
        self.environment.pop("PYTHONDONTWRITEBYTECODE", None)

    def compile(self) -> None:
        """Compile csrc/ into the copy's package; without the CUDA library, which nothing here can run."""
        command = [sys.executable, "setup.py", "-q", "build", "--build-lib=build/lib", "--build-temp=build/temp"]
        environment = self.environment | {"MEDUSA_BUILD_CUDA": "0"}
        subprocess.run([*command, "build_native"], cwd=self.folder, env=environment, check=True, capture_output=True)
        shutil.copytree(
            self.folder / "build/lib/medusa_kernels/_lib", self.folder / "medusa_kernels/_lib", dirs_exist_ok=True
        )

    def pytest(self, test: str, emulated: int | None) -> tuple[int, str]:
        """Run tests until the first one fails; return pytest's exit status and what it printed."""
        options = ["-p", "emulator.plugin", "--races", "--sm", str(emulated)] if emulated else []
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *options, *shlex.split(test)]
        done = subprocess.run(
            command, cwd=self.folder, env=self.environment, capture_output=True, text=True, timeout=LIMIT, check=False
        )
        return done.returncode, done.stdout + done.stderr

    def with_fault(self, fault: Fault) -> tuple[int, str]:
        """Run the test with the fault applied, then take the fault out again."""
        target = self.folder / fault.file
        before = target.read_bytes()
        try:
            target.write_text(fault.broken())
            if fault.file.startswith("csrc/"):
                self.compile()
            return self.pytest(fault.test, fault.emulated)
        finally:
            target.write_bytes(before)
            shutil.copytree(ROOT / "medusa_kernels/_lib", self.folder / "medusa_kernels/_lib", dirs_exist_ok=True)


def read(files: list[Path]) -> list[Fault]:
    """Read the lists of faults; raise `ValueError` for an entry that the sources do not have."""
    faults = [Fault(**entry) for file in files for entry in yaml.safe_load(file.read_text())]
    for fault in faults:
        fault.broken()
    return faults


def failed(output: str) -> str:
    """Return the first test that failed."""
    match = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return match[1] if match else "no test named"


def main(arguments: list[str] | None = None) -> int:
    """Run the faults; return 1 if one of them was not found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="lists of faults; all of them by default")
    parser.add_argument("--only", default="", help="only faults whose description contains this text")
    parser.add_argument("--jobs", type=int, default=1, help="copies of the checkout to run tests in at the same time")
    parser.add_argument("--check", action="store_true", help="run the tests without the faults; they must pass")
    options = parser.parse_args(arguments)
    faults = read(options.files or sorted(Path(__file__).parent.glob("*.yaml")))
    faults = [fault for fault in faults if options.only in fault.fault]
    if options.check:
        faults = list({(fault.test, fault.emulated): fault for fault in faults}.values())
    wanted, word = (0, "passed") if options.check else (1, "found")
    bad = 0
    with tempfile.TemporaryDirectory(prefix="faults-") as scratch:
        copies: Queue[Copy] = Queue()
        for number in range(options.jobs):
            copies.put(Copy(Path(scratch, str(number))))

        def one(fault: Fault) -> tuple[bool, str]:
            copy, start = copies.get(), time.perf_counter()
            try:
                status, output = copy.pytest(fault.test, fault.emulated) if options.check else copy.with_fault(fault)
            except (subprocess.SubprocessError, OSError) as error:
                status, output = -1, str(getattr(error, "stderr", None) or error)
            finally:
                copies.put(copy)
            took = f"({time.perf_counter() - start:.0f} s)"
            if status == wanted:
                return True, f"{word} {took} {fault.test if options.check else f'{fault.fault}: {failed(output)}'}"
            tail = "\n".join(output.splitlines()[-15:])
            return False, f"NOT {word.upper()} {took} {fault.fault}: {fault.test} ended with {status}\n{tail}"

        with ThreadPoolExecutor(options.jobs) as pool:
            for good, text in pool.map(one, faults):
                bad += not good
                print(text, flush=True)
    print(f"{len(faults) - bad} of {len(faults)} {word}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
