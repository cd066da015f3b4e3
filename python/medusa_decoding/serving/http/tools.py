"""Tools of a request: which may be called, and calls found in an answer.

Calls are `<tool_call>{json}</tool_call>` (Qwen, Hermes) or bare JSON (Llama 3).
"""

from __future__ import annotations

import itertools
import json
import math
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from medusa_decoding.chat.streaming import begun
from medusa_decoding.serving.grammar import CLOSE, OPEN, CallForm, ToolSchema
from medusa_decoding.serving.http.errors import ApiError
from medusa_decoding.serving.http.protocol import ChatRequest, NamedTool, Tool

_NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
_GUIDE = """\
You can call functions. To call one, answer with nothing but JSON: {"name": "the name", "arguments": {"argument": 1}}
The functions are:
"""


@dataclass(frozen=True)
class Offer:
    """The tools of a request.

    Attributes:
        tools: that the model reads about.
        names: of the functions that it may call.
        forced: whether it must call one.
        several: whether it may call more than one; None if the request leaves that open.
    """

    tools: list[Tool]
    names: frozenset[str]
    forced: bool
    several: bool | None

    @property
    def constrained(self) -> bool:
        """Whether a grammar is needed."""
        strict = any(tool.function.strict for tool in self.tools)
        return bool(self.tools) and (self.forced or strict or self.several is False)

    def schemas(self) -> list[ToolSchema]:
        """Return the schemas of arguments that calls obey: all of a forced call, else those of strict functions."""
        schemas = []
        for tool in self.tools:
            function, strict = tool.function, bool(tool.function.strict)
            if function.name in self.names:
                given = _NOTHING if function.parameters is None else {"type": "object", **function.parameters}
                obeyed = given if self.forced or strict else {"type": "object"}
                schemas.append(ToolSchema(function.name, obeyed, lenient=not strict))
        return schemas


def offered(body: ChatRequest) -> Offer:
    """Return what a request says about tools; raises `ApiError` if it contradicts itself."""
    tools, choice = body.tools or [], body.tool_choice
    if choice not in (None, "none", "auto") and not tools:
        raise ApiError("tool_choice needs tools", param="tool_choice")
    names = {tool.function.name for tool in tools}
    forced, several = choice == "required", body.parallel_tool_calls
    if choice is not None and not isinstance(choice, str):
        named = [choice] if isinstance(choice, NamedTool) else choice.allowed_tools.tools
        asked = {tool.function.name for tool in named}
        if not asked <= names:
            message = f"tool_choice: expected a function among tools, got {', '.join(sorted(asked - names))}"
            raise ApiError(message, param="tool_choice")
        forced = isinstance(choice, NamedTool) or choice.allowed_tools.mode == "required"
        names = asked
        if isinstance(choice, NamedTool):
            several = False
        else:
            tools = [tool for tool in tools if tool.function.name in names]
    return Offer([] if choice == "none" else tools, frozenset(names), forced, several)


def call_form(template: str) -> CallForm:
    """Return how calls are written by models that a chat template with tools is for."""
    return CallForm(
        OPEN in template, "parameters" if '"parameters"' in template and OPEN not in template else "arguments"
    )


def described(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], role: str
) -> tuple[list[dict[str, Any]], None]:
    """Return messages that describe tools, calls and results as text, for templates that know none of them.

    The tools are in the first message of a role: "system", which is made if there is none, or "user".
    """
    names = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls", ())}
    told: list[dict[str, Any]] = []
    for message in messages:
        text = message["content"]
        if message["role"] == "tool":
            text = f"{names.get(message.get('tool_call_id'), 'The function')} returned: {text}"
            if told and told[-1].get("result"):  # templates may want turns to alternate
                told[-1]["content"] += f"\n{text}"
            else:
                told.append({"role": "user", "content": text, "result": True})
            continue
        calls = "; ".join(json.dumps(call["function"]) for call in message.get("tool_calls", ()))
        told.append({"role": message["role"], "content": "\n".join(filter(None, [text, calls]))})
    if tools:
        guide = _GUIDE + "\n".join(json.dumps(tool["function"]) for tool in tools)
        if role == "system" and told[0]["role"] != "system":
            told.insert(0, {"role": "system", "content": guide})
        else:
            first = next((message for message in told if message["role"] == role), told[0])
            first["content"] = f"{guide}\n\n{first['content']}"
    return told, None


