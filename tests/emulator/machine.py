"""Launches of compiled kernels, executed at once or collected as a stream."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from emulator import findings as found
from emulator import native
from emulator.findings import Finding


@dataclass
class Settings:
    """How to run launches. Values and bits of a correct kernel depend on none but `sm`.

    Attributes:
        sm: the target to compile for, as in sm_80.
        multiprocessors: how many the host code believes the device has; 0: as many as a real one.
        order: of the blocks of a grid: 0 ascending, 1 descending, 2 random.
        residents: how many blocks run at the same time.
        burst: most instructions of a warp before another one runs, chosen at random; 0: until it waits.
        races: whether to look for races.
        copies: when asynchronous copies and products happen: 0 at once, 1 when they are waited for, 2 at random.
        poison: whether shared memory starts as NaN instead of zeros.
        seed: of all random choices; each run of the emulator adds one.
        strict: whether a finding raises `EmulationError` also where execution could go on.
    """

    sm: int = 80
    multiprocessors: int = 0
    order: int = 0
    residents: int = 1
    burst: int = 0
    races: bool = False
    copies: int = 2
    poison: bool = True
    seed: int = 0
    strict: bool = True


class EmulationError(RuntimeError):
    """A kernel that cannot be parsed or cannot go on, or with `strict` any finding."""


@dataclass(frozen=True)
class Program:
    """A parsed kernel: its handle, and bytes of each parameter."""

    name: str
    handle: int
    sizes: Sequence[int]


@dataclass
class _Pending:
    program: Program
    grid: Sequence[int]
    threads: int
    shared: int
    values: Sequence[Any]
    programmatic: bool


class Emulator:
    """Runs launches and keeps what was found.

    Args:
        settings: may be changed between launches.

    Attributes:
        findings: each distinct finding, with how many runs had it.
        launches: how often each kernel was launched.
        forms: the compiled forms of each kernel that were executed.
        instructions, seconds: executed by all warps, and how long that took.
        change_ptx: is applied to the PTX of each kernel before it is parsed; for tests with faults put into it.
    """

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.findings: Counter[Finding] = Counter()
        self.launches: Counter[str] = Counter()
        self.forms: defaultdict[str, set[Any]] = defaultdict(set)
        self.instructions, self.runs, self.seconds = 0, 0, 0.0
        self.change_ptx: Callable[[str], str] | None = None
        self._lib = native.library()
        self._programs: dict[Any, Program] = {}
        self._stream: list[_Pending] | None = None

    def load(self, key: Any, ptx: str, entry: str, name: str = "") -> Program:
        """Parse the kernel `entry` of a PTX text, once per key. `name`: what to call it in counts.

        Raises:
            EmulationError: the emulator does not know one of its instructions.
        """
        if key not in self._programs:
            out = ctypes.create_string_buffer(1 << 16)
            text = self.change_ptx(ptx) if self.change_ptx else ptx
            handle = self._lib.ptx_load(text.encode(), entry.encode(), out, len(out))
            if not handle:
                raise EmulationError(f"{entry} for sm_{self.settings.sm}: {out.value.decode()}")
            sizes = (ctypes.c_uint32 * 256)()
            count = self._lib.ptx_parameters(handle, sizes, len(sizes))
            self._programs[key] = Program(name or entry, handle, list(sizes[:count]))
        self.forms[name or entry].add(key)
        return self._programs[key]

    def forget_programs(self) -> None:
        """Parse kernels again at their next launch: for another `change_ptx`."""
        for program in self._programs.values():
            self._lib.ptx_unload(program.handle)
        self._programs.clear()

    def launch(
        self,
        program: Program,
        grid: Sequence[int],
        threads: int,
        shared: int,
        values: Sequence[Any],
        programmatic: bool = False,
    ) -> None:
        """Run a launch, or add it to the stream.

        Args:
            program: the kernel.
            grid: blocks along each dimension.
            threads: threads per block.
            shared: bytes of shared memory per block.
            values: its arguments: tensors, whose memory it may access, or the bytes of numbers.
            programmatic: whether it may start while the launch before it runs (programmatic dependent launch).
        """
        self.launches[program.name] += 1
        pending = _Pending(program, grid, threads, shared, values, programmatic)
        if self._stream is None:
            self._run([pending])
        else:
            self._stream.append(pending)

    @contextlib.contextmanager
    def stream(self) -> Iterator[None]:
        """Collect launches, and run them together at the end. Results must not be read before that."""
        self._stream = []
        try:
            yield
            if self._stream:
                self._run(self._stream)
        finally:
            self._stream = None

    def _run(self, stream: Sequence[_Pending]) -> None:
        s = self.settings
        settings = native.Settings(s.order, s.residents, s.burst, s.races, s.copies, s.poison, s.seed + self.runs)
        launches, keep = (native.Launch * len(stream))(), []
        for launch, pending in zip(launches, stream, strict=True):
            numbers, ranges = _arguments(pending)
            keep += [numbers, ranges]
            launch.kernel = pending.program.handle
            launch.grid[:] = [*pending.grid, 1, 1][:3]
            launch.threads, launch.shared, launch.programmatic = pending.threads, pending.shared, pending.programmatic
            launch.parameters, launch.ranges = ctypes.addressof(numbers), ctypes.addressof(ranges)
            launch.range_count = len(ranges) // 2
        out, count = ctypes.create_string_buffer(1 << 20), ctypes.c_uint64()
        start = time.perf_counter()
        any_found = self._lib.ptx_run(
            launches, len(stream), ctypes.byref(settings), ctypes.byref(count), out, ctypes.c_size_t(len(out))
        )
        self.seconds += time.perf_counter() - start
        self.instructions += count.value
        self.runs += 1
        if any_found:
            self._report(found.parse(out.value.decode(errors="replace")))

    def _report(self, new: list[Finding]) -> None:
        known = {finding.place: finding for finding in self.findings}
        for finding in new:
            self.findings[known.setdefault(finding.place, finding)] += 1
        if self.settings.strict or any(finding.stopped for finding in new):
            raise EmulationError("\n".join(map(str, new)))

    def summary(self) -> str:
        """Return counts of what ran, and the findings."""
        lines = [
            f"sm_{self.settings.sm}{', races looked for' if self.settings.races else ''}: "
            f"{self.instructions / 1e6:.0f} million instructions of warps in {self.seconds:.0f} s"
        ]
        lines += [
            f"{n:6} launches of {name}, {len(self.forms[name])} compiled forms" for name, n in self.launches.items()
        ]
        lines += [f"found in {n} runs: {finding}" for finding, n in self.findings.most_common()]
        return "\n".join(lines)


def _arguments(pending: _Pending) -> tuple[Any, Any]:
    """Return the parameters, 8 bytes each, and the first and last address of each tensor."""
    numbers, ranges = [], []
    for value in pending.values:
        if isinstance(value, torch.Tensor):
            numbers.append(value.data_ptr())
            if value.numel():
                last = sum((n - 1) * stride for n, stride in zip(value.shape, value.stride(), strict=True))
                ranges += [value.data_ptr(), value.data_ptr() + (last + 1) * value.itemsize]
        else:
            numbers.append(int.from_bytes(value, "little"))
    numbers += [0] * (
        len(pending.program.sizes) - len(numbers)
    )  # scratch memory that Triton declares and we have none of
    return (ctypes.c_uint64 * len(numbers))(*numbers), (ctypes.c_uint64 * len(ranges))(*ranges)
