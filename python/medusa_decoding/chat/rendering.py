"""Render chat templates within bounds of time and size.

A chat template is a program that comes with a checkpoint. jinja2's sandbox protects files and Python's internals, but
not from endless loops or from filling memory. Here every loop iteration, call and filter checks the clock, and every
operation that makes text or lists longer checks their length. Otherwise the sandbox is that of transformers.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import SandboxedFormatter
from jinja2.visitor import NodeTransformer
from transformers.utils.chat_template_utils import _compile_jinja_template

SECONDS = 5.0
"""CPU time that one rendering may take."""
CHARACTERS = 2**24
"""Longest rendered text, and longest intermediate text."""
ENTRIES = 10**5
"""Longest intermediate list, and largest number that `SIZED` calls and filters accept."""
SIZED = {"range", "safe_range", "center", "ljust", "rjust", "zfill", "expandtabs", "indent", "tojson", "batch", "slice"}
SIZED |= {"round", "to_bytes"}
"""Functions, methods and filters that make more, or take longer, the larger a number among their arguments is."""
BITS = 2**12
"""Largest size of intermediate whole numbers."""


class _LimitError(Exception):
    """The template exceeded a bound; says which."""


def render(
    template: Any, messages: Sequence[Mapping[str, Any]], /, **variables: Any
) -> tuple[str, list[tuple[int, int]]]:
    """Render messages (`role` and `content` each) by a chat template in Jinja, with further variables.

    Returns:
        The text, and where the template's `{% generation %}` blocks are in it: pairs of start and end.

    Raises:
        jinja2.TemplateError: the template refuses these messages, or fails on them.
        ValueError: it is no Jinja template, takes too long, makes too much text, or text that UTF-8 cannot encode.
    """
    if not isinstance(template, str):
        raise ValueError(f"chat template: expected text in Jinja, got {type(template).__name__}")
    spans: list[tuple[int, int]] = []
    pieces: list[str] = []
    names = {"tools": None, "documents": None, "add_generation_prompt": False, **variables}
    with _LOCK:  # the environment holds the clock and the spans of one rendering
        _CLOCK.start()
        try:
            compiled = _compiled(template)
            with compiled.environment.activate_tracker(pieces, spans):
                length = 0
                for piece in compiled.generate(messages=[dict(message) for message in messages], **names):
                    pieces.append(piece)
                    length += len(piece)
                    _check_length(length, CHARACTERS)
        except _LimitError as error:
            raise ValueError(f"chat template: expected one that {error}") from error
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template: expected Jinja, got {error.message} (line {error.lineno})") from error
        except jinja2.TemplateError:
            raise
        except Exception as error:  # a template is a program and may raise anything
            raise jinja2.TemplateRuntimeError(f"{type(error).__name__}: {error}") from error
    text = "".join(pieces)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"chat template: expected text that UTF-8 can write, got {error}") from error
    return text, spans


class _Clock:
    """Bounds the time of a rendering and the text that it writes."""

    def start(self) -> None:
        self._end, self._written = time.thread_time() + SECONDS, 0

    def tick(self) -> None:
        if time.thread_time() > self._end:
            raise _LimitError(f"renders within {SECONDS:g} seconds, got one that did not")

    def write(self, value: Any) -> str:
        """Count the output of an expression, to the rendered text or to a variable."""
        text = str(value)
        self._written += len(text)
        _check_length(self._written, 2 * CHARACTERS)
        return text


class _Ticking(NodeTransformer):
    """Makes every loop iteration and macro call check the clock, and every `~` the length."""

    def visit(self, node: nodes.Node, *arguments: Any, **named: Any) -> Any:
        node = super().visit(node, *arguments, **named)
        if isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock)):
            node.body.insert(0, nodes.ExprStmt(_call("tick", [], node.lineno), lineno=node.lineno))
        return _call("concatenated", node.nodes, node.lineno) if isinstance(node, nodes.Concat) else node


def _call(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    # No name in a template can hide an attribute of the environment.
    attribute = nodes.EnvironmentAttribute(name, lineno=line)
    return nodes.Call(attribute, arguments, [], None, None, lineno=line)


@functools.lru_cache(maxsize=64)
def _compiled(template: str) -> Any:
    environment = _environment()
    return environment.from_string(_Ticking().visit(environment.parse(template)))


@functools.cache
def _environment() -> Any:
    """Return transformers' environment for chat templates, with bounds."""
    # That of an empty template: transformers makes one environment per template, and compiling a template already
    # computes its constants.
    environment: Any = _compile_jinja_template("").environment
    environment.tick, environment.concatenated = _CLOCK.tick, _concatenated
    environment.intercepted_binops = frozenset(("+", "*", "**", "%"))
    environment.filters = {name: _bounded_filter(name, function) for name, function in environment.filters.items()}
    environment.globals.pop("lipsum")  # prose without end
    environment.finalize = _CLOCK.write
    unbounded, operate = environment.call, environment.call_binop

    def call_binop(context: Any, operator: str, left: Any, right: Any) -> Any:
        _check_call(operator, left, (right,), {})
        return _checked_size(operate(context, operator, left, right))

    def call(context: Any, function: Any, *arguments: Any, **named: Any) -> Any:
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
        name, owner = getattr(method, "__name__", ""), getattr(method, "__self__", None)
        _check_call(name, owner, arguments, named)
        if isinstance(owner, str) and name in ("format", "format_map"):
            values = (arguments, named) if name == "format" else ((), *arguments[:1])
            _BoundedFormatter(environment).vformat(owner, *values)
        return _checked_size(unbounded(context, function, *arguments, **named))

    environment.call, environment.call_binop = call, call_binop
    return environment


