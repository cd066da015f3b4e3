"""What an operator decides about a server."""

from __future__ import annotations

from dataclasses import dataclass

BODY_BYTES = 2**20
JSON_DEPTH = 64
MESSAGES, PROMPTS, CHOICES, TOOLS = 1024, 128, 16, 128
"""Most messages, prompts, choices per prompt and tools of one request."""
SCORES = 2**20
"""Most log-probabilities of prompts in one answer."""
STOPS, STOP_CHARACTERS = 64, 256
BIASES = 1024
READ_SECONDS = 20.0
"""How long a client may take to send the headers of a request, and then its body."""


@dataclass(frozen=True)
class Settings:
    """Settings of the HTTP server.

    Attributes:
        model: the name that requests give.
        api_key: the bearer token of requests (not to the page, health, metrics and schema); None lets everyone in.
        max_new_tokens: most tokens of an answer, whatever it asks for, and the default; None: what the context leaves.
        temperature: of requests that give none; 0 decodes greedily. (OpenAI's default of 1 is not assumed.)
        request_timeout: seconds after which a request fails with status 504, time in the queue included; None: never.
        body_bytes: largest body of a request.
        hosts: values of the Host header that are served, without the port; None serves all. A server on a loopback
            address lists its own names, so that a web page cannot reach it through a name that its author controls.
        allow_origin: an origin whose web pages may use the server (CORS), "*" for all; None for none.
    """

    model: str = "medusa"
    api_key: str | None = None
    max_new_tokens: int | None = None
    temperature: float = 0.0
    request_timeout: float | None = 600.0
    body_bytes: int = BODY_BYTES
    hosts: frozenset[str] | None = None
    allow_origin: str | None = None
