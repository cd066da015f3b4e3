"""Run an answer of the embedded model, to see whether it does what was asked.

The answer is a program that a language model wrote, so it runs in a process of its own: an isolated interpreter without
site packages and environment, in an empty folder that is removed afterwards, with limits on CPU seconds, memory, files
and processes. That keeps a mistake from doing harm; it is no sandbox for programs of someone else.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import tempfile

from medusa_decoding.demo.requests import Request

SECONDS = 10
"""Most seconds that a check may take, and of them CPU seconds of the answer's program."""
MEMORY = 512 * 1024 * 1024
"""Most bytes of address space."""

# A program that ends early, or replaces what checks it, does not know the word that a complete check prints at its end.
_RUNNER = """
import json, sys
try:
    import resource
    for name, limit in (("CPU", {seconds}), ("AS", {memory}), ("FSIZE", 0), ("NPROC", 0)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{{name}}"), (limit, limit))
except ImportError:
    pass  # not on Windows; the time limit of the caller remains
task = json.load(sys.stdin)
try:
    exec(task["check"], {{"answer": task["answer"]}})
except BaseException as error:
    sys.exit(f"{{type(error).__name__}}: {{error}}" if str(error) else type(error).__name__)
print(task["word"])
"""


def problem(request: Request, answer: str) -> str | None:
    """Return what is wrong with an answer, or None if it does what was asked.

    Args:
        request: what was asked.
        answer: the text of the answer, which is run.
    """
    word = secrets.token_hex()
    task = json.dumps({"check": request.check(), "answer": answer, "word": word})
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", _RUNNER.format(seconds=SECONDS, memory=MEMORY)],
                input=task, capture_output=True, text=True, timeout=SECONDS, cwd=folder, env={}, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return f"it did not end within {SECONDS} seconds"
    if done.returncode == 0 and done.stdout.strip().endswith(word):
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"its program ended early (exit status {done.returncode})"
