"""A live HTTP server in a thread, and an engine whose answers a test has written down."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import openai
import uvicorn

from medusa_decoding.serving.engine import EngineStats
from medusa_decoding.serving.http.app import create_app
from medusa_decoding.serving.http.connections import OPTIONS
from medusa_decoding.serving.http.settings import Settings
from medusa_decoding.serving.ticket import Delta, Ticket, TokenLogprobs


class Live:
    """A running server: its address, and clients for it."""

    def __init__(self, port: int, key: str) -> None:
        self.port, self.url, self._key = port, f"http://127.0.0.1:{port}", key
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60)

    def asynchronous(self) -> openai.AsyncOpenAI:
        """Return an asynchronous client."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=self._key, max_retries=0, timeout=60)


@contextlib.contextmanager
def live(engine: Any, encoder: Any, *, key: str = "none", **settings: Any) -> Iterator[Live]:
    """Serve on a free port until the block ends."""
    app = create_app(engine, encoder, Settings(model="demo", **settings))
    config = uvicorn.Config(app, log_level="critical", timeout_graceful_shutdown=2, **OPTIONS)
    server = uvicorn.Server(config)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        wait_for(lambda: server.started)
        try:
            yield Live(listener.getsockname()[1], key)
        finally:
            server.should_exit = True
            thread.join(20)


def wait_for(condition: Any, seconds: float = 20.0) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not happened"
        time.sleep(0.01)


class ScriptedEngine:
    """Answers every request with the same steps; `hold` lets each step wait until a test releases it."""

    running = True

    def __init__(self, model: Any, steps: list[list[int]], finish: str = "stop", hold: bool = False) -> None:
        self.model, self.steps, self.finish, self.context = model, steps, finish, 1024
        self.release = threading.Semaphore(0 if hold else 10**6)
        self.tickets: list[Ticket] = []
        self.asked: list[dict[str, Any]] = []

    def submit(self, prompt: list[int], deliver: Any, *, n: int = 1, **asked: Any) -> list[Ticket]:
        """Start a thread that delivers the steps."""
        self.asked.append({"prompt": prompt, "n": n, **asked})
        tickets = [Ticket(prompt, lambda delta, index=index: deliver(index, delta)) for index in range(n)]
        self.tickets += tickets
        for ticket in tickets:
            told = asked.get("logprobs") is not None
            threading.Thread(target=self._run, args=(ticket, told), daemon=True).start()
        return tickets

    def _run(self, ticket: Ticket, told: bool) -> None:
        for number, tokens in enumerate(self.steps):
            while not self.release.acquire(timeout=0.02):
                if ticket.cancelled:
                    break
            if ticket.cancelled:
                ticket.deliver(Delta([], "cancelled"))
                return
            if number:
                ticket.accepted.append(len(tokens) - 1)
            last = number == len(self.steps) - 1
            error = RuntimeError("secret words") if last and self.finish == "error" else None
            logprobs = [TokenLogprobs(-0.5, [(token, -0.5), (3, -1.0)]) for token in tokens] if told else None
            finish: Any = self.finish if last else None
            ticket.deliver(Delta([] if error else tokens, finish, logprobs, error))

    def stats(self) -> EngineStats:
        """Return figures."""
        return EngineStats(slots=8, accepted_histogram={0: 3, 2: 5}, tree_nodes={1: 2, 16: 6}, finished={"stop": 1})
