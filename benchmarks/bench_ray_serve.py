"""Replicas on Ray Serve: what the proxy costs against the bare server, and what a killed replica costs.

Both servers have the embedded model on a CPU, one thread per replica, and are measured in turns. Then one of two
replicas is killed (SIGKILL) under load, some times over. The record counts how requests ended, by when they began.

    python -m benchmarks.bench_ray_serve
    python -m benchmarks.bench_ray_serve --rounds 0 --preload
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import itertools
import json
import os
import signal
import socket
import tempfile
import time
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.bench_serve import percentiles
from benchmarks.serve_load import Server

MIDDLEWARE = "medusa_decoding.serving.ray:proxy_middleware"
PRELOAD = "medusa_decoding.serving.http.app"
SLOTS, NEW, LOADERS, CPUS = 8, 100, 6, 6
ARGUMENTS = {"slots": SLOTS, "queue": SLOTS, "context": 1024, "dtype": "float32", "device": "cpu", "tree": "auto"}
QUESTION = "Write a class Job with name: str and priority: int that is sorted by priority."
HANG = 60.0  # seconds


async def ask(http: Any, url: str, new: int, stream: bool = False, name: str = "demo") -> dict[str, Any]:
    """Ask for exactly `new` tokens; return when it began, seconds to the first byte and the end, and how it ended."""
    import httpx

    message = {"role": "user", "content": QUESTION}
    body = {"model": name, "messages": [message], "max_tokens": new, "ignore_eos": True, "stream": stream}
    answer = {"began": time.perf_counter(), "first": 0.0, "stream": stream, "how": "hung"}
    try:
        async with http.stream("POST", f"{url}/v1/chat/completions", json=body) as response:
            text = ""
            async for part in response.aiter_text():
                answer["first"] = answer["first"] or time.perf_counter() - answer["began"]
                text += part
        answer["how"] = form(response.status_code, response.headers.get("content-type", ""), text, stream)
    except httpx.HTTPError as error:
        if not isinstance(error, httpx.TimeoutException):
            answer["how"] = type(error).__name__
    return answer | {"seconds": time.perf_counter() - answer["began"]}


async def round_of(url: str, name: str) -> dict[str, list[float]]:
    """Measure one server once; return seconds by what was measured."""
    import httpx

    async with httpx.AsyncClient(timeout=HANG, trust_env=False) as http:

        async def health() -> float:
            began = time.perf_counter()
            assert (await http.get(f"{url}/health")).status_code == 200
            return time.perf_counter() - began

        async def times(count: int, new: int, stream: bool = False) -> list[float]:
            answers = [await ask(http, url, new, stream, name) for _ in range(count)]
            assert all(answer["how"] == "complete" for answer in answers), answers
            return [answer["first" if stream else "seconds"] for answer in answers]

        await times(3, 4)
        found = {
            "health": [await health() for _ in range(60)], "1 token": await times(40, 1),
            "first event": await times(15, NEW, True), f"{NEW} tokens": await times(15, NEW),
        }  # fmt: skip
        clients = await asyncio.gather(*(times(5, NEW) for _ in range(SLOTS)))
        return {**found, f"{NEW} tokens, {SLOTS} clients": list(itertools.chain(*clients))}


def overhead(bare: Server, url: str, rounds: int) -> dict[str, Any]:
    """Measure both servers in turns; return percentiles of milliseconds, and the ratio of the proxy's to the bare."""
    taken = {name: collections.defaultdict(list) for name in ("ray", "bare")}
    for _ in range(rounds):
        with bare.running():
            for what, seconds in asyncio.run(round_of(bare.url, bare.model)).items():
                taken["bare"][what] += seconds
        for what, seconds in asyncio.run(round_of(url, "demo")).items():
            taken["ray"][what] += seconds
    found = {}
    for what in taken["bare"]:
        of = {name: percentiles([1000 * one for one in taken[name][what]], 50, 99) for name in taken}
        found[what] = {**of, "ratio": {name: of["ray"][name] / of["bare"][name] for name in of["ray"]}}
    return found


async def load(url: str, ended: asyncio.Event, log: list[dict[str, Any]]) -> None:
    """Send requests from several clients, every second one a stream; log when each began and how it ended."""
    import httpx

    async with httpx.AsyncClient(timeout=HANG, trust_env=False) as http:

        async def client(stream: bool) -> None:
            while not ended.is_set():
                log.append(await ask(http, url, NEW, stream))

        await asyncio.gather(*(client(bool(number % 2)) for number in range(LOADERS)))