def one_by_one(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]
) -> tuple[list[dict[str, Any]], Sequence[dict[str, Any]] | None]:
    """Return messages in which each call has a message of its own, followed by its results.

    Templates such as Llama 3.1's refuse messages with several calls, which their models write all the same.
    """
    told, rest = list[dict[str, Any]](), list(messages)
    while rest:
        message = rest.pop(0)
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            told.append(message)
            continue
        results = list(itertools.takewhile(lambda later: later["role"] == "tool", rest))
        del rest[: len(results)]
        for call in calls:
            told.append({**message, "tool_calls": [call]})
            message = {"role": message["role"], "content": ""}
            told += [result for result in results if result.get("tool_call_id") == call["id"]]
        ids = {call["id"] for call in calls}
        told += [result for result in results if result.get("tool_call_id") not in ids]
    return told, tools or None


@dataclass(frozen=True)
class Call:
    """A tool call; `arguments` is JSON text."""

    name: str
    arguments: str

    def as_json(self) -> dict[str, Any]:
        """Return the call in OpenAI's form, with a new id: Mistral's templates take none but nine letters or digits."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": secrets.token_hex(5)[:9], "type": "function", "function": function}


class ToolText:
    """Divides an answer's text into content and tool calls while it arrives.

    Text that may belong to a call is held back until that is certain. An answer that begins with a brace is held back
    to its end, since it may be a bare call. Text that is no call after all is content.

    Args:
        names: of the functions that may be called; anything else is no call.
        constrained: whether a grammar decides what calls are: it knows bare ones with a name, then arguments.
    """

    def __init__(self, names: Collection[str], constrained: bool = False) -> None:
        self._names, self._constrained = frozenset(names), constrained
        self._held = ""
        self._begun = self._bare = self._after_call = False

    def add(self, text: str) -> tuple[str, list[Call]]:
        """Return the content and the calls that a piece of text completes."""
        self._held += text
        if not self._begun:
            start = self._held.lstrip()[:1]
            self._begun, self._bare = start != "", start == "{"
        if self._bare or not self._begun:
            return "", []
        content, calls = "", list[Call]()
        while OPEN in self._held:
            before, _, rest = self._held.partition(OPEN)
            content += self._trimmed(before)
            inside, closed, after = rest.partition(CLOSE)
            if not closed:
                self._held = OPEN + rest
                return content, calls
            call = self._call(_parsed(inside))
            if call is None:
                content += f"{OPEN}{inside}{CLOSE}"
            else:
                calls.append(call)
                self._after_call = True
            self._held = after
        ready = len(self._held) - begun(self._held, [OPEN])
        content += self._trimmed(self._held[:ready])
        self._held = self._held[ready:]
        return content, calls

    def end(self) -> tuple[str, list[Call]]:
        """Return the content and the calls of what was held back."""
        text, self._held = self._held, ""
        if self._bare:
            calls = self._bare_calls(text)
        else:
            unclosed = self._call(_parsed(text.removeprefix(OPEN))) if text.startswith(OPEN) else None
            calls = [] if unclosed is None else [unclosed]
        return ("", calls) if calls else (self._trimmed(text), [])

    def _trimmed(self, text: str) -> str:
        """Return content without white space directly after a call."""
        text = text.lstrip() if self._after_call else text
        self._after_call &= not text
        return text

    def _bare_calls(self, text: str) -> list[Call]:
        """Return the calls of a text that consists of nothing else; several are divided by semicolons."""
        calls, rest = list[Call](), text.strip()
        while rest:
            try:
                value, end = _DECODER.raw_decode(rest)
            except (ValueError, RecursionError):
                return []
            call = self._call(value)
            if call is None or (self._constrained and (len(value) != 2 or next(iter(value)) != "name")):
                return []
            calls.append(call)
            rest = rest[end:].lstrip("; \t\r\n")
        return calls

    def _call(self, value: Any) -> Call | None:
        """Return the call that a JSON value describes, or None."""
        if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in self._names:
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        if isinstance(arguments, str):  # some models write their arguments as JSON text
            arguments = _parsed(arguments)
        return Call(value["name"], json.dumps(arguments)) if isinstance(arguments, dict) else None


def _parsed(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def _number(text: str) -> float:
    """Return a number of a JSON text; NaN and those beyond float's range are none."""
    if not math.isfinite(number := float(text)):
        raise ValueError  # as for any other text that is not JSON
    return number


_DECODER = json.JSONDecoder(parse_float=_number, parse_constant=_number)
