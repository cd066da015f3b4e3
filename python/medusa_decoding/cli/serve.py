"""Run `medusa serve`: see `cli.parsers.serve` for its arguments."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import logging
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

from medusa_decoding.cli import drop_output
from medusa_decoding.serving.launch import ServerArguments, check_libraries, launch

if TYPE_CHECKING:
    import uvicorn

    from medusa_decoding.serving.engine import Engine

logger = logging.getLogger(__name__)


def run(args: argparse.Namespace) -> int:
    """Load the model, and serve it until Ctrl-C."""
    check_libraries("medusa serve")
    arguments = arguments_of(args)
    listener = listen(args.host, args.port)  # a port in use is an error before the model is loaded
    with listener, launch(arguments, hosts_of(args.host)) as (app, engine):
        words = ready_line(engine, arguments.name(), f"http://{url_host(args.host)}:{listener.getsockname()[1]}/")
        server(app, args, engine, lambda: announce(words)).run(sockets=[listener])
    return 0


def arguments_of(args: argparse.Namespace) -> ServerArguments:
    """Return the checked arguments of the server, and warn if everyone may use it."""
    arguments = ServerArguments.check({name: getattr(args, name) for name in ServerArguments.model_fields})
    if arguments.key() is None and not is_loopback(args.host):
        print(f"medusa: --host {args.host}: everyone who reaches it can use it (--api-key sets a key)", file=sys.stderr)
    return arguments


def hosts_of(host: str) -> frozenset[str] | None:
    """Return the Host headers that are served: only this machine's names if it listens on this machine alone."""
    return frozenset({"localhost", "127.0.0.1", "[::1]", url_host(host)}) if is_loopback(host) else None


def is_loopback(host: str) -> bool:
    """Return whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def url_host(host: str) -> str:
    """Return an address as URLs write it."""
    return f"[{host}]" if ":" in host else host.lower()


def listen(host: str, port: int) -> socket.socket:
    """Open the server's socket; raise `ValueError` if that is impossible."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ValueError(f"--host, --port: expected a free address, got {host}:{port} ({error.strerror})") from error
    return listener


def ready_line(engine: Engine, name: str, url: str) -> str:
    """Return what is printed once requests are served."""
    model, taken = engine.model, engine.memory.total / 2**20
    placed = f"{str(model.backbone.dtype).removeprefix('torch.')} on {model.backbone.device}"
    return (
        f"serving {name} ({placed}) at {url}v1: {engine.stats().slots} slots of {engine.context:,} tokens, "
        f"{taken:,.0f} MiB for their cache; page at {url}"
    )


def announce(words: str) -> None:
    """Print the ready line; a full disk or a reader that has left must not end the server."""
    try:
        print(words, flush=True)
    except OSError as error:
        logger.warning("serve: the ready line could not be printed (%s): %s", error.strerror, words)
        drop_output()


def server(app: Any, args: argparse.Namespace, engine: Engine, ready: Callable[[], None]) -> uvicorn.Server:
    """Return the HTTP server, which calls `ready` when it listens.

    The first signal stops it: it refuses new requests and finishes those that were accepted, for at most
    --drain-seconds. A second signal ends these too.
    """
    import uvicorn

    from medusa_decoding.serving.http.connections import BACKLOG, OPTIONS, report_rarely

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            report_rarely(asyncio.get_running_loop())
            await super().startup(sockets)
            ready()

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            # Clients and load balancers are still answered meanwhile, with 503.
            await asyncio.to_thread(engine.close, args.drain_seconds)
            await super().shutdown(sockets)

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if self.should_exit:
                threading.Thread(target=engine.close).start()  # a signal handler must not wait for it
            super().handle_exit(sig, frame)
            self.force_exit = False  # answers end with an error of their own, and not with a broken connection

    config = uvicorn.Config(
        app, backlog=BACKLOG, log_level=args.log_level, timeout_graceful_shutdown=5, server_header=False, **OPTIONS
    )  # fmt: skip
    return Server(config)
