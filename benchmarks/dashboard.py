"""Every panel of the Grafana dashboard, evaluated by a real Prometheus over a loaded server.

    python -m benchmarks.dashboard --prometheus /usr/bin/prometheus --picture panels.png

Starts `medusa serve` with the embedded model, two more clients than slots, and a Prometheus that scrapes it.
Then it asks Prometheus for the queries of `examples/deploy/grafana/dashboard.json`, draws their series, and fails if
one has none or only NaN. Grafana itself is not needed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from benchmarks.serve_load import load, started
from recipes.demo.requests import draw as draw_requests

DASHBOARD = Path(__file__).resolve().parents[1] / "examples" / "deploy" / "grafana" / "dashboard.json"
SLOTS = 4
RATE = "10s"
"""In place of Grafana's $__rate_interval, with a scrape per second."""


@contextmanager
def prometheus(program: str, target: str, folder: str) -> Iterator[str]:
    """Run Prometheus over one server; gives its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"127.0.0.1:{probe.getsockname()[1]}"
    config = {
        "global": {"scrape_interval": "1s"},
        "scrape_configs": [{"job_name": "medusa", "static_configs": [{"targets": [target]}]}],
    }
    file = Path(folder, "prometheus.yaml")
    file.write_text(json.dumps(config))
    command = [program, f"--config.file={file}", f"--storage.tsdb.path={folder}/data", f"--web.listen-address={url}"]
    with Path(folder, "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            for _ in range(300):
                with suppress(httpx.TransportError):
                    if httpx.get(f"http://{url}/-/ready", trust_env=False).status_code == 200:
                        break
                time.sleep(0.1)
            yield f"http://{url}"
        finally:
            process.terminate()


def series(url: str, expression: str, begin: float, end: float) -> list[dict[str, Any]]:
    """Return the series of a query, with their finite values only."""
    query = {"query": expression.replace("$__rate_interval", RATE), "start": begin, "end": end, "step": 1}
    answer = httpx.get(f"{url}/api/v1/query_range", params=query, trust_env=False).json()
    if answer["status"] != "success":
        raise ValueError(f"{expression}: {answer['error']}")
    found = answer["data"]["result"]
    for one in found:
        one["values"] = [(at - begin, float(value)) for at, value in one["values"] if math.isfinite(float(value))]
    return [one for one in found if one["values"]]


def label(target: dict[str, str], metric: dict[str, str]) -> str:
    """Return the name of a series in a panel's legend."""
    text = target["legendFormat"]
    for name, value in metric.items():
        text = text.replace(f"{{{{{name}}}}}", value)
    return text


def main() -> None:
    """Load the server, evaluate the panels and draw them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prometheus", default=shutil.which("prometheus"), help="the program")
    parser.add_argument("--seconds", type=float, default=60, help="of load")
    parser.add_argument("--picture", type=Path, help="PNG to draw")
    args = parser.parse_args()
    if args.prometheus is None:
        parser.error("--prometheus: expected the program, as it is not in PATH")
    panels = json.loads(DASHBOARD.read_text())["panels"]
    with started(["medusa"], 1, SLOTS) as servers, tempfile.TemporaryDirectory() as folder:
        servers["medusa"].wait()
        with prometheus(args.prometheus, servers["medusa"].url.removeprefix("http://"), folder) as url:
            begin = time.time()
            drawn = draw_requests(256, 0, held_out=True)
            requests = [request.text for request in drawn for _ in range(2)]  # the second finds the first one's prompt
            asyncio.run(load(servers["medusa"], requests, SLOTS + 2, args.seconds))
            end = time.time()
            shown = [
                [(label(target, one["metric"]), one["values"]) for one in series(url, target["expr"], begin, end)]
                for panel in panels
                for target in panel["targets"]
            ]
    targets = [(panel, target) for panel in panels for target in panel["targets"]]
    for (panel, _), found in zip(targets, shown, strict=True):
        for name, values in found:
            print(f"{panel['title']}: {name}: {len(values)} values, the last {values[-1][1]:.4g}")
    if args.picture is not None:
        draw(args.picture, panels, [(panel["id"], found) for (panel, _), found in zip(targets, shown, strict=True)])
    empty = [target["expr"] for (_, target), found in zip(targets, shown, strict=True) if not found]
    if empty:
        sys.exit("without figures:\n" + "\n".join(empty))


def draw(path: Path, panels: list[dict[str, Any]], shown: list[tuple[int, Any]]) -> None:
    """Draw the panels as the dashboard places them."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(18, 4 * math.ceil(len(panels) / 3)), layout="constrained")
    for axes, panel in zip(figure.subplots(math.ceil(len(panels) / 3), 3).flat, panels, strict=False):
        for number, found in shown:
            for name, values in found if number == panel["id"] else ():
                axes.plot(*zip(*values, strict=True), label=name)
        unit = panel["fieldConfig"]["defaults"]["unit"]
        axes.set_title(panel["title"] + f" ({unit})" * (unit == "s"))
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
        axes.legend(fontsize="small")
    figure.supxlabel("seconds of load", fontsize="small")
    figure.savefig(path, dpi=60)


if __name__ == "__main__":
    main()
