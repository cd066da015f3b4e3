"""Who may use the server, how much at once, and that the schema tells the truth."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import os
import re
import resource
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import openai
import pytest
import schemathesis
from http_server import ScriptedEngine, live, wait_for
from hypothesis import HealthCheck, Phase, assume, given, settings, strategies
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import ignored_auth, positive_data_acceptance

from medusa_decoding.serving.engine import Engine
from medusa_decoding.serving.http.app import create_app
from medusa_decoding.serving.http.connections import BACKLOG, report_rarely
from medusa_decoding.serving.http.settings import Settings

CHAT = "/v1/chat/completions"
BODY = {"model": "demo", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
JSON = {"Content-Type": "application/json"}
UNENDING = {**BODY, "max_tokens": 900, "stop": None, "logit_bias": {"0": -100}}


def test_a_key_is_asked_for(demo_engine, encoder):
    with live(demo_engine, encoder, key="s\u00e9cret key", api_key="s\u00e9cret key") as server:
        for given in (
            None,
            "Bearer another",
            "Basic s\u00e9cret key",
            "Bearer",
            "Bearer s\u00e9cret",
            "s\u00e9cret key",
        ):
            headers = {} if given is None else {"Authorization": given.encode()}
            for method, path in (
                ("POST", CHAT), ("GET", "/v1/models"), ("GET", "/v1/nothing"), ("POST", "/tokenize"),
                ("POST", "/detokenize"), ("POST", "/tokenize/"), ("GET", "/nothing"),
            ):  # fmt: skip
                response = httpx.request(method, server.url + path, headers=headers, content=b"{")
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
        headers = {"Authorization": "bearer s\u00e9cret key".encode()}
        assert httpx.post(server.url + CHAT, json=BODY, headers=headers).status_code == 200
        for path in ("/health", "/live", "/load", "/ping", "/ready", "/version", "/metrics", "/openapi.json", "/"):
            assert httpx.get(server.url + path).status_code == 200


def test_web_pages_cannot_reach_a_local_server_by_another_name(demo_engine, encoder):
    with live(demo_engine, encoder, hosts=frozenset({"localhost", "127.0.0.1", "[::1]"})) as server:
        for host, status in (
            ("evil.example", 403), ("127.0.0.1.evil.example:8000", 403), ("", 403), ("LOCALHOST", 200),
            ("[::1]:80", 200), (f"127.0.0.1:{server.port}", 200),
        ):  # fmt: skip
            response = httpx.get(f"{server.url}/v1/models", headers={"Host": host})
            assert response.status_code == status, host
        assert httpx.get(f"{server.url}/", headers={"Host": "evil.example"}).status_code == 403
        for request, status in (
            (b"GET /health HTTP/1.0\r\n\r\n", b"200"),  # a browser never sends it
            (b"GET /health HTTP/1.0\r\nHost: evil.example\r\n\r\n", b"403"),
            (b"GET /health HTTP/1.1\r\n\r\n", b"400"),
        ):
            with socket.create_connection(("127.0.0.1", server.port), timeout=20) as client:
                client.sendall(request)
                assert client.recv(12).split()[1] == status


def test_head_requests_get_what_get_requests_do_but_the_body(server):
    for path in ("/health", "/v1/models", "/v1/models/demo", "/"):
        full, head = httpx.get(server.url + path), httpx.head(server.url + path)
        assert head.status_code == 200
        assert head.content == b""
        assert head.headers["content-length"] == full.headers["content-length"]
    assert httpx.head(f"{server.url}/metrics").status_code == 200
    assert httpx.head(f"{server.url}/nothing").status_code == 404


def test_connections_that_send_only_part_of_a_request_are_closed(demo, encoder, monkeypatch):
    for module in ("connections", "guard"):
        monkeypatch.setattr(f"medusa_decoding.serving.http.{module}.READ_SECONDS", 0.4)
    whole = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"
    post = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n".encode()
    engine = ScriptedEngine(demo, [[3], [4]], hold=True)
    with live(engine, encoder, body_bytes=1000) as server, ExitStack() as stack:

        def connect(sent):
            client = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=20))
            client.sendall(sent)
            return client

        def rest(client):
            return b"".join(iter(lambda: client.recv(65536), b""))

        def drip(client):
            for _ in range(400):
                client.sendall(b"G")
                time.sleep(0.05)

        body = json.dumps(BODY).encode()
        connect(post + b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        silent, headers, again = connect(b""), connect(whole[:-3]), connect(whole + whole[:-3])
        late = connect(post + b"Content-Length: 900\r\n\r\n{")
        refused = connect(post + b"Content-Length: 5000\r\n\r\n{")
        dripping = connect(b"")
        for client in (dripping, refused):
            with pytest.raises(ConnectionError):
                drip(client)
        assert rest(silent) == rest(headers) == b""
        assert rest(again).count(b"HTTP/1.1 200") == 1
        assert rest(late).startswith(b"HTTP/1.1 408")
        assert not engine.tickets[0].cancelled  # an answer may take longer


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files by /proc")
def test_a_lack_of_file_descriptors_is_reported_once(caplog):
    async def run_out():
        report_rarely(asyncio.get_running_loop())
        listener = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, backlog=BACKLOG)
        clients = [socket.create_connection(listener.sockets[0].getsockname()) for _ in range(3)]
        before, taken = resource.getrlimit(resource.RLIMIT_NOFILE), []
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), before[1]))
        try:
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.dup(0))
            await asyncio.sleep(1.5)  # asyncio tries again after a second
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
            for number in taken:
                os.close(number)
        listener.close()
        for client in clients:
            client.close()

    asyncio.run(run_out())
    assert [record.message for record in caplog.records if "ulimit" in record.message] == [
        "serve: new connections must wait ([Errno 24] Too many open files); see ulimit -n"
    ]
    assert "asyncio" not in {record.name for record in caplog.records}


def test_bodies_have_a_limit_also_in_chunks(demo_engine, encoder):
    with live(demo_engine, encoder, body_bytes=5000) as server:

        def chunks():
            for _ in range(20):
                yield b" " * 1000

        for content in (b" " * 5001, chunks()):
            response = httpx.post(server.url + CHAT, content=content, headers={"Content-Type": "application/json"})
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "body_too_large"
        assert httpx.post(server.url + CHAT, json=BODY).status_code == 200


def test_other_origins_are_let_in_only_if_asked(demo_engine, encoder, server):
    asks = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    assert "access-control-allow-origin" not in httpx.get(f"{server.url}/v1/models", headers=asks).headers
    with live(demo_engine, encoder, allow_origin="https://a.example", api_key="secret") as open_server:
        preflight = httpx.options(open_server.url + CHAT, headers=asks)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == "https://a.example"
        refused = httpx.get(f"{open_server.url}/v1/models", headers=asks)
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == "https://a.example"
        other = httpx.options(open_server.url + CHAT, headers={**asks, "Origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


def test_the_page_may_run_only_its_own_script(server):
    response = httpx.get(f"{server.url}/")
    policy = response.headers["content-security-policy"]
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'")
    for tag in ("script", "style"):
        [content] = re.findall(f"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy


def test_a_full_queue_refuses_and_a_client_that_leaves_frees_its_row(demo, encoder):
    with Engine(demo, slots=1, queue=1) as engine, live(engine, encoder) as server:
        streams = [server.client.chat.completions.create(**UNENDING, stream=True) for _ in range(2)]
        wait_for(lambda: engine.stats().running + engine.stats().waiting == 2)
        response = httpx.post(server.url + CHAT, json=BODY)
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        error = response.json()["error"]
        assert error["code"] == "rate_limit_exceeded"
        assert error["message"].startswith("queue: expected at most 1 waiting requests, got more")
        with pytest.raises(openai.RateLimitError):
            server.client.completions.create(model="demo", prompt=["a", "b"], max_tokens=1)
        for stream in streams:
            next(iter(stream), None) if stream is streams[0] else None
            stream.close()
        wait_for(lambda: engine.stats().running + engine.stats().waiting == 0)
        assert engine.stats().finished == {"cancelled": 2}
        assert httpx.post(server.url + CHAT, json=BODY).status_code == 200
        metrics = httpx.get(f"{server.url}/metrics").text
    assert 'outcome="refused",path="/v1/chat/completions"} 1.0' in metrics
    assert 'outcome="cancelled",path="/v1/chat/completions"} 2.0' in metrics


@pytest.fixture(scope="module")
def described(demo_engine, encoder):
    app = create_app(demo_engine, encoder, Settings(model="demo", max_new_tokens=2, api_key="secret"))
    return schemathesis.openapi.from_asgi("/openapi.json", app)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
def test_no_request_of_the_schema_fails_the_server(described, mode):
    asked = {}
    for found in described.get_all_operations():
        operation = found.ok()
        asked[operation.path] = statuses_of(operation, mode)
    assert asked.keys() >= {CHAT, "/v1/completions", "/v1/models", "/health", "/metrics"}
    for path in (CHAT, "/v1/completions"):
        assert (200 if mode == GenerationMode.POSITIVE else 400) in asked[path]


def statuses_of(operation, mode):
    """Send what the schema allows, or what it does not; return the statuses of the responses."""
    statuses = set()

    @given(operation.as_strategy(generation_mode=mode), strategies.data())
    @settings(
        max_examples=40, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )  # fmt: skip
    def call(case, data):
        count = data.draw(strategies.sampled_from([0, 1, 2, 100]))
        if mode == GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body.pop("stream", None)  # its schema is of an event's data, and would be compared with the event
        if mode == GenerationMode.POSITIVE and isinstance(case.body, dict) and count < 100:
            # Few settings go together with all others, and few prompts with this model.
            few = data.draw(strategies.permutations(sorted(case.body)))[:count]
            prompt = {"prompt": "hello"} if "prompt" in case.body else {"messages": BODY["messages"]}
            case.body = {**{name: case.body[name] for name in few}, "model": "demo", **prompt}
        if mode == GenerationMode.NEGATIVE and isinstance(case.body, dict):
            assume(not any(value in (None, "", [], {}) for value in case.body.values()))  # dropped, whatever the field
        # What the schema allows may still not fit this model: its name, its context, its template, other settings.
        excluded = [positive_data_acceptance, ignored_auth]
        response = case.call_and_validate(headers={"Authorization": "Bearer secret"}, excluded_checks=excluded)
        statuses.add(response.status_code)

    with contextlib.suppress(Unsatisfiable):  # an operation without parameters has no wrong ones
        call()
    return statuses


def test_a_hostile_body_is_read_in_linear_time(server):
    body = b'["' + b'\\"' * 200_000
    began = time.monotonic()
    response = httpx.post(f"{server.url}/health", content=body, headers=JSON)
    assert response.status_code == 405
    assert time.monotonic() - began < 5  # a quadratic reader takes minutes


def test_other_types_than_json_are_refused(server):
    for headers in ({}, {"Content-Type": "text/plain"}):
        body = b'{"model": "demo", "prompt": "a"}'
        response = httpx.post(f"{server.url}/v1/completions", content=body, headers=headers)
        assert response.status_code == 415
        assert response.json()["error"]["code"] == "unsupported_type"
