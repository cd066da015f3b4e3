"""What the emulator found, as objects and as text."""

from __future__ import annotations

import linecache
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Access:
    """One instruction at work.

    Attributes:
        kernel: its name.
        launch: which launch of the stream, from 0.
        block: index in the grid, with the first dimension fastest.
        thread: index in the block.
        ptx_line: line of the PTX.
        file, line: place in the source.
        text: the instruction.
    """

    kernel: str
    launch: int
    block: int
    thread: int
    ptx_line: int
    file: str
    line: int
    text: str

    def __str__(self) -> str:
        source = linecache.getline(self.file, self.line).strip()
        return (
            f"    {Path(self.file).name}:{self.line}  {source}\n"
            f"      {self.kernel}, launch {self.launch}, block {self.block}, thread {self.thread}\n"
            f"      PTX line {self.ptx_line}: {self.text}"
        )


@dataclass(frozen=True)
class Finding:
    """A race, an access out of bounds, a deadlock.

    Attributes:
        kind: what it is.
        accesses: the instruction that was found, and for a race the earlier one that it is in conflict with; for a
            deadlock where each warp waits.
        stopped: whether execution could not go on.
        times: how often it happened at these instructions of one run. Equal findings differ in this alone.
    """

    kind: str
    accesses: tuple[Access, ...]
    stopped: bool
    times: int = field(default=1, compare=False)

    @property
    def place(self) -> tuple[object, ...]:
        """What tells it from others: kind, kernels and source lines."""
        return (self.kind, *((access.kernel, access.file, access.line) for access in self.accesses[:2]))

    def __str__(self) -> str:
        times = "" if self.times == 1 else f" ({self.times} times)"
        return "\n".join([self.kind + times, *map(str, self.accesses)])


def parse(text: str) -> list[Finding]:
    """Read the lines of fields that the emulator's C interface returns."""
    findings: list[Finding] = []
    for fields_of_one in text.splitlines():
        first, *fields = fields_of_one.split("\t")
        if first == "F":
            kind, times, stopped = fields
            findings.append(Finding(kind, (), stopped == "1", int(times)))
        else:
            kernel, launch, block, thread, ptx_line, file, source_line, instruction = fields
            access = Access(
                kernel, int(launch), int(block), int(thread), int(ptx_line), file, int(source_line), instruction
            )
            last = findings[-1]
            findings[-1] = Finding(last.kind, (*last.accesses, access), last.stopped, last.times)
    return findings
