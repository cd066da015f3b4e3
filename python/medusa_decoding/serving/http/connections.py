"""Connections of the server: limits that uvicorn has no options for."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from medusa_decoding.serving.http.settings import READ_SECONDS

logger = logging.getLogger(__name__)

BACKLOG = 256
"""Connections that wait to be accepted. Without free file descriptors, asyncio tries as many times per second."""
REPORT_SECONDS = 60.0


class Connection(H11Protocol):
    """uvicorn's protocol, which also closes a connection whose request headers are not complete in time.

    It is the one on h11 even where httptools is installed, as by Ray: they refuse different requests.
    """

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Take what the client sends."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer."""
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def _watch(self) -> None:
        """Run the timer while no request is being answered; between requests, from the next one's first byte on."""
        if self.cycle is not None and not self.cycle.response_complete:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        elif self._timer is None:
            self._timer = self.loop.call_later(READ_SECONDS, self.transport.close)


OPTIONS: Any = {"http": Connection, "loop": "asyncio", "ws": "none", "lifespan": "off"}
"""Of `uvicorn.Config`: the same whatever uvicorn finds installed."""


def report_rarely(loop: asyncio.AbstractEventLoop) -> None:
    """Log once per minute that no connection can be accepted. asyncio itself logs a traceback for each attempt."""
    reported = float("-inf")

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal reported
        if not context["message"].startswith("socket.accept()"):
            loop.default_exception_handler(context)
        elif loop.time() - reported > REPORT_SECONDS:
            reported = loop.time()
            logger.warning("serve: new connections must wait (%s); see ulimit -n", context["exception"])

    loop.set_exception_handler(handle)
