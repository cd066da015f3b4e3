"""Progress of long work: a bar on a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

LOG_SECONDS = 30.0
"""Seconds between two lines in a log."""
_LINE = "{n_fmt}/{total_fmt} {unit} ({percentage:.0f} %), {elapsed} elapsed, {remaining} left{postfix}"


class Progress(tqdm):
    """Shows progress on standard error; used like `tqdm`.

    If standard error is not a terminal, a line is written at the start, at the end, and every `LOG_SECONDS` between.

    Args:
        total: how many units there are.
        unit: what is counted, in the singular.
        shown: False to print nothing.
        **settings: of tqdm.
    """

    def __init__(self, total: int, unit: str, *, shown: bool = True, **settings: Any) -> None:
        self._in_log = not sys.stderr.isatty()
        self._written = -1
        if self._in_log:
            settings |= {"bar_format": _LINE, "mininterval": LOG_SECONDS, "maxinterval": LOG_SECONDS, "miniters": 1}
        unit = f"{unit}s" if self._in_log else unit
        super().__init__(total=total, unit=unit, disable=not shown, file=sys.stderr, **settings)

    def display(self, msg: str | None = None, pos: int | None = None) -> bool:
        """Draw the bar, or write a line; `msg` "" would erase a bar. Returns whether the cursor is left on a bar."""
        if not self._in_log:
            return super().display(msg, pos)
        if msg != "" and self.n != self._written:
            self._written = self.n
            print(msg or self, file=sys.stderr, flush=True)
        return False

    def close(self) -> None:
        """Write the last state and end."""
        if self._in_log and not self.disable:
            self.display()
            self.leave = False  # or else tqdm writes the line once more
        super().close()
