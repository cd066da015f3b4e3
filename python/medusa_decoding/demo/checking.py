"""Run an answer of the embedded model, to see whether it does what was asked.

The answer is a program that a language model wrote, so it runs in a process of its own: an isolated interpreter without
site packages and environment, in an empty folder that is removed afterwards, with limits on time, memory, processes and
what it says. It cannot put data into files, but could empty or delete some of the user's: this stops most mistakes of a
small model, and is no sandbox for programs of someone else.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile

from medusa_decoding.demo.requests import Request

SECONDS = 10
"""Most seconds that a check may take, and of them CPU seconds of the answer's program."""
MEMORY = 512 * 1024 * 1024
"""Most bytes of address space."""
LONGEST = 300
"""Most characters of what is wrong."""

# A program that ends early does not print the word that a complete check prints at its end. What the program itself
# prints goes nowhere.
_RUNNER = """
import io, json, os, resource, sys
report = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")
task = json.load(sys.stdin)
word = task.pop("word")
nowhere = os.open(os.devnull, os.O_RDWR)
for number in (0, 1, 2):
    os.dup2(nowhere, number)
sys.stderr = io.StringIO()
for name, limit in (("CPU", {seconds}), ("AS", {memory}), ("FSIZE", 0), ("NPROC", 0)):
    hard = resource.getrlimit(getattr(resource, f"RLIMIT_{{name}}"))[1]
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    resource.setrlimit(getattr(resource, f"RLIMIT_{{name}}"), (limit, limit))
try:
    exec(task["check"], {{"answer": task["answer"]}})
    print(word, file=report, flush=True)
except BaseException as error:
    said = sys.stderr.getvalue().strip().splitlines() if isinstance(error, SystemExit) else []
    reason = f"{{type(error).__name__}}: {{error}}" if str(error) else type(error).__name__
    print((said[-1] if said else reason)[:{longest}], file=report, flush=True)
"""


def problem(request: Request, answer: str) -> str | None:
    """Run an answer; return what is wrong with it, or None if it does what was asked."""
    word = secrets.token_hex()
    task = json.dumps({"check": request.check(), "answer": answer, "word": word})
    runner = _RUNNER.format(seconds=SECONDS, memory=MEMORY, longest=LONGEST)
    # Some interpreters find their libraries by this variable.
    known = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", runner], cwd=folder, env=known, start_new_session=True, encoding="utf-8",
            errors="replace", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        ) as process,
    ):  # fmt: skip
        try:
            said, _ = process.communicate(task, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return f"it did not end within {SECONDS} seconds"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    lines = said.splitlines()
    if lines == [word]:
        return None
    return lines[0] if lines else f"its program ended early (exit status {process.returncode})"
