"""What dashboards, orchestrators and the files in examples/deploy expect of the server."""

import json
import re
from pathlib import Path

import httpx
import yaml
from fastapi.testclient import TestClient
from http_server import live
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from medusa_decoding.serving.engine import Engine
from medusa_decoding.serving.http.app import create_app
from medusa_decoding.serving.http.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
ACCEPT = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,*/*;q=0.1"
"""What Prometheus 2 sends."""
NAME = re.compile(r"\b(?:medusa_|vllm:)\w+")


def test_the_dashboard_and_the_docs_name_what_the_server_exposes(demo_engine, encoder):
    with live(demo_engine, encoder) as server:
        for tree in ([[0], [0, 0]], "plain"):
            body = {"model": "demo", "messages": [{"role": "user", "content": "Write a class Job."}], "max_tokens": 24}
            assert httpx.post(f"{server.url}/v1/chat/completions", json=body | {"tree": tree}).status_code == 200
        text = httpx.get(f"{server.url}/metrics", headers={"Accept": ACCEPT}).text
    families = list(text_string_to_metric_families(text))
    labels = {sample.name: {*sample.labels} for family in families for sample in family.samples}
    panels = json.loads((ROOT / "examples/deploy/grafana/dashboard.json").read_text())["panels"]
    targets = [target for panel in panels for target in panel["targets"]]
    assert len(targets) >= len(panels) > 5
    for target in targets:
        names = NAME.findall(target["expr"])
        assert names
        used = {*re.findall(r"by \((\w+)\)", target["expr"]), *re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])}
        for name in names:
            assert name in labels, f"{name}: the server has no such metric"
        assert used <= set.union(*(labels[name] for name in names)), target["expr"]
    exposed = {family.name + "_total" * (family.type == "counter") for family in families}
    table = (ROOT / "docs" / "deploy.md").read_text().partition("## Metrics")[2].partition("\n## ")[0]
    assert set(NAME.findall(table)) == exposed


def test_a_pod_has_more_time_to_end_than_its_requests():
    deployment, _ = yaml.safe_load_all((ROOT / "examples/deploy/kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    container = pod["containers"][0]
    drain = int(container["args"][container["args"].index("--drain-seconds") + 1])
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert pod["terminationGracePeriodSeconds"] >= pause + drain + 5


def test_probes_tell_an_engine_that_has_ended(demo, encoder):
    with Engine(demo, slots=1) as engine, TestClient(create_app(engine, encoder, Settings(model="demo"))) as client:
        assert {client.get(path).status_code for path in ("/ready", "/health", "/ping", "/live")} == {200}
        assert client.get("/load").json() == {"server_load": 0}
        assert client.get("/version").json()["version"]
        engine.close()
        assert {client.get(path).status_code for path in ("/ready", "/health", "/ping", "/live")} == {503}
