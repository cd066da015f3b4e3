"""What terminals are sent besides text."""

import re

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"
"""What hides and shows the cursor."""


def plain(text):
    """Return a text without escape sequences."""
    return ESCAPE.sub("", text)
