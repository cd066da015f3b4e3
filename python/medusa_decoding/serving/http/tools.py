"""Find tool calls in an answer: `<tool_call>{json}</tool_call>` (Qwen, Hermes) and bare JSON (Llama 3)."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from medusa_decoding.chat.streaming import begun

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Call:
    """A tool call; `arguments` is JSON text."""

    name: str
    arguments: str

    def as_json(self) -> dict[str, Any]:
        """Return the call in OpenAI's form, with a new id."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


class ToolText:
    """Divides an answer's text into content and tool calls while it arrives.

    Text that may belong to a call is held back until that is certain. An answer that begins with a brace is held back
    to its end, since it may be a bare call. Text that is no call after all is content.

    Args:
        names: of the functions that may be called; anything else is no call.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
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
            call = _call(_parsed(inside), self._names)
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
            calls = _bare_calls(text, self._names)
        else:
            unclosed = _call(_parsed(text.removeprefix(OPEN)), self._names) if text.startswith(OPEN) else None
            calls = [] if unclosed is None else [unclosed]
        return ("", calls) if calls else (self._trimmed(text), [])

    def _trimmed(self, text: str) -> str:
        """Return content without white space directly after a call."""
        text = text.lstrip() if self._after_call else text
        self._after_call &= not text
        return text


def _bare_calls(text: str, names: Collection[str]) -> list[Call]:
    """Return the calls of a text that consists of nothing else; several are divided by semicolons."""
    calls, rest = list[Call](), text.strip()
    while rest:
        try:
            value, end = _DECODER.raw_decode(rest)
        except (ValueError, RecursionError):
            return []
        call = _call(value, names)
        if call is None:
            return []
        calls.append(call)
        rest = rest[end:].lstrip("; \t\r\n")
    return calls


def _parsed(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def _call(value: Any, names: Collection[str]) -> Call | None:
    """Return the call that a JSON value describes, or None."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or value["name"] not in names:
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # some models write their arguments as JSON text
        arguments = _parsed(arguments)
    return Call(value["name"], json.dumps(arguments)) if isinstance(arguments, dict) else None


def _number(text: str) -> float:
    """Return a number of a JSON text; NaN and those beyond float's range are none."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"expected a finite number, got {text}")
    return number


_DECODER = json.JSONDecoder(parse_float=_number, parse_constant=_number)
