"""Read messages line by line from a terminal or a pipe, and handle Ctrl-C during a generation."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

import torch

LEAVE = "/exit or Ctrl-D leaves"


class Breaker:
    """Ends a generation at its next token after Ctrl-C; a second Ctrl-C interrupts at once.

    Use it as a context manager, which handles SIGINT (only in the main thread), and as a stopping criterion of
    `generate`.

    Attributes:
        stopped: whether it ended the generation.
    """

    def __init__(self) -> None:
        self.asked = self.stopped = False
        self._before: Any = None

    def __enter__(self) -> Breaker:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Return whether to stop, bool [B]."""
        self.stopped = self.asked
        return torch.full((len(input_ids),), self.asked)


def messages(terminal: bool) -> Iterator[str]:
    """Yield messages until the input ends; prompt for them at a terminal."""
    if terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() edits lines with it)
    lines: list[str] = []
    while True:
        try:
            line = _line(terminal, "... " if lines else "> ")
        except EOFError:
            break
        except KeyboardInterrupt:
            if not terminal:
                raise
            lines = []
            print(f"\n{LEAVE}", file=sys.stderr)
            continue
        lines.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            text, lines = "\n".join(lines), []
            if text.strip():
                yield text
    if terminal:
        print(file=sys.stderr)
    if "".join(lines).strip():
        yield "\n".join(lines)


def _line(terminal: bool, prompt: str) -> str:
    """Return the next line; raise `EOFError` at the end."""
    if terminal and sys.stdout.isatty():
        return input(prompt)
    if terminal:  # standard output goes elsewhere and must not contain prompts
        print(prompt, end="", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")
