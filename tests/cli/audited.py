"""Run `medusa` commands in this process under an audit hook, and record what each of them executed, asked and read.

    python audited.py CALLS.json RESULTS.json FOLDER..

Reported per call: code objects, sources and modules of files in the folders, questions on standard input, lines read
from it, programs started by a shell, and names of hosts looked up.
"""

import contextlib
import io
import json
import os
import sys
from pathlib import Path

events = []
folders = []


def inside(path):
    return isinstance(path, (str, bytes)) and any(os.fsdecode(path).startswith(folder) for folder in folders)


def hook(event, args):
    if event == "exec" and inside(args[0].co_filename):
        events.append(["exec", args[0].co_filename])
    source = args[1] if event in ("compile", "import") else args[0] if event == "open" else None
    code = event != "open" or os.fsdecode(source).endswith((".py", ".pyc")) if inside(source) else False
    if code or event in ("builtins.input", "os.system", "socket.getaddrinfo"):
        events.append([event, str(args)[:200]])


class Watched(io.StringIO):
    """Standard input that records its readers."""

    def isatty(self):
        return False

    def readline(self, *args):
        line = super().readline(*args)
        events.append(["line", line])
        return line


def main():
    calls, results, *given = sys.argv[1:]
    from medusa_decoding.cli import main as medusa

    folders.extend(given)
    sys.addaudithook(hook)
    found = {}
    for name, argv in json.loads(Path(calls).read_text()).items():
        events.clear()
        sys.stdin = Watched("y\n" * 5)
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                ended = medusa(argv)
            except SystemExit as error:
                ended = error.code
        found[name] = {"ended": ended, "events": list(events), "err": err.getvalue()}
    Path(results).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
