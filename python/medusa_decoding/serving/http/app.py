"""The application: routes, how they answer, and the page."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Security
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from fastapi.security import HTTPBearer
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.types import Receive, Scope, Send

from medusa_decoding.chat.template import PromptEncoder
from medusa_decoding.serving.engine import Engine
from medusa_decoding.serving.http import responses
from medusa_decoding.serving.http.answers import Answers, ClientGoneError, timeout_error, wait_for_disconnect
from medusa_decoding.serving.http.errors import ApiError, ErrorResponse, as_api_error, install, shutting_down
from medusa_decoding.serving.http.events import DONE, ChatForm, CompletionForm, event
from medusa_decoding.serving.http.guard import Guard, path_of
from medusa_decoding.serving.http.metrics import Metrics, outcome
from medusa_decoding.serving.http.page import page
from medusa_decoding.serving.http.plan import Plan, Planner
from medusa_decoding.serving.http.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    StreamOptions,
    TokenizeRequest,
)
from medusa_decoding.serving.http.settings import Settings
from medusa_decoding.serving.http.token_text import TokenBytes
from medusa_decoding.serving.http.tools import offered
from medusa_decoding.trees.tree import Tree

_REASONS = {
    400: "The request is not valid; the error names the field.", 401: "The API key is missing or wrong.",
    403: "The Host header names another server.", 404: "There is no such model or path.",
    405: "The path has no such method.", 408: "The body did not arrive in time.", 413: "The body is too large.",
    415: "The body's type is not JSON.",
    429: "The queue is full; Retry-After says when to try again.", 500: "The server failed.",
    503: "The server is shutting down.", 504: "The request took longer than the server allows.",
}  # fmt: skip
_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": words} for status, words in _REASONS.items()
}
_CHAT_CHUNK, _TEXT_CHUNK = responses.ChatCompletionChunk, responses.TextCompletionChunk
_REFERENCE = "#/components/schemas/{model}"


def _streamed(whole: type[BaseModel], chunk: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    words = "The answer; with stream: true, events with such data that end in `data: [DONE]`."
    events = {"schema": {"$ref": _REFERENCE.format(model=chunk.__name__)}}
    return {200: {"description": words, "model": whole, "content": {"text/event-stream": events}}}


def _answered(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """Describe a response that FastAPI need not validate."""
    return {200: {"description": "The answer.", "model": model}}


def create_app(engine: Engine, encoder: PromptEncoder, settings: Settings | None = None) -> FastAPI:
    """Return the HTTP server of an engine that runs, as an ASGI application.

    Args:
        engine: started and closed by the caller.
        encoder: encodes prompts; chat completions need a `ChatTemplate`.
        settings: see `Settings`.
    """
    settings = settings or Settings()
    app = FastAPI(title="medusa serve", docs_url=None, redoc_url=None)
    server = Server(engine, encoder, settings)
    app.state.metrics = server.metrics
    app.include_router(server.routes())
    install(app, lambda request, error: server.metrics.count(path_of(request.scope), outcome(error.status)))
    app.add_middleware(Guard, settings=settings)
    if settings.allow_origin is not None:
        app.add_middleware(
            CORSMiddleware, allow_origins=[settings.allow_origin], allow_methods=["*"], allow_headers=["*"]
        )
    _complete_schema(app)
    return app


class Server:
    """Answers requests by an engine."""

    def __init__(self, engine: Engine, encoder: PromptEncoder, settings: Settings) -> None:
        self._engine, self._settings, self._tokenizer = engine, settings, encoder.tokenizer
        self._planner, self._token_bytes = Planner(engine, encoder, settings), TokenBytes(encoder.tokenizer)
        self._schemas = ThreadPoolExecutor(1, "medusa-schemas")
        self._started = int(time.time())
        choice = engine.model.tree_choice()
        self._plain = choice.tree == Tree([]) and not choice.copies
        self.metrics = Metrics(engine, settings.model)

    def routes(self) -> APIRouter:
        """Return the routes."""
        bearer = [] if self._settings.api_key is None else [Security(HTTPBearer(auto_error=False))]
        plain, v1 = APIRouter(), APIRouter(prefix="/v1", dependencies=bearer, responses=_ERRORS)
        tokens = APIRouter(dependencies=bearer, responses=_ERRORS)
        for router, method, path, endpoint, described in (
            (v1, "POST", "/chat/completions", self.chat, _streamed(responses.ChatCompletion, _CHAT_CHUNK)),
            (v1, "POST", "/completions", self.complete, _streamed(responses.TextCompletion, _TEXT_CHUNK)),
            (v1, "GET", "/models", self.models, _answered(responses.ModelList)),
            (v1, "GET", "/models/{model:path}", self.model, _answered(responses.Model)),
            (tokens, "POST", "/tokenize", self.tokenize, _answered(responses.Tokens)),
            (tokens, "POST", "/detokenize", self.detokenize, _answered(responses.Detokenized)),
        ):
            router.add_api_route(path, endpoint, methods=[method], responses=described, response_model=None)
        errors: dict[int | str, dict[str, Any]] = {status: _ERRORS[status] for status in (403, 405, 500, 503)}
        for path, endpoint in (
            ("/health", self.health), ("/ready", self.health), ("/ping", self.health), ("/live", self.live),
            ("/version", self.version), ("/load", self.load),
        ):  # fmt: skip
            plain.add_api_route(path, endpoint, methods=["GET"], responses=errors)
        plain.add_api_route(
            "/metrics", self.show_metrics, methods=["GET"], response_class=Response,
            responses={**errors, 200: {"content": {"text/plain": {}, "application/openmetrics-text": {}}}},
        )  # fmt: skip
        plain.add_api_route("/", self.page, methods=["GET"], include_in_schema=False)
        plain.include_router(v1)
        plain.include_router(tokens)
        return plain

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await self._answer(body, lambda: self._planner.chat(body), ChatForm, request)

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """Continue texts."""
        return await self._answer(body, lambda: self._planner.completion(body), CompletionForm, request)

    async def tokenize(self, body: TokenizeRequest) -> dict[str, Any]:
        """Return the tokens of a prompt or of messages, as vLLM does."""
        tokens = await asyncio.to_thread(self._planner.tokenize, body)
        strings = self._tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
        return {
            "tokens": tokens, "count": len(tokens), "max_model_len": self._engine.context, "token_strs": strings,
        }  # fmt: skip

    async def detokenize(self, body: DetokenizeRequest) -> dict[str, Any]:
        """Return the text of tokens, as vLLM does."""
        return {"prompt": await asyncio.to_thread(self._planner.detokenize, body)}

    async def models(self) -> dict[str, Any]:
        """List the served model."""
        return {"object": "list", "data": [self._model()]}

    async def model(self, model: str) -> dict[str, Any]:
        """Describe the served model."""
        if model != self._settings.model:
            raise ApiError("model: expected one of /v1/models, got another", 404, param="model", code="model_not_found")
        return self._model()

    async def health(self) -> dict[str, str]:
        """Tell whether requests are answered."""
        if not self._engine.running:
            raise shutting_down()
        return {"status": "ok"}

    async def live(self) -> dict[str, str]:
        """Tell whether the engine runs, also while it takes no more requests."""
        if not self._engine.alive:
            raise shutting_down()
        return {"status": "ok"}

    async def version(self) -> dict[str, str]:
        """Return the version of medusa-kernels."""
        return {"version": version("medusa-kernels")}

    async def load(self) -> dict[str, int]:
        """Return how many choices run or wait."""
        stats = self._engine.stats()
        return {"server_load": stats.running + stats.waiting}

    async def show_metrics(self, request: Request) -> Response:
        """Return metrics for Prometheus."""
        text, kind = self.metrics.text(request.headers.get("accept", ""))
        return Response(text, media_type=kind)

    async def page(self) -> Response:
        """Return the page to try the model."""
        return await asyncio.to_thread(page)

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._settings.model, "object": "model", "created": self._started, "owned_by": "medusa-kernels",
            "max_model_len": self._engine.context, "decoding": "plain" if self._plain else "medusa",
        }  # fmt: skip

    async def _answer(
        self, body: GenerationRequest, make_plan: Callable[[], Plan], form: type[ChatForm], request: Request
    ) -> Response:
        began, path, timeout = time.perf_counter(), path_of(request.scope), self._settings.request_timeout
        try:
            plan = await self._planned(body, make_plan, request.receive)
        except ClientGoneError:
            self.metrics.count(path, "cancelled")
            return Response(status_code=499)  # nobody reads it
        answers = Answers(
            self._engine, plan, self._tokenizer, self._token_bytes, self.metrics, timeout, request.receive, began
        )  # fmt: skip
        prompts = [prompt for prompt in plan.prompts for _ in range(plan.n)] if body.return_token_ids else []
        writer = form(self._settings.model, self._token_bytes, plan.logprobs is not None, prompts)
        await answers.start()
        if body.stream:
            options = body.stream_options or StreamOptions()
            return _Stream(answers, writer, options, lambda outcome: self.metrics.count(path, outcome))
        try:
            async for _ in answers.parts():
                pass
        except ClientGoneError:
            self.metrics.count(path, "cancelled")
            return Response(status_code=499)  # nobody reads it
        finally:
            answers.close()
        self.metrics.count(path, "completed")
        # In a thread: the scores of long prompts are many.
        return await asyncio.to_thread(lambda: JSONResponse(writer.response(answers.choices, answers.usage())))

    async def _planned(self, body: GenerationRequest, make_plan: Callable[[], Plan], receive: Receive) -> Plan:
        """Plan a request in a thread; raise `ApiError` after its time, and `ClientGoneError` if the client leaves."""
        # Templates may take seconds, and schemas so long that they must not keep other requests waiting.
        constrained = isinstance(body, ChatRequest) and (body.response_format or offered(body).constrained)
        pool, timeout = self._schemas if constrained else None, self._settings.request_timeout
        planning = asyncio.get_running_loop().run_in_executor(pool, make_plan)
        leaving = asyncio.create_task(wait_for_disconnect(receive))
        first: set[asyncio.Future[Any]] = {planning, leaving}
        try:
            await asyncio.wait(first, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if planning.done():
                return planning.result()
            raise ClientGoneError if timeout is None or leaving.done() else timeout_error(timeout)
        finally:
            leaving.cancel()
            planning.cancel()


class _Stream(Response):
    """Streams answers as server-sent events."""

    def __init__(
        self, answers: Answers, writer: ChatForm, options: StreamOptions, count: Callable[[str], None]
    ) -> None:
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(media_type="text/event-stream", headers=headers)
        del self.headers["content-length"]
        self._answers, self._writer, self._options, self._count = answers, writer, options, count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events; generations end when the client leaves."""

        async def write(body: bytes, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": more})

        usage = self._options.include_usage
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                async for part in self._answers.parts():
                    chunk = self._writer.chunk(part, bool(usage))
                    if self._options.continuous_usage_stats:
                        chunk["usage"] = self._answers.usage()
                    await write(event(chunk))
                if usage:
                    await write(event(self._writer.last(self._answers.usage())))
                self._count("completed")
            except (ClientGoneError, OSError):
                self._count("cancelled")
                return
            except Exception as error:
                shown = as_api_error(error)
                self._count(outcome(shown.status))
                await write(event(shown.body))
            await write(DONE, more=False)
        finally:
            self._answers.close()


def _complete_schema(app: FastAPI) -> None:
    """Add the chunks of streams to the schema, and take out FastAPI's validation error, which is never sent."""
    make = app.openapi
    chunks = models_json_schema(
        [(_CHAT_CHUNK, "serialization"), (_TEXT_CHUNK, "serialization")], ref_template=_REFERENCE
    )[1]

    def openapi() -> dict[str, Any]:
        schema = make()
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        schemas = schema["components"]["schemas"]
        schemas.update(chunks["$defs"])
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        return schema

    app.openapi = openapi  # type: ignore[method-assign]
