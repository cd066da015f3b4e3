"""medusa chat at a real terminal: a process in a pseudoterminal, with keys pressed as by a person.

Nothing waits for ever: reading gives up after a minute, and the process is ended in any case.
"""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest

PATIENCE = 60  # seconds
# It has no end of turn, so that an answer goes on until it is interrupted.
TEMPLATE = "{% for message in messages %}{{ message['content'] }}:\n{% endfor %}"


class Terminal:
    """A process at a pseudoterminal."""

    def __init__(self, *argv):
        self.ours, theirs = pty.openpty()
        self.bytes = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "medusa_decoding", *map(str, argv)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: take_terminal(theirs),
            env=os.environ | {"OMP_NUM_THREADS": "1", "TERM": "dumb"},
        )
        os.close(theirs)

    def press(self, keys):
        os.write(self.ours, keys.encode())

    def shown(self, start=0):
        """Return the output of the process, from a byte offset on."""
        return self.bytes[start:].decode(errors="replace").replace("\r\n", "\n")

    def wait_for(self, pattern):
        """Return the output from now on, at least up to a match of the pattern."""
        start, until = len(self.bytes), time.monotonic() + PATIENCE
        while re.search(pattern, self.shown(start)) is None:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self.ours], [], [], left)[0]:
                raise AssertionError(f"{pattern!r} was not shown within {PATIENCE} s:\n{self.shown()[-2000:]}")
            self.bytes += self.read()
        return self.shown(start)

    def interrupt_prompt(self, pattern):
        """Press Ctrl-C and wait; once again if nothing happens.

        Python's readline notices a Ctrl-C in the moment when it begins to wait only at the next key.
        """
        self.press("\x03")
        if not select.select([self.ours], [], [], 5.0)[0]:
            self.press("\x03")
        self.wait_for(pattern)

    def read(self):
        try:
            text = os.read(self.ours, 4096)
        except OSError:  # what Linux says when the process is gone
            text = b""
        assert text, f"the process ended:\n{self.shown()[-2000:]}"
        return text

    def end(self):
        self.process.kill()
        self.process.wait()
        os.close(self.ours)


def take_terminal(descriptor):
    """In the new process: take the terminal, so that Ctrl-C reaches it, and stop ignoring the signal."""
    import fcntl
    import termios

    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def terminal(make_chat, tmp_path):
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    heads = make_chat(2, context=2**20).heads
    argv = ["--template", tmp_path / "template.jinja", "--max-new-tokens", 10**6, "--tree", "root"]
    terminal = Terminal("chat", "--model", heads, *argv)
    yield terminal
    terminal.end()


@pytest.mark.slow
def test_ctrl_c_ends_the_answer_but_not_the_chat(terminal):
    terminal.wait_for("> $")
    terminal.press("hello\n")
    terminal.wait_for(r"hello\n\s*\S+\s")  # words of the answer are there
    terminal.press("\x03")
    terminal.wait_for(r"medusa: interrupted: the answer is kept(.|\n)*> $")

    terminal.press("/history\n")
    said = terminal.wait_for(r"\[interrupted\]\n> $")
    kept = re.search(r"user: hello\nassistant: ((.|\n)*) \[interrupted\]", said).group(1)
    assert len(kept) > 2
    assert kept in terminal.shown()[: -len(said)].replace("^C", "")

    terminal.press("half a line")
    terminal.wait_for(r"half a line$")
    terminal.interrupt_prompt(r"/exit or Ctrl-D leaves\n> $")
    terminal.press("one\\\n")
    terminal.wait_for(r"\.\.\. $")
    terminal.interrupt_prompt(r"leaves\n> $")

    terminal.press("again\n")
    terminal.wait_for(r"again\n\s*\S+\s")
    terminal.press("\x03")
    terminal.wait_for(r"medusa: interrupted: the answer is kept(.|\n)*> $")
    terminal.press("\x04")
    assert terminal.process.wait(PATIENCE) == 0
