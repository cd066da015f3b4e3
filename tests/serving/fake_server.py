"""A scripted stand-in for `medusa serve`: the page, and streams whose steps a test has written down."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

PAGE = files("medusa_decoding.serving.http") / "page.html"
POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""As strict as the real server's."""


@dataclass
class Reply:
    """What the server answers to a message.

    Attributes:
        steps: the tokens of each step; the first entry is the prefill's.
        status: of the response; from 400 on only `error` is sent.
        error: message of the error; with status 200 it is an event after the steps.
        delay: seconds before each step.
        finish: why the answer ends.
        closes: break the connection after the steps.
    """

    steps: list[list[str]] = field(default_factory=list)
    status: int = 200
    error: str | None = None
    delay: float = 0.0
    finish: str = "stop"
    closes: bool = False


class FakeServer:
    """Answers by the last message's text; keeps the bodies of all requests, and says when a client has left."""

    def __init__(self, model: dict[str, Any], replies: dict[str, Reply], key: str | None) -> None:
        self.model, self.replies, self.key = model, replies, key
        self.requests: list[dict[str, Any]] = []
        self.left = threading.Event()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self.http.server_port}/"


@contextmanager
def fake_server(
    replies: dict[str, Reply] | None = None, model: dict[str, Any] | None = None, key: str | None = None
) -> Iterator[FakeServer]:
    """Serve until the block ends."""
    server = FakeServer(model or {"id": "scripted"}, replies or {}, key)
    server.http.daemon_threads = True
    threading.Thread(target=server.http.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        server.http.shutdown()
        server.http.server_close()


def _handler(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            """Nothing is logged."""

        def do_GET(self) -> None:
            if self.path == "/":
                self.send(200, "text/html; charset=utf-8", PAGE.read_bytes())
            elif self.path != "/v1/models":
                self.send(404, "text/plain", b"")
            elif self.may():
                self.send_json(200, {"object": "list", "data": [server.model]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self.may():
                return
            server.requests.append(body)
            reply = server.replies[body["messages"][-1]["content"]]
            if reply.status >= 400:
                self.send_json(reply.status, {"error": {"message": reply.error}})
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            if reply.closes:  # more than will come, so that the client sees a broken connection
                self.send_header("Content-Length", str(10**9))
            self.end_headers()
            try:
                for event in _events(reply, body):
                    self.wfile.write(f"data: {event}\n\n".encode())
                    self.wfile.flush()
            except OSError:
                server.left.set()

        def may(self) -> bool:
            if server.key is None or self.headers["Authorization"] == f"Bearer {server.key}":
                return True
            self.send_json(401, {"error": {"message": "api_key: expected the server's key, got another one or none"}})
            return False

        def send_json(self, status: int, body: dict[str, Any]) -> None:
            self.send(status, "application/json", json.dumps(body).encode())

        def send(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            for name, value in [("Content-Type", kind), ("Content-Length", len(body))]:
                self.send_header(name, str(value))
            self.send_header("Content-Security-Policy", POLICY)
            self.end_headers()
            self.wfile.write(body)

    return Handler


def _events(reply: Reply, body: dict[str, Any]) -> Iterator[str]:
    steps = reply.steps
    if body.get("tree") == "plain":
        steps = [[token] for step in steps for token in step]
    for number, step in enumerate(steps):
        time.sleep(reply.delay)
        yield _chunk("".join(step), number, len(step), None)
    if reply.closes:
        return
    if reply.error is not None:
        yield json.dumps({"error": {"message": reply.error}})
    else:
        yield _chunk("", len(steps), 1, reply.finish)  # a step that adds only the end token
    yield "[DONE]"


def _chunk(text: str, step: int, tokens: int, finish: str | None) -> str:
    delta = {"content": text} if step else {"role": "assistant", "content": text}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    choice["medusa"] = {"step": step, "tokens": tokens}
    return json.dumps({"object": "chat.completion.chunk", "choices": [choice]})