def form(status: int, kind: str, text: str, stream: bool) -> str:
    """Return how a request ended, in words: "complete", or the exact form of its error."""
    last = text.rstrip().split("\n\n")[-2:] if stream and status == 200 else [text]
    error = next((part.removeprefix("data: ") for part in last if '"error"' in part), None)
    if status == 200 and error is None and (not stream or last[-1] == "data: [DONE]"):
        return "complete"
    if error is not None:
        where = f"status {status}" if status != 200 else "event of the stream"
        return f"{where}: error of code {json.loads(error)['error']['code']}"
    return f"status {status}, {kind}: {text[-60:]!r}"


async def kill_one(url: str) -> dict[str, Any]:
    """Kill a replica under load; return how requests ended and how long the cluster had one replica."""
    import ray
    from ray import serve

    ended, log = asyncio.Event(), []  # type: ignore[var-annotated]
    loading = asyncio.create_task(load(url, ended, log))
    await asyncio.sleep(4)
    before = replicas()
    victim = ray.get_actor(before[0], namespace="serve")
    os.kill(await victim.__ray_call__.remote(lambda _: os.getpid()), signal.SIGKILL)
    killed = time.perf_counter()
    while True:
        states = (await asyncio.to_thread(serve.status)).applications["medusa"].deployments["medusa"].replica_states
        if states == {"RUNNING": 2} and not set(await asyncio.to_thread(replicas)) <= set(before):
            break
        await asyncio.sleep(0.1)
    recovered = time.perf_counter() - killed
    await asyncio.sleep(2)
    ended.set()
    await loading
    parts: dict[str, list[dict[str, Any]]] = {"before": [], "in flight": [], "after": []}
    for request in log:
        over = request["began"] + request["seconds"] < killed
        parts["before" if over else "in flight" if request["began"] < killed else "after"].append(request)
    return {
        "recovery_seconds": recovered,
        "slowest_begun_after_seconds": max(request["seconds"] for request in parts["after"]),
        "requests": {
            name: dict(collections.Counter(("stream, " if one["stream"] else "plain, ") + one["how"] for one in part))
            for name, part in parts.items()
        },
    }  # fmt: skip


def replicas() -> list[str]:
    """Return the names of the replicas' actors."""
    import ray

    names = [actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)]
    return sorted(name for name in names if name.startswith("SERVE_REPLICA::"))


@contextlib.contextmanager
def cluster(preload: bool, forms: bool) -> Iterator[str]:
    """Start Ray and Serve's proxy in this process's environment; yield the address; end them after the block."""
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
    if forms:
        os.environ["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] = MIDDLEWARE
    if preload:
        os.environ |= {"RAY_preload_python_modules": PRELOAD}
    import ray
    from ray import serve

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    try:
        # Ray starts one idle worker per CPU, and never more than there are cores.
        with unittest.mock.patch("multiprocessing.cpu_count", return_value=CPUS if preload else os.cpu_count()):
            ray.init(
                "local", num_cpus=CPUS, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False
            )
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def main() -> None:
    """Measure, print the figures and append them to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of the overhead, per server (default: 3)")
    parser.add_argument("--kills", type=int, default=2, help="replicas to kill, one after the other (default: 2)")
    parser.add_argument("--preload", action="store_true", help="let Ray's idle workers import the server before")
    parser.add_argument("--serve-errors", action="store_true", help="leave out the middleware: Serve's own errors")
    args = parser.parse_args()
    figures: dict[str, Any] = {
        "rounds": args.rounds, "preload": args.preload, "middleware": not args.serve_errors, "arguments": ARGUMENTS,
        "clients_of_kills": LOADERS, "cpus": os.cpu_count(),
    }  # fmt: skip
    with cluster(args.preload, not args.serve_errors) as url:
        from ray import serve

        from medusa_decoding.serving.launch import ServerArguments
        from medusa_decoding.serving.ray import deployment

        replica = deployment(ServerArguments.check(ARGUMENTS))
        if args.rounds:
            serve.run(replica.bind(ARGUMENTS), name="medusa")
            with (
                tempfile.TemporaryDirectory() as folder,
                contextlib.closing(Server("medusa", 1, SLOTS, Path(folder))) as bare,
            ):
                bare.wait()
                figures["milliseconds"] = overhead(bare, url, args.rounds)
        serve.run(replica.options(num_replicas=2).bind(ARGUMENTS), name="medusa")
        figures["kills"] = [asyncio.run(kill_one(url)) for _ in range(args.kills)]
    print(json.dumps(figures, indent=1))
    print(harness.write_record("ray-serve", figures))


if __name__ == "__main__":
    main()
