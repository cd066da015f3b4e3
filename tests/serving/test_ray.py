"""Replicas on Ray Serve: two of the embedded demo, and the errors of Serve's proxy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from typing import NamedTuple

import httpx
import pytest
import torch
import yaml
from http_server import wait_for

from medusa_decoding.serving.launch import ServerArguments
from medusa_decoding.trees.tree import Tree

pytest.importorskip("ray.serve")
pytestmark = pytest.mark.slow  # importing Ray takes seconds
ARGUMENTS = {"device": "cpu", "dtype": "float32", "slots": "8", "context": "1000"}
ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"


class Cluster(NamedTuple):
    """Addresses of Serve's proxy and of Ray's metrics."""

    url: str
    metrics: str


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def cluster():
    """Two replicas behind a proxy on a free port."""
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", "medusa_decoding.serving.ray:proxy_middleware")
        environment = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"}
        for name, value in (environment | {"RAY_metrics_report_interval_ms": "500"}).items():
            patch.setenv(name, value)
        import ray
        from ray import serve

        from medusa_decoding.serving.ray import deployment

        port, metrics = free_port(), free_port()
        ray.init(
            address="local", num_cpus=4, num_gpus=0, include_dashboard=False, log_to_driver=False,
            object_store_memory=80 * 2**20, _metrics_export_port=metrics,
        )  # fmt: skip
        stack.callback(ray.shutdown)
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
        stack.callback(serve.shutdown)
        options = {"num_replicas": 2, "request_router_config": {"request_router_class": ROUTER}}
        serve.run(deployment(ServerArguments.check(ARGUMENTS)).options(**options).bind(ARGUMENTS), name="medusa")
        yield Cluster(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{metrics}/metrics")


def complete(url, prompt, session=None, **fields):
    headers = {} if session is None else {"x-session-id": session}
    body = {"model": "demo", "prompt": prompt, "max_tokens": 8} | fields
    response = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def test_two_replicas(cluster, demo, tokenizer):
    """One test, because starting a cluster takes ten seconds."""
    check_a_replica_writes_the_text_of_plain_generation(cluster, demo, tokenizer)
    check_a_session_meets_its_cached_prefix(cluster)
    check_ray_has_the_metrics_of_each_replica(cluster)
    check_requests_after_a_kill_succeed(cluster)
    check_a_deleted_application_finishes_its_answers(cluster)


def check_a_replica_writes_the_text_of_plain_generation(cluster, demo, tokenizer):
    prompt = tokenizer("Write a class Point with x: float.")["input_ids"]
    written = demo.generate(torch.tensor([prompt]), max_new_tokens=30, tree=Tree([]))
    text = tokenizer.decode(written.sequences[0, len(prompt) :], skip_special_tokens=True)
    assert complete(cluster.url, prompt, max_tokens=30)["choices"][0]["text"] == text


def check_a_session_meets_its_cached_prefix(cluster):
    for number in range(8):
        prompt = [100 + number * 20 + at for at in range(20)]
        complete(cluster.url, prompt, f"session-{number}")
        again = complete(cluster.url, [*prompt, 7], f"session-{number}")
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 20


def check_ray_has_the_metrics_of_each_replica(cluster):
    def replicas():
        shown = httpx.get(cluster.metrics).text
        return set(re.findall(r'^ray_medusa_new_tokens_total{.*replica="(\w+)".*} \d+', shown, flags=re.MULTILINE))

    wait_for(lambda: len(replicas()) == 2)


def check_requests_after_a_kill_succeed(cluster):
    import ray

    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    replicas = sorted(name for name in names if name.startswith("SERVE_REPLICA::"))
    assert len(replicas) == 2
    killed = ray.get_actor(replicas[0], namespace="serve")
    ray.kill(killed)
    with pytest.raises(ray.exceptions.RayActorError):  # else a request could still reach it
        ray.get(killed.check_health.remote(), timeout=60)
    for number in range(8):
        complete(cluster.url, "def", f"session-{number}")


def check_a_deleted_application_finishes_its_answers(cluster):
    from ray import serve

    body = {"model": "demo", "prompt": "def", "max_tokens": 900, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        next(lines)
        serve.delete("medusa", _blocking=False)
        *_, last, done = [line.removeprefix("data: ") for line in lines if line]
    assert json.loads(last)["choices"][0]["finish_reason"] == "length"
    assert done == "[DONE]"
    refused = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "unknown_url"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"slots": "many"}, "slots: expected"),
        ({"slot": 8}, "slot: expected one of"),
        ({"tree": "x"}, "tree: "),
    ],
)
def test_a_wrong_argument_is_named(arguments, words):
    from medusa_decoding.serving.ray import build

    with pytest.raises(ValueError, match=f"^{words}"):
        build(arguments)


def test_the_example_is_valid_and_takes_what_its_engine_takes(root):
    from ray.serve.schema import ServeDeploySchema

    (application,) = ServeDeploySchema(**yaml.safe_load((root / "examples/serve.yaml").read_text())).applications
    arguments = ServerArguments.check(application.args)
    (replica,) = application.deployments
    assert replica.max_ongoing_requests == arguments.slots + arguments.queue


STREAM, PLAIN = [(b"content-type", b"text/event-stream")], [(b"content-type", b"text/plain")]


@pytest.mark.parametrize(
    ("status", "headers", "sent", "shown", "error"),
    [
        (None, None, b"", 503, "unavailable"),
        (200, STREAM, b"data: 1\n\n", 200, "unavailable"),
        (429, PLAIN, b"full", 429, "full"),
        (200, PLAIN, b"metrics", 200, None),
    ],
)
def test_errors_of_the_proxy_have_openais_form(status, headers, sent, shown, error):
    """What Serve's proxy sends if a replica ends, before an answer and within one, and if its queue is full."""
    from medusa_decoding.serving.ray import OpenAIErrors

    got = []

    async def app(scope, receive, send):
        if status is not None:
            await send({"type": "http.response.start", "status": status, "headers": headers})
            await send({"type": "http.response.body", "body": sent, "more_body": headers is STREAM})

    async def keep(message):
        got.append(message)

    asyncio.run(OpenAIErrors(app)({"type": "http", "path": "/v1/completions"}, None, keep))
    text = b"".join(message.get("body", b"") for message in got).decode()
    assert got[0]["status"] == shown
    assert not got[-1].get("more_body", False)
    if error is None:
        assert text == "metrics"
        return
    found = re.search(r'{"error".*}', text)[0]
    assert error in json.loads(found)["error"].values()
    assert text.replace(found, "") == ("data: 1\n\ndata: \n\ndata: [DONE]\n\n" if headers is STREAM else "")