class _BoundedFormatter(SandboxedFormatter):
    """Formats as `str.format` does in the sandbox; raises `_LimitError` for long text and for wide fields."""

    written = 0

    def format_field(self, value: Any, format_spec: str) -> Any:
        if re.search(r"\d{7}", format_spec):  # after the fields in it were replaced
            raise _LimitError(_WIDE)
        text = super().format_field(value, format_spec)
        self.written += len(text)
        _check_length(self.written, CHARACTERS)
        return text


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    place = 1 if hasattr(function, "jinja_pass_arg") else 0  # of the value that it filters

    @functools.wraps(function)
    def bounded(*arguments: Any, **named: Any) -> Any:
        _check_call("%" if name == "format" else name, arguments[place], arguments[place + 1 :], named)
        return _checked_size(function(*arguments, **named))

    return bounded


def _check_call(name: str, target: Any, arguments: Sequence[Any], named: Mapping[str, Any]) -> None:
    """Check a call of a method, filter or operator of `target` before it runs."""
    _CLOCK.tick()
    if name in SIZED and any(isinstance(one, int) and abs(one) > ENTRIES for one in (*arguments, *named.values())):
        raise _LimitError(f"calls {name} with numbers up to {ENTRIES:,}, got one with a larger number")
    texts = [one for one in (target, *arguments, *named.values()) if isinstance(one, str)]
    if name == "replace" and len(texts) == 3:
        _check_length(len(texts[0]) + texts[0].count(texts[1]) * len(texts[2]), CHARACTERS)
    elif name == "join":
        for joined in (target, *arguments):
            if isinstance(joined, (list, tuple)):
                _check_length(sum(len(entry) if isinstance(entry, str) else 1 for entry in joined), CHARACTERS)
    elif name == "*":
        for many, times in ((target, *arguments), (*arguments, target)):
            if isinstance(many, (str, list, tuple)) and isinstance(times, int):
                _check_length(len(many) * times, CHARACTERS if isinstance(many, str) else ENTRIES)
    elif name == "**":
        if isinstance(target, int) and isinstance(arguments[0], int):
            _check_bits(target.bit_length() * arguments[0])
    elif name == "%" and isinstance(target, str) and re.search(r"%[^a-zA-Z%]*\*|\d{7}", target):
        raise _LimitError(_WIDE)


def _checked_size(value: Any) -> Any:
    if isinstance(value, (str, list, tuple)):
        _check_length(len(value), CHARACTERS if isinstance(value, str) else ENTRIES)
    elif isinstance(value, int):
        _check_bits(value.bit_length())
    return value


def _check_length(length: int, most: int) -> None:
    if length > most:
        what = "entries of a list" if most == ENTRIES else "characters of text"
        raise _LimitError(f"makes at most {most:,} {what}, got one that makes more")


def _check_bits(bits: int) -> None:
    if bits > BITS:
        raise _LimitError(f"makes whole numbers of at most {BITS:,} bits, got one that makes larger ones")


def _concatenated(*values: Any) -> str:
    texts = [str(value) for value in values]
    _check_length(sum(map(len, texts)), CHARACTERS)
    return "".join(texts)


_WIDE = "formats to widths of at most 6 digits, got one that does not"
_CLOCK = _Clock()
_LOCK = threading.RLock()
