"""Serve a model over HTTP, with OpenAI's API.

The server has /v1/chat/completions, /v1/completions, /v1/models, /ready and /live (for probes), /metrics (Prometheus,
also with vLLM's names) and, at /, a page to try the model. Any OpenAI client works with it: streaming, stop strings,
seeds, log-probabilities, JSON schemas, tools. A field that the server cannot obey is an error, and never ignored.

Answers are greedy unless a request says otherwise: a request without `temperature` gets --temperature (default: 0), and
not OpenAI's default of 1. Requests with `top_p`, `top_k` or `min_p` sample at temperature 1 if they give no other.
Beyond OpenAI's fields, requests take top_k, min_p, repetition_penalty, `tree` ("auto", "plain", or a list of paths such
as [[0], [1], [0, 0]]) and `acceptance` ("lossless", "typical").

The server listens on this machine only, unless --host says otherwise; then give it an API key. On this machine alone,
requests must name it in the Host header (127.0.0.1, localhost). Ctrl-C or SIGTERM ends the server: it refuses new
requests, and finishes those that it has accepted, for at most --drain-seconds.

    medusa serve
    medusa serve --model HEADS --dtype bfloat16 --device cuda --slots 16 --context 8192
    MEDUSA_API_KEY=secret medusa serve --model HEADS --host 0.0.0.0
    curl http://127.0.0.1:8000/v1/completions --json '{"model": "demo", "prompt": "def"}'
"""

from __future__ import annotations

import argparse

from medusa_decoding.cli import _arguments
from medusa_decoding.options import SLOTS

LOG_LEVELS = ("critical", "error", "warning", "info", "debug")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    option = _arguments.add_option
    _arguments.add_model(parser)
    _arguments.add_template(parser)
    words = "as in medusa generate, on a GPU without +lookup; requests may name others"
    option(parser, "--tree TREE", _arguments.tree, words)
    _arguments.add_backend(parser)
    _arguments.add_dtypes(parser)
    option(parser, "--host ADDRESS", str, "address to listen on; 0.0.0.0 for all networks", "127.0.0.1")
    option(parser, "--port N", port, "port to listen on; 0 for a free one", 8000)
    words = "key that requests must send as a bearer token (default: the variable MEDUSA_API_KEY, which other users of "
    option(parser, "--api-key KEY", _arguments.text, words + "this machine cannot see; without it there is no key)")
    option(parser, "--allow-origin ORIGIN", str, "let web pages of this origin use the server (CORS), * for all")
    option(parser, "--served-model-name NAME", _arguments.text, "the model's name in requests (default: HEADS)")
    option(parser, "--slots N", _arguments.at_least_one, "answers that are written at the same time", SLOTS)
    option(
        parser, "--context N", _arguments.at_least_one, "most tokens of a prompt with its answer (default: what fits)"
    )
    option(parser, "--queue N", _arguments.at_least_zero, "answers that may wait; more are refused (429)", 64)
    option(
        parser,
        "--max-new-tokens N",
        _arguments.at_least_one,
        "most tokens per answer (default: what the context leaves)",
    )
    words = "seconds until a request fails (504), its time in the queue included"
    option(parser, "--request-timeout S", _arguments.factor, words, 600)
    words = "seconds that running and waiting answers may still take after Ctrl-C or SIGTERM; a second one ends them"
    option(parser, "--drain-seconds S", _arguments.number("from 0", lambda value: value >= 0), words, 25)
    option(parser, "--temperature T", temperature, "of requests that give none; 0: greedy", 0.0)
    words = "how much the server logs (default: warning)"
    parser.add_argument("--log-level", choices=LOG_LEVELS, default="warning", help=words)


def port(text: str) -> int:
    """Parse a port."""
    number = _arguments.at_least_zero(text)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"expected at most 65535, got {number}")
    return number


temperature = _arguments.number("from 0 to 2", lambda value: 0 <= value <= 2)
