"""Progress: a bar on a terminal, lines in a log."""

import io
import sys

from medusa_decoding import progress
from medusa_decoding.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def show(monkeypatch, stream, *, shown=True, seconds=0.0):
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "LOG_SECONDS", seconds)
    with Progress(3, "text", shown=shown) as bar:
        for loss in (0.5, 0.25):
            bar.set_postfix_str(f"loss {loss}", refresh=False)
            bar.update()
    return stream.getvalue()


def test_a_log_has_a_line_now_and_then(monkeypatch):
    lines = show(monkeypatch, io.StringIO()).splitlines()
    assert [line.partition(" (")[0] for line in lines] == ["0/3 texts", "1/3 texts", "2/3 texts"]
    assert lines[1].endswith("loss 0.5")
    assert "\r" not in "".join(lines)


def test_a_log_always_has_the_first_and_the_last_state(monkeypatch):
    lines = show(monkeypatch, io.StringIO(), seconds=1e9).splitlines()
    assert [line.partition(" (")[0] for line in lines] == ["0/3 texts", "2/3 texts"]


def test_a_terminal_has_one_bar(monkeypatch):
    written = show(monkeypatch, Terminal())
    assert written.startswith("\r")
    assert written.rstrip("\n").count("\n") == 0
    assert "2/3" in written
