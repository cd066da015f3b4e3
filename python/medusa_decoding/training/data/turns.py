"""Read the turns of a conversation, in every spelling that data sets have.

A turn has a role (`role` or `from`) and a content (`content`, `value` or `text`), or it is a question with its answer:
fields of `_PAIRS`, or a list of two texts. What a turn is, its own fields tell, not the name of the list that it is in.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from medusa_decoding.chat.template import Message
from medusa_decoding.training.data.sources import BadRecordError

_CALL = "function_call"
_NAMES = {
    "system": ("system", "developer"),
    "user": ("user", "human", "prompter"),
    "assistant": ("assistant", "gpt", "chatgpt", "bot", "model", "ai"),
    "tool": ("tool", "function", "observation", "ipython", "environment", "tool_response", "function_response"),
    _CALL: (_CALL, "tool_call"),  # an assistant's turn whose content is the call, as JSON
}
ROLES = {name: role for role, names in _NAMES.items() for name in names}
_PAIRS = {
    "system": ("system",),
    "user": ("user", "human", "input", "prompt", "question", "instruction"),
    "assistant": ("assistant", "gpt", "bot", "output", "response", "answer"),
}
WEIGHTS = ("weight", "train", "training", "loss", "output_with_loss")
"""Keys that say whether an answer is learnt: OpenAI's, axolotl's, ms-swift's and XTuner's."""
_CONTENTS = ("content", "value", "text")
_PARTS = ("text", "input_text", "output_text")
_REASONING = ("reasoning_content", "reasoning")
READ = frozenset(
    ["role", "from", "name", "tool_call_id", "tool_calls", "function_call", *WEIGHTS, *_CONTENTS, *_REASONING]
    + [key for keys in _PAIRS.values() for key in keys]
)
"""Keys of turns that are read."""


def parse_turns(turns: Any, name: str, may_be_empty: bool = False) -> list[Message]:
    """Return the turns of a list as messages of a chat template, with `weight: 0` for answers that are not learnt.

    Raises `BadRecordError` for what is no list of turns, and for a turn without a known role or content.
    """
    if not isinstance(turns, list) or not turns:
        raise BadRecordError(f"{name} is not a list of turns")
    return [message for number, turn in enumerate(turns, start=1) for message in _messages(turn, number, may_be_empty)]


def text_of(value: Any, name: str, may_be_empty: bool = False) -> str:
    """Return a value that must be text that UTF-8 can write; raise `BadRecordError` if it is not."""
    if not isinstance(value, str):
        raise BadRecordError(f"{name} is not text")
    if not value.strip() and not may_be_empty:
        raise BadRecordError(f"{name} is empty")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise BadRecordError(f"{name} holds half a surrogate pair") from None
    return value


def tool_definitions(value: Any) -> tuple[Mapping[str, Any], ...] | None:
    """Return definitions of tools in OpenAI's form, from a list or JSON text; None if they are something else."""
    tools = _parsed(value) if isinstance(value, str) else value
    if not isinstance(tools, list) or not tools or not all(_has_name(_function(tool)) for tool in tools):
        return None
    text_of(json.dumps(tools, ensure_ascii=False, default=str), "tools")
    return tuple(tool if "function" in tool else {"type": "function", "function": dict(tool)} for tool in tools)


def _messages(turn: Any, number: int, may_be_empty: bool) -> Iterator[Message]:
    if isinstance(turn, list) and len(turn) == 2:
        turn = dict(zip(("user", "assistant"), turn, strict=True))
    if not isinstance(turn, Mapping):
        raise BadRecordError(f"turn {number} has no named fields")
    key = next((key for key in ("role", "from") if turn.get(key) is not None), None)
    weight = _weight(turn, number)
    if key is not None:
        yield _message(turn, number, key, weight, may_be_empty)
        return
    pairs = [(role, key) for role, keys in _PAIRS.items() for key in keys if turn.get(key) not in (None, "")]
    if not pairs:
        raise BadRecordError(f"turn {number} has an unknown role: {turn.get('role')}")
    for role, key in pairs:
        yield _weighted({"role": role, "content": text_of(turn[key], f"the {key} of turn {number}")}, weight)


