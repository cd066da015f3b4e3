"""Check requests before anything reads them: the Host header, the API key, and time, size and depth of the body."""

from __future__ import annotations

import asyncio
import hmac
import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from medusa_decoding.serving.http.errors import ApiError
from medusa_decoding.serving.http.settings import JSON_DEPTH, READ_SECONDS, Settings

OPEN = {"/", "/health", "/live", "/load", "/metrics", "/openapi.json", "/ping", "/ready", "/version"}
"""Paths without an API key; everything else needs it."""
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)  # to the end if unclosed: linear time
_ALIKE, _OTHERS = bytes.maketrans(b"{}", b"[]"), bytes(set(range(256)) - set(b"[]{}"))


def path_of(scope: Scope) -> str:
    """Return a request's path without the prefix that a proxy, such as Ray Serve's, has added."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


class Guard:
    """An ASGI application around another one, which receives only requests that pass, with their body in one piece."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app, self._settings = app, settings
        self._key = None if settings.api_key is None else settings.api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer or refuse a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            headers = Headers(scope=scope)
            self._check_host(headers, scope["http_version"])
            if path_of(scope) not in OPEN:
                self._check_key(headers)
                if scope["method"] == "POST":
                    _check_type(headers)
            body = await asyncio.wait_for(self._read(headers, receive), READ_SECONDS)
        except asyncio.TimeoutError:
            message = f"body: expected all of it within {READ_SECONDS:g} seconds, got a part"
            late = ApiError(message, 408, code="request_timeout", headers={"Connection": "close"})
            await late.response(scope, receive, send)
            return
        except ApiError as error:
            await error.response(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # the server drops the body
            scope = {**scope, "method": "GET"}
        await self._app(scope, _replay(body, receive), send)

    def _check_host(self, headers: Headers, version: str) -> None:
        hosts = self._settings.hosts
        if "host" not in headers and version == "1.0":  # not from a web page: browsers name the host
            return
        host = re.sub(r":\d*$", "", headers.get("host", "")).lower()
        if hosts is not None and host not in hosts:
            names = ", ".join(sorted(hosts))
            raise ApiError(f"Host: expected one of {names}, got another name", 403, code="host_not_allowed")

    def _check_key(self, headers: Headers) -> None:
        if self._key is None:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        # ASGI decodes headers as Latin-1: this returns the client's bytes.
        same = hmac.compare_digest(given.strip().encode("latin-1"), self._key)
        if scheme.lower() != "bearer" or not same:
            message = "Authorization: send Bearer and this server's API key"
            raise ApiError(message, 401, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        limit = self._settings.body_bytes
        too_large = ApiError(f"body: expected at most {limit:,} bytes, got more", 413, code="body_too_large")
        declared = headers.get("content-length", "0")
        if declared.isdecimal() and int(declared[:20]) > limit:
            raise too_large
        pieces, size, more = [], 0, True
        while more:
            message = await receive()
            piece = message.get("body", b"")
            size += len(piece)
            if size > limit:
                raise too_large
            pieces.append(piece)
            more = message.get("more_body", False)  # absent if the client has left
        body = b"".join(pieces)
        if _is_deeper(body, JSON_DEPTH):
            nested = f"body: expected at most {JSON_DEPTH} nested lists and objects, got more"
            raise ApiError(nested, code="invalid_json")
        return body


def _check_type(headers: Headers) -> None:
    """Refuse other types than JSON: browsers send those to other servers without asking these first."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError("Content-Type: expected application/json, got another or none", 415, code="unsupported_type")


def _is_deeper(body: bytes, most: int) -> bool:
    """Return whether a JSON text has more nested lists and objects; False if its brackets are not in pairs."""
    brackets = _STRING.sub(b"", body).translate(_ALIKE, _OTHERS)
    for _ in range(most):
        inner = len(brackets)
        brackets = brackets.replace(b"[]", b"")
        if len(brackets) == inner:
            return False
    return b"[]" in brackets


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that begins with a body that was read already."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replay() -> Message:
        return pending.pop() if pending else await receive()

    return replay
