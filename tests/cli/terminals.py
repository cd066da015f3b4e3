"""A process at a pseudoterminal, with keys pressed as by a person, and what terminals are sent besides text.

Nothing waits for ever: reading gives up after a minute, and the process is ended in any case.
"""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

PATIENCE = 60  # seconds
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"
"""What hides and shows the cursor."""


def plain(text):
    """Return a text without escape sequences."""
    return ESCAPE.sub("", text)


class Terminal:
    """A `medusa` command at a pseudoterminal of 80 columns and 40 rows, with further variables in its environment."""

    def __init__(self, *argv, **variables):
        self.ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
        keep_output(theirs)
        self.bytes = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "medusa_decoding", *map(str, argv)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: take_terminal(theirs),
            env=os.environ | {"OMP_NUM_THREADS": "1", "TERM": "dumb"} | variables,
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


def keep_output(descriptor):
    """Keep what was written but not read yet when Ctrl-C is pressed, which a terminal drops by default."""
    modes = termios.tcgetattr(descriptor)
    modes[3] |= termios.NOFLSH
    termios.tcsetattr(descriptor, termios.TCSANOW, modes)


def take_terminal(descriptor):
    """In the new process: take the terminal, so that Ctrl-C reaches it, and stop ignoring the signal."""
    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