def _message(turn: Mapping[str, Any], number: int, key: str, weight: int | None, may_be_empty: bool) -> Message:
    name = turn[key]
    role = ROLES.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise BadRecordError(f"turn {number} has an unknown {key}: {repr(name)[:40]}")
    usual = "content" if key == "role" else "value"
    place = next((place for place in (usual, *_CONTENTS) if turn.get(place) is not None), usual)
    content, calls = turn.get(place), []
    if role == _CALL or (key, role) == ("from", "tool"):  # LLaMA-Factory's `function` is a call, OpenAI's a result
        calls = _calls(_parsed(content), number) if role == _CALL or name == "function" else []
        role, content = ("assistant", None) if calls else ("assistant" if role == _CALL else role, content)
    elif role == "assistant" and (given := turn.get("tool_calls") or turn.get("function_call")):
        calls = _calls(_parsed(given) if isinstance(given, str) else given, number)
        if not calls:
            raise BadRecordError(f"a tool call of turn {number} has no name")
    if isinstance(content, list):
        content = "".join(_part(part, number, place) for part in content)
    if content is None and role == "tool":
        content = ""
    if content is not None or not calls:  # a call needs no text beside it, and a tool may return nothing
        empty = may_be_empty or bool(calls) or role == "tool"
        content = text_of(content, f"the {place} of turn {number}", empty)
    message: Message = {"role": role, "content": content}
    if calls:
        message["tool_calls"] = calls
    for field in ("name", "tool_call_id"):
        if turn.get(field) not in (None, ""):
            message[field] = text_of(turn[field], f"the {field} of turn {number}")
    reasoning = next((turn[field] for field in _REASONING if turn.get(field)), None)
    if role == "assistant" and reasoning is not None:
        message["reasoning_content"] = text_of(reasoning, f"the reasoning of turn {number}", True)
    return _weighted(message, weight)


def _part(part: Any, number: int, place: str) -> str:
    if isinstance(part, str):
        return text_of(part, f"a part of turn {number}", True)
    if not isinstance(part, Mapping) or part.get("type") not in _PARTS:
        raise BadRecordError(f"the {place} of turn {number} is not text")
    return text_of(part.get("text"), f"a part of turn {number}", True)


def _weight(turn: Mapping[str, Any], number: int) -> int | None:
    if turn.get("train_detail"):  # axolotl's
        raise BadRecordError(
            f"the train_detail of turn {number} is not supported: an answer is learnt as a whole or not"
        )
    for key in WEIGHTS:
        value = turn.get(key)
        if value is not None:
            if not isinstance(value, (bool, int, float)) or value not in (0, 1):
                raise BadRecordError(f"the {key} of turn {number} is neither 0 nor 1")
            return int(value)
    return None


def _weighted(message: Message, weight: int | None) -> Message:
    return message | {"weight": 0} if weight == 0 and message["role"] == "assistant" else message


def _calls(value: Any, number: int) -> list[dict[str, Any]]:
    """Return tool calls as templates expect them, with arguments as objects; none if the value is no call."""
    found = []
    for call in value if isinstance(value, list) else [value]:
        function = _function(call)
        if not _has_name(function):
            return []
        arguments = function.get("arguments", function.get("parameters"))
        if isinstance(arguments, str):
            parsed = _parsed(arguments.strip() or "{}")
            arguments = arguments if parsed is None else parsed
        if not isinstance(arguments or {}, Mapping):
            raise BadRecordError(f"the arguments of a tool call in turn {number} are not a JSON object")
        known = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        described = {"name": function["name"], "arguments": dict(arguments or {})}
        found.append({**known, "type": "function", "function": described})
    text_of(json.dumps(found, ensure_ascii=False, default=str), f"a tool call of turn {number}")
    return found


def _function(value: Any) -> Any:
    return value["function"] if isinstance(value, Mapping) and isinstance(value.get("function"), Mapping) else value


def _has_name(function: Any) -> bool:
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _parsed(text: Any) -> Any:
    try:
        return json.loads(text)
    except (TypeError, ValueError, RecursionError):
        return None
