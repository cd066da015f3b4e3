"""Bounds for hostile input: which exceptions a call may raise, and how much time and memory it may take."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
MIB = 2**20


def peak() -> int:
    """The peak resident memory of this process in bytes, since it was last cleared."""
    return 1024 * int(next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM")).split()[1])


@contextlib.contextmanager
def bounded(*documented: type[Exception], seconds: float = 30.0, memory: int = 256 * MIB) -> Iterator[list[str]]:
    """Run a block that may raise the documented exceptions and no other, within bounds of CPU time and memory.

    Args:
        documented: exception types that the call's documentation names.
        seconds: CPU seconds of this thread's process that the block may take.
        memory: bytes by which the peak resident memory may exceed what was there before.

    Yields:
        A list that holds the exception's message after the block if one was raised.
    """
    said: list[str] = []
    CLEAR.write_text("5")  # sets the peak back to what is resident now
    before, start = peak(), time.process_time()
    try:
        yield said
    except documented as error:
        said.append(str(error))
        if not said[0].strip():
            pytest.fail(f"{type(error).__name__} without a message")
    except Exception as error:
        names = ", ".join(kind.__name__ for kind in documented) or "no exception"
        pytest.fail(f"expected {names}, got {type(error).__name__}: {error}")
    took, grown = time.process_time() - start, peak() - before
    if took > seconds:
        pytest.fail(f"expected at most {seconds:.1f} CPU seconds, took {took:.1f}")
    if grown > memory:
        pytest.fail(f"expected at most {memory / MIB:.0f} MiB more, took {grown / MIB:.0f} MiB")
