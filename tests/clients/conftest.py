"""One server for all clients, in the project's environment, and a table of clients and journeys at the end.

These tests run in an environment of the clients alone: see `make test-clients`.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent

# Read when the clients are imported. Nothing here may reach beyond this machine.
os.environ |= {
    "ANONYMIZED_TELEMETRY": "false",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OPENAI_API_KEY": "none",
}


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The API's address: of a server that runs until the session ends."""
    python = os.environ.get("MEDUSA_PYTHON")
    assert python, "MEDUSA_PYTHON must name the Python of the project's environment; make test-clients sets it"
    folder = tmp_path_factory.mktemp("server")
    command = [python, str(HERE / "scripted_server.py"), "--template", str(HERE / "tools.jinja")]
    command += ["--port", "0", "--device", "cpu", "--dtype", "float32", "--log-level", "info"]
    env = {**os.environ, "XDG_CACHE_HOME": str(folder)}
    with (folder / "errors").open("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r" at (http://\S+/v1):", line)
            assert found, f"expected the server's ready line, got {line!r}\n{(folder / 'errors').read_text()}"
            yield found[1]
        finally:
            process.terminate()
            process.wait(60)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print which client passed which journey, and why the others failed."""
    cells: dict[str, dict[str, str]] = {}
    reasons = []
    words = {"failed": "FAIL", "error": "FAIL", "xfailed": "refused", "passed": "pass"}
    for outcome, word in words.items():
        for report in terminalreporter.stats.get(outcome, ()):
            found = re.search(r"::Test(\w+)::test_(\w+)", report.nodeid)
            if found is None or (report.when != "call" and outcome == "passed"):
                continue
            client, journey = found[1], found[2].replace("_", " ")
            cells.setdefault(client, {}).setdefault(journey, word)
            if word == "FAIL":
                lines = [line[4:] for line in report.longreprtext.splitlines() if line.startswith("E   ")]
                reasons.append(f"{client}, {report.nodeid.rpartition('::test_')[2]}: {' '.join(lines)[:400]}")
    journeys = list(dict.fromkeys(journey for row in cells.values() for journey in row))
    terminalreporter.section("clients and journeys")
    rows = [["client", *journeys], ["---"] * (len(journeys) + 1)]
    rows += [[client, *(row.get(journey, "-") for journey in journeys)] for client, row in sorted(cells.items())]
    for row in rows:
        terminalreporter.write_line(f"| {' | '.join(row)} |")
    for reason in reasons:
        terminalreporter.write_line(reason)
