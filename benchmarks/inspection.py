"""Compiles every launch configuration for every target without a GPU, and checks the compiled code.

`python -m benchmarks.inspection` prints one table: registers, stack, shared memory and the instructions that
matter. It checks spills and the limits of shared memory, which compilation itself does not. It does not know what a
kernel computes: it reads the forms of `kernel_forms`, Triton's IR and the disassembly. The native kernels of csrc/ are
read from the built library.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.kernel_forms import forms
from benchmarks.launches import OPS, Specialisation
from benchmarks.loop_variables import not_carried
from medusa_kernels import _native
from medusa_kernels._registry import interpreted
from medusa_kernels._triton.launch import Device

TARGETS = {
    "80": Device((8, 0), 108, 163 * 1024, 164 * 1024),  # A100
    "86": Device((8, 6), 84, 99 * 1024, 100 * 1024),  # A6000
    "89": Device((8, 9), 142, 99 * 1024, 100 * 1024),  # L40S
    "90": Device((9, 0), 132, 227 * 1024, 228 * 1024),  # H100 SXM, H200
    "100": Device((10, 0), 148, 227 * 1024, 228 * 1024),  # B200
    "120": Device((12, 0), 170, 99 * 1024, 100 * 1024),  # RTX 5090
}
"""One GPU per compilation target for which kernels are checked; shared memory from the CUDA C++ programming guide,
table of technical specifications."""
ARCHS = tuple(TARGETS)
GPUS = {
    "a100": ("80", TARGETS["80"]),
    "a6000": ("86", TARGETS["86"]),
    "l40s": ("89", TARGETS["89"]),
    "h100-pcie": ("90", replace(TARGETS["90"], multiprocessors=114)),
    "h100": ("90", TARGETS["90"]),
    "h200": ("90", TARGETS["90"]),
    "b200": ("100", TARGETS["100"]),
    "rtx-5090": ("120", TARGETS["120"]),
}
"""Compilation target and properties of GPUs by name, as `benchmarks.simulator --device` has them."""
RESIDENT = {"80": (64, 32), "86": (48, 16), "89": (48, 24), "90": (64, 32), "100": (64, 32), "120": (48, 24)}
"""Most warps and most programs that a multiprocessor holds, from the same table."""

RULES = """\
Each of these is a breach, printed below the table, and makes the exit status 1:
  stack         more than 0 bytes of stack: registers spill
  shared        more shared memory than one block may have on that target
  programs      fewer programs fit a multiprocessor, by registers and shared memory, than the launch counts on
  tensor cores  a 16-bit kernel (a 16-bit pointer among its arguments) with a matrix product (tt.dot in Triton's IR),
                but no tensor-core operation in its disassembly
  16 bytes      a kernel that loads a tile of 16-bit numbers of at least 16 bytes per thread (tt.load in Triton's IR),
                or the native kernel of 16-byte units, without any 16-byte load (LDG .128, LDGSTS .128 or a bulk copy).
                Exempt are kernels for rows whose elements or starts are not aligned, which have one of the words
                strided, unit1, unit2, unit4 in their name.
  carried       a loop assigns a variable that Triton does not carry to its next iteration (see loop_variables.py)
  missing       an op without a kernel or compiled forms, or a kernel that does not compile
"""
UNALIGNED_WORDS = frozenset({"strided", "unit1", "unit2", "unit4"})

_WIDE = re.compile(r"(LDG|LDGSTS)\..*\.128\b")
_ASYNC = re.compile(r"(LDGSTS|UBLKCP|UTMALDG)\b")
_BULK = re.compile(r"(UBLKCP|UTMALDG)\b")
_TENSOR_CORE = re.compile(r"(?:UTC)?[HIQD]G?MMA\b")
_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*[\w.]*)")
_RESOURCES = re.compile(r"^\s*REG:(\d+) STACK:(\d+) SHARED:(\d+)")
_LOAD = re.compile(r"tt\.load\b.*:\s*tensor<((?:\d+x)+)!tt\.ptr<(?:f16|bf16|i16)>")
_NATIVE_UNIT = re.compile(r"compact_kernelI(N\w*6Unit16E|[mjth])")
_UNIT_BYTES = {"m": 8, "j": 4, "t": 2, "h": 1}


@dataclass(frozen=True)
class Counts:
    """Counts from the disassembly of one kernel; `shared` is static shared memory, known at compilation."""

    registers: int = 0
    stack: int = 0
    shared: int = 0
    wide_loads: int = 0
    bulk_copies: int = 0
    async_copies: int = 0
    tensor_ops: int = 0


@dataclass(frozen=True)
class Row:
    """One line of the table, and what the rules need.

    Attributes:
        name: the specialisation's name.
        arch: one of `ARCHS`.
        warps: warps per program; 0 for a native kernel, whose block is chosen at launch.
        stages: depth of software pipelining.
        counts: registers, memory and instructions.
        limit: bytes of shared memory that a block may have on the target.
        dots_16_bit: whether it multiplies matrices and has 16-bit arguments.
        streams: whether it loads tiles of 16-bit numbers, 16 bytes or more per thread.
        programs: programs per multiprocessor that the launch counts on; 0: none.
        fitting: programs that fit a multiprocessor.
        failed: why there is nothing to count, or "".
        lost: variables of loops that are not carried.
    """

    name: str
    arch: str
    warps: int
    stages: int
    counts: Counts
    limit: int
    dots_16_bit: bool = False
    streams: bool = False
    programs: int = 0
    fitting: int = 0
    failed: str = ""
    lost: tuple[str, ...] = ()


def breaches(row: Row) -> list[str]:
    """Return one sentence per rule that a row breaks."""
    if row.failed:
        return [row.failed]
    counts = row.counts
    found = [f"{name} is assigned in a loop, and not carried to its next iteration" for name in row.lost]
    if counts.stack > 0:
        found.append(f"{counts.stack} bytes of stack, expected 0: registers spill")
    if counts.shared > row.limit:
        found.append(f"{counts.shared} bytes of shared memory, the limit of sm_{row.arch} is {row.limit}")
    if row.fitting < row.programs:
        found.append(f"{row.fitting} programs fit a multiprocessor, the launch counts on {row.programs}")
    if row.dots_16_bit and not counts.tensor_ops:
        found.append("a 16-bit matrix product without a tensor-core operation")
    aligned = not UNALIGNED_WORDS.intersection(row.name.split())
    if row.streams and aligned and not counts.wide_loads and not counts.bulk_copies:
        found.append("tiles of 16-bit numbers are loaded, but nothing 16 bytes at once")
    return found


def parse(text: str) -> dict[str, Counts]:
    """Return the counts by (mangled) kernel name from the output of `cuobjdump -res-usage -sass`."""
    found: dict[str, Counts] = {}
    name = ""
    for line in text.splitlines():
        stripped = line.strip()
        if match := re.match(r"Function\s*:?\s+([^\s:]+):?$", stripped):
            name = match[1]
            found.setdefault(name, Counts())
        elif match := _RESOURCES.match(line):
            registers, stack, shared = (int(number) for number in match.groups())
            found[name] = replace(found[name], registers=registers, stack=stack, shared=shared)
        elif name and (match := _INSTRUCTION.match(line)):
            patterns = {"wide_loads": _WIDE, "bulk_copies": _BULK, "async_copies": _ASYNC, "tensor_ops": _TENSOR_CORE}
            counts = found[name]
            hits = {key: getattr(counts, key) + 1 for key, pattern in patterns.items() if pattern.match(match[1])}
            found[name] = replace(counts, **hits) if hits else counts
    return found


def streams(ttir: str, warps: int) -> bool:
    """Return whether Triton's IR loads a tile of 16-bit numbers with at least 16 bytes per thread."""
    tiles = (math.prod(map(int, match[1].rstrip("x").split("x"))) for match in _LOAD.finditer(ttir))
    return any(2 * elements >= 16 * 32 * warps for elements in tiles)


def compiled_row(spec: Specialisation, arch: str) -> Row:
    """Compile one form for one target, and read the result."""
    row = Row(spec.name, arch, spec.num_warps, spec.num_stages, Counts(), TARGETS[arch].shared_memory)
    try:
        with not_carried() as lost:
            kernel = compiled(spec, arch)
    except Exception as error:  # a compiler pass may raise anything
        return replace(row, failed=f"does not compile: {type(error).__name__}: {str(error)[:300]}")
    (counts,) = parse(disassembled(kernel)).values()
    ttir = kernel.asm["ttir"]
    counts = replace(counts, shared=kernel.metadata.shared)
    has_16_bit = any(kind.lstrip("*") in ("bf16", "fp16") for kind in spec.signature.values())
    return replace(
        row,
        counts=counts,
        dots_16_bit=has_16_bit and "tt.dot" in ttir,
        streams=streams(ttir, spec.num_warps),
        programs=spec.programs,
        fitting=fitting(counts, spec.num_warps, arch),
        lost=tuple(lost),
    )


def fitting(counts: Counts, warps: int, arch: str) -> int:
    """Return how many programs a multiprocessor holds, by its shared memory, its 64 Ki registers and its threads.

    Registers are allocated in units of 8 per thread.
    """
    by_registers = 2**16 // (-(-max(counts.registers, 1) // 8) * 8 * 32 * warps)
    most_warps, most_programs = RESIDENT[arch]
    return min(by_registers, TARGETS[arch].blocks(counts.shared), most_warps // warps, most_programs)


def compiled(spec: Specialisation, arch: str) -> Any:
    """Return Triton's compiled kernel for a specialisation, from Triton's cache if possible."""
    import triton
    from triton.backends.compiler import GPUTarget

    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, **spec.options}
    return triton.compile(source(spec), target=GPUTarget("cuda", int(arch), 32), options=options)


def source(spec: Specialisation) -> Any:
    """Return a specialisation as Triton's compiler takes it."""
    from triton.compiler import ASTSource

    names = spec.kernel.arg_names
    signature = {name: spec.signature.get(name, "constexpr") for name in names}
    aligned = [i for i, name in enumerate(names) if signature[name].startswith("*") or name in spec.aligned]
    attributes = {(i,): [["tt.divisibility", 16]] for i in aligned}
    return ASTSource(spec.kernel, signature, dict(spec.constants), attributes)


def disassembled(kernel: Any) -> str:
    """Return the disassembly and resource usage of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return disassembly(Path(file.name))


def disassembly(file: Path, *options: str) -> str:
    """Return the output of Triton's cuobjdump for a cubin or a library."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run(
        [tool, "-res-usage", "-sass", *options, file], check=True, capture_output=True, text=True
    ).stdout


def native_rows(library: Path, arch: str) -> list[Row]:
    """Return one row per kernel of the CUDA library, named by the unit that it moves.

    There are none for a target that the library serves by PTX, which the driver compiles on the machine.
    """
    rows = []
    for mangled, counts in parse(disassembly(library, "-arch", f"sm_{arch}")).items():
        match = _NATIVE_UNIT.search(mangled)
        unit = _UNIT_BYTES.get(match[1], 16) if match else 0
        name = f"kv_compact csrc {unit}-byte units" if match else mangled
        rows.append(Row(name, arch, 0, 0, counts, TARGETS[arch].shared_memory, streams=unit == 16))
    return rows


_work: list[tuple[str, Specialisation]] = []
"""Targets and forms by number: forked workers find here what cannot be pickled."""


def compile_all(work: Sequence[tuple[str, Specialisation]], jobs: int) -> list[Row]:
    """Return a row per target and form in order, compiled by several processes, with progress on stderr.

    They are forked, so that workers do not import torch again; no threads and no CUDA have been started here.
    """
    rows: dict[int, Row] = {}
    _work[:] = work
    with ProcessPoolExecutor(max(1, jobs), mp_context=multiprocessing.get_context("fork")) as pool:
        numbers = {pool.submit(_compile, number): number for number in range(len(work))}
        for done, future in enumerate(as_completed(numbers), 1):
            row = rows[numbers[future]] = future.result()
            print(f"[{done}/{len(work)}] sm_{row.arch} {row.name}", file=sys.stderr, flush=True)
    return [rows[number] for number in sorted(rows)]


def _compile(number: int) -> Row:
    arch, spec = _work[number]
    return compiled_row(spec, arch)


def table(rows: Sequence[Row]) -> str:
    """Format the rows as one aligned table."""
    head = ("name", "arch", "warps", "stages", "regs", "stack", "shared", "limit", "16-byte", "async", "tensor")
    body = []
    for row in rows:
        c, launched = row.counts, (row.warps or "-", row.stages or "-")
        used = (c.registers, c.stack, c.shared, row.limit, c.wide_loads, c.async_copies, c.tensor_ops)
        body.append((row.name, f"sm_{row.arch}", *launched, *used))
    return aligned(head, body, 2)


def aligned(head: Sequence[str], body: Iterable[Sequence[Any]], left: int) -> str:
    """Format lines under a head, the first `left` columns aligned to the left and the others to the right."""
    cells = [tuple(head), *(tuple(str(cell) for cell in line) for line in body)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
    lines = [
        "  ".join(c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in cells
    ]
    return "\n".join([*lines[:1], "  ".join("-" * width for width in widths), *lines[1:]])


def inspect(
    archs: Sequence[str], only: Sequence[str], jobs: int, ops: Sequence[str] = OPS
) -> tuple[list[Row], list[str]]:
    """Compile the kernels whose name contains one of `only`, in several processes, with progress on stderr.

    Returns:
        The rows in the order of the ops, and one line per breach.
    """
    lines, work = [], []

    def asked(name: str) -> bool:
        return any(text in name for text in only)

    for op in ops:
        try:
            found = [(arch, spec) for arch in archs for spec in forms(op, TARGETS[arch])]
            work += [(arch, spec) for arch, spec in found if asked(spec.name)]
        except (ImportError, KeyError) as error:
            lines.append(f"{op}: missing: {error}")
    rows = compile_all(work, jobs)
    library = _native.LIBRARY_FOLDER / "libmedusa_cuda.so"
    if library.exists():
        rows += [row for arch in archs for row in native_rows(library, arch) if asked(row.name)]
    else:
        print(f"csrc/: no kernels to inspect: {_native.why_missing('cuda')}", file=sys.stderr)
    lines += [f"{row.name} sm_{row.arch}: {breach}" for row in rows for breach in breaches(row)]
    return rows, lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.inspection",
        description="Compile every kernel for every target (no GPU needed), and check the compiled code.",
        epilog=RULES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--arch", action="append", choices=ARCHS, help="target, may be repeated (default: all)")
    words = "only kernels whose name contains one of these"
    parser.add_argument("--only", nargs="+", default=[""], metavar="SUBSTRING", help=words)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (default: cores)")
    options = parser.parse_args(arguments)
    if interpreted():
        print("TRITON_INTERPRET=1 is set: kernels cannot be compiled; unset it", file=sys.stderr)
        return 2
    rows, lines = inspect(options.arch or ARCHS, options.only, options.jobs)
    if not rows and not lines:
        print(f"no kernel's name contains {' or '.join(map(repr, options.only))}", file=sys.stderr)
        return 2
    return report(table(rows), lines)


def report(shown: str, breaches: Sequence[str]) -> int:
    """Print a table and its breaches, and return the exit status."""
    print(shown)
    for line in breaches:
        print(f"breach: {line}")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
