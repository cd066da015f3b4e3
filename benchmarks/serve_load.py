"""Servers of the embedded model in processes of their own, and clients that load them; for `bench_serve`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.ablations.setup import NEW
from medusa_decoding.demo import CHECKPOINT

START_SECONDS = 120.0
"""Seconds within which a server must answer."""

MEDUSA = [sys.executable, "-m", "medusa_decoding", "serve", "--device", "cpu", "--dtype", "float32"]
TRANSFORMERS = [
    *(sys.executable, "-c", "from transformers.cli.transformers import main; main()", "serve"),
    *("--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1"),
]  # fmt: skip
# By default it allocates most of the memory, which takes a minute on a CPU.
BATCHING = ["--continuous-batching", "--cb-block-size", "32", "--cb-num-blocks", "256", "--cb-max-batch-tokens", "512"]
SERVERS = {
    "medusa": [*MEDUSA, "--tree", "auto"],
    "plain": [*MEDUSA, "--tree", "root"],
    "transformers": TRANSFORMERS,
    "transformers, continuous batching": [*TRANSFORMERS, *BATCHING],
}


class Server:
    """A server in a process of its own.

    Args:
        name: its key in `SERVERS`.
        threads: of its model.
        clients: the most that it will have.
        folder: for its log.
        checkpoint: folder with `base` and `heads`.

    Attributes:
        url: of its API.
        model: its name of the model.
        command: that started it.
    """

    def __init__(self, name: str, threads: int, clients: int, folder: Path, checkpoint: Path = CHECKPOINT) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.name, self.url, self.log = name, f"http://127.0.0.1:{port}", folder / f"{port}.log"
        ours = SERVERS[name][1:2] == MEDUSA[1:2]
        self.model = "served" if ours else str(checkpoint / "base")
        own = [self.model]
        if ours:
            own = ["--model", str(checkpoint / "heads"), "--served-model-name", self.model]
            own += ["--slots", str(clients), "--queue", str(clients), "--context", "1024"]
        self.command = [*SERVERS[name], *own, "--port", str(port)]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(self.command, stdout=log, stderr=log, env=environment)

    def wait(self) -> None:
        """Wait until it answers; raise `RuntimeError` with the end of its log if it does not."""
        import httpx

        deadline = time.monotonic() + START_SECONDS
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", trust_env=False).status_code == 200:
                    return
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{self.name}: expected a server within {START_SECONDS:.0f} s, got\n{self.tail()}")
            time.sleep(0.1)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Let it run within the block, and stop it again."""
        self._process.send_signal(signal.SIGCONT)
        yield
        self._process.send_signal(signal.SIGSTOP)

    def close(self) -> None:
        """End it."""
        for kind in (signal.SIGCONT, signal.SIGTERM):
            self._process.send_signal(kind)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def tail(self) -> str:
        """Return the end of its log."""
        return self.log.read_text(errors="replace")[-2000:]


@dataclass
class Answer:
    """One answer as a client saw it.

    Attributes:
        request: the question.
        began: when it was sent.
        arrived: when each part of the text came, and its characters.
        ended: when the answer was complete.
        text: all of it.
        tokens: that the server counted.
    """

    request: str
    began: float
    arrived: list[tuple[float, int]] = field(default_factory=list)
    ended: float = 0.0
    text: str = ""
    tokens: int = 0

    def share_before(self, end: float) -> float:
        """Return the share of its characters that came before a time."""
        return sum(size for when, size in self.arrived if when < end) / max(len(self.text), 1)


async def ask(http: Any, server: Server, request: str) -> Answer:
    """Send one request and read its answer."""
    answer = Answer(request, time.perf_counter())
    body = {
        "model": server.model, "messages": [{"role": "user", "content": request}], "temperature": 0,
        "max_tokens": NEW, "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    async with http.stream("POST", f"{server.url}/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{server.name}: {(await response.aread())[:500]!r}\n{server.tail()}")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            part = event["choices"][0]["delta"].get("content") if event["choices"] else None
            if part:
                answer.arrived.append((time.perf_counter(), len(part)))
                answer.text += part
            if event.get("usage"):
                answer.tokens = event["usage"]["completion_tokens"]
    answer.ended = time.perf_counter()
    return answer


async def load(server: Server, requests: Sequence[str], clients: int, seconds: float) -> tuple[float, list[Answer]]:
    """Load a server with closed-loop clients; return when the time was over, and all answers that began before."""
    import httpx

    waiting = itertools.cycle(requests)
    async with httpx.AsyncClient(timeout=600, trust_env=False) as http:
        end = time.perf_counter() + seconds

        async def client() -> list[Answer]:
            answers = []
            while time.perf_counter() < end:
                answers.append(await ask(http, server, next(waiting)))
            return answers

        return end, list(itertools.chain(*await asyncio.gather(*(client() for _ in range(clients)))))


@contextlib.contextmanager
def started(
    names: Sequence[str], threads: int, clients: int, checkpoint: Path = CHECKPOINT
) -> Iterator[dict[str, Server]]:
    """Start servers of a folder with `base` and `heads`, and end them after the block."""
    servers: dict[str, Server] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for name in names:
                servers[name] = Server(name, threads, clients, Path(folder), checkpoint)
            yield servers
        finally:
            for server in servers.values():
                server.close()
