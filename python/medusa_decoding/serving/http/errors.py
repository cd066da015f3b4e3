"""Errors in OpenAI's form: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from medusa_decoding.checks import shown
from medusa_decoding.serving.http.protocol import NEUTRAL, ChatRequest, CompletionRequest
from medusa_decoding.serving.ticket import EngineClosedError, QueueFullError

logger = logging.getLogger(__name__)
_FIELDS = {*ChatRequest.model_fields, *CompletionRequest.model_fields}
_SUPPORTED = "expected a field that this server supports, got one that it does not"


class ErrorBody(BaseModel):
    """What an error says."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    """The body of every response with a status from 400."""

    error: ErrorBody


class ApiError(Exception):
    """A request that fails: the message for the client, and the response's status."""

    def __init__(
        self,
        message: str,
        status: int = 400,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code, self.headers = status, param, code, dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The JSON that the client receives."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": _clean(str(self)), "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        """The whole response."""
        return JSONResponse(self.body, self.status, self.headers)


def as_api_error(error: BaseException) -> ApiError:
    """Return the error that a client gets for an exception; an unexpected one is logged, and its words are not sent."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        retry = {"Retry-After": "1"}
        return ApiError(str(error), 429, code="rate_limit_exceeded", headers=retry)
    if isinstance(error, EngineClosedError):
        return shutting_down()
    logger.error("the request failed", exc_info=error)
    return ApiError("the server failed to answer this request; its log has the reason", 500, code="internal_error")


def shutting_down() -> ApiError:
    """Return what clients receive while the server shuts down: another one may answer soon."""
    headers = {"Retry-After": "5", "Connection": "close"}
    return ApiError("the server is shutting down", 503, code="shutting_down", headers=headers)


def bad_request(error: ValueError) -> ApiError:
    """Return the error that a client gets if the engine or a grammar refuses its request."""
    name = str(error).partition(":")[0]
    return ApiError(str(error), param=name if name in _FIELDS else None, code="invalid_value")


def install(app: FastAPI, failed: Any) -> None:
    """Make an application answer every exception in OpenAI's form; `failed(request, error)` is called for each."""

    async def answer(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, RequestValidationError):
            shown_error = _validation_error(error)
        elif isinstance(error, HTTPException):
            shown_error = _http_error(request, error)
        else:
            shown_error = as_api_error(error)
        failed(request, shown_error)
        return shown_error.response

    for kind in (ApiError, QueueFullError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)


def _http_error(request: Request, error: HTTPException) -> ApiError:
    where = f"{request.method} {request.url.path}"
    messages = {404: f"{where}: expected a path that this server has, got another one", 405: f"{where}: expected "
                f"another method, got {request.method}"}  # fmt: skip
    codes = {400: "invalid_json", 404: "unknown_url", 405: "method_not_allowed"}
    message = messages.get(error.status_code, f"body: expected JSON, got other text ({error.detail})")
    return ApiError(message, error.status_code, code=codes.get(error.status_code), headers=error.headers)


def _validation_error(error: RequestValidationError) -> ApiError:
    """Name the field that is wrong; a union has errors of each member, of which one fits the value best."""
    if not isinstance(error.body, dict):
        return ApiError("body: send a JSON object (Content-Type: application/json)", code="invalid_json")
    problems = error.errors()
    places = [_place(problem["loc"][1:], error.body) for problem in problems]

    def fit(number: int) -> tuple[bool, int, int]:
        _, depth, item = places[number]
        return not problems[number]["type"].endswith("_type"), depth, item

    best = max(range(len(problems)), key=fit)
    return _problem(places[best][0], problems[best])


def _problem(param: str, problem: Mapping[str, Any]) -> ApiError:
    kind = problem["type"]
    if kind == "extra_forbidden":
        if values := " or ".join(map(json.dumps, NEUTRAL.get(param, ()))):
            message = f"{param}: expected {values}, the only value that this server supports, got "
            return ApiError(message + shown(problem["input"]), param=param, code="unsupported_value")
        return ApiError(f"{param}: {_SUPPORTED}", param=param, code="unsupported_parameter")
    if kind == "missing":
        return ApiError(f"{param}: the value is missing", param=param, code="missing_required_parameter")
    reason = re.sub(r"^\w+ should (be|have|match) | after validation.*", "", problem["msg"])
    message = f"{param}: expected {reason}, got {shown(problem['input'])}"
    return ApiError(message, param=param, code="invalid_type" if kind.endswith("_type") else "invalid_value")


def _place(loc: Sequence[int | str], body: Any) -> tuple[str, int, int]:
    """Return a place in the body, such as "tools[0].type", its depth, and its last index of a list.

    pydantic's own places also name members of unions.
    """
    path, depth, item = "", 0, 0
    for number, part in enumerate(loc):
        last = number == len(loc) - 1
        if isinstance(body, list) and isinstance(part, int) and part < len(body):
            path, body, depth, item = f"{path}[{part}]", body[part], depth + 1, part
        elif isinstance(body, dict) and isinstance(part, str) and (part in body or last):
            path, body, depth = f"{path}.{part}" if path else part, body.get(part), depth + 1
    return path or "body", depth, item


def _clean(text: str) -> str:
    """Return a message without lone surrogates and control characters, which JSON bodies may put into names."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]", lambda found: ascii(found[0])[1:-1], text)
