"""Replicas of the server on Ray Serve: `serve run medusa_decoding.serving.ray:build slots=8`.

Importing this module does not import torch: Serve's proxy imports it too, for `proxy_middleware`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from medusa_decoding.checks import import_library
from medusa_decoding.serving.launch import ServerArguments, check_libraries, launch

import_library("ray.serve", "replicas on Ray", extra="serve,ray")
import ray  # noqa: E402
from ray import serve  # noqa: E402
from ray.serve.metrics import Gauge  # noqa: E402

if TYPE_CHECKING:
    from starlette.middleware import Middleware
    from starlette.types import ASGIApp, Message, Receive, Scope, Send


@serve.ingress()
class Replica:
    """One server in a process of its own.

    Args:
        arguments: of `ServerArguments`, which are checked here again, because the model may be on this machine only.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._open = contextlib.ExitStack()
        self._app, self._engine = self._open.enter_context(launch(ServerArguments.check(arguments)))
        self._gauges: dict[str, Gauge] = {}

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application, which Serve asks for after `__init__`."""
        return self._app

    def check_health(self) -> None:
        """Raise if the engine has ended, so that Serve starts another replica; also send the metrics to Ray.

        Every sample of `/metrics` becomes a gauge in Ray, which adds the replica as a label. A colon becomes "_".
        """
        if not self._engine.running:
            raise RuntimeError("engine: expected a running one, got one that has ended; the log has the reason")
        from prometheus_client.parser import text_string_to_metric_families

        text, _ = self._app.state.metrics.text("")
        for family in text_string_to_metric_families(text.decode()):
            for sample in family.samples:
                name = sample.name.replace(":", "_")  # Ray drops names with a colon
                if name not in self._gauges:
                    labels: Any = tuple(sample.labels)
                    self._gauges[name] = Gauge(name, family.documentation, tag_keys=labels)
                self._gauges[name].set(sample.value, tags=sample.labels)

    def __del__(self) -> None:
        """End the engine. Serve calls this once the accepted requests have their answers."""
        self._open.close()


def build(args: Mapping[str, Any]) -> serve.Application:
    """Return the application of `serve run` and of a configuration file.

    Args:
        args: see `ServerArguments`.

    Raises:
        ValueError: a wrong or unknown argument; names it.
    """
    check_libraries("replicas on Ray")
    arguments = ServerArguments.check(args)
    if arguments.api_key is not None:
        arguments.key()
    return deployment(arguments).bind(dict(args))


def deployment(arguments: ServerArguments) -> serve.Deployment:
    """Return the deployment of replicas; a configuration file can set each of its options again.

    A replica takes as many requests as its engine can run and queue. It gets one GPU if this process is connected to a
    cluster that has any, unless `device` is "cpu".
    """
    gpus = int(arguments.device != "cpu" and ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0)
    make = serve.deployment(
        name="medusa", max_ongoing_requests=arguments.slots + arguments.queue, health_check_period_s=1,
        health_check_timeout_s=10, graceful_shutdown_timeout_s=30, ray_actor_options={"num_gpus": gpus},
    )  # fmt: skip
    return make(Replica)


def proxy_middleware() -> list[Middleware]:
    """Return what Serve's proxy puts around requests: errors in OpenAI's form.

    The proxy loads it if the variable RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names this function when Ray starts.
    """
    from starlette.middleware import Middleware

    return [Middleware(OpenAIErrors)]


class OpenAIErrors:
    """Gives errors of the proxy itself OpenAI's form: a replica that has ended, a full queue, an unknown path.

    Without it, they are plain text, and a stream ends without a last event. Answers of a replica pass unchanged.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and what comes back."""
        if scope["type"] != "http" or scope["path"].startswith("/-/"):
            await self._app(scope, receive, send)
            return
        from starlette.datastructures import MutableHeaders

        kind, status, refusal, ended = "", 0, None, False

        async def pass_on(message: Message) -> None:
            nonlocal kind, status, refusal, ended
            if message["type"] == "http.response.start":
                status, kind = message["status"], MutableHeaders(scope=message).get("content-type", "")
                if status >= 400 and kind.startswith("text/plain"):
                    refusal = message
                    return
            elif refusal is not None:
                body = _error(message.get("body", b"").decode(errors="replace"), status)
                headers = MutableHeaders(scope=refusal)
                headers["content-type"], headers["content-length"] = "application/json", str(len(body))
                await send(refusal)
                message = {"type": "http.response.body", "body": body}
            ended = not message.get("more_body", False) and message["type"] == "http.response.body"
            await send(message)

        await self._app(scope, receive, pass_on)
        if ended or status == 499:
            return
        body = _error("the replica that was writing this answer has ended; try again", 503)
        if not status:
            headers = [(b"content-type", b"application/json"), (b"retry-after", b"1")]
            await send({"type": "http.response.start", "status": 503, "headers": headers})
            await send({"type": "http.response.body", "body": body})
        elif kind.startswith("text/event-stream"):
            await send({"type": "http.response.body", "body": b"data: " + body + b"\n\ndata: [DONE]\n\n"})


def _error(message: str, status: int) -> bytes:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    code = {404: "unknown_url", 408: "request_timeout", 503: "unavailable"}.get(status)
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()
