"""Read settings (pydantic's dataclasses) from YAML strictly, and write them back.

Each field (`setting`) says what it means, where its default comes from and which values it takes. Errors are
ValueErrors of the form "key.path: expected X, got Y": unknown, repeated and missing keys, wrong types and values.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import operator
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml  # type: ignore[import-untyped]
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from medusa_decoding.checks import shown
from medusa_decoding.files import read_text

T = TypeVar("T")
STRICT = ConfigDict(strict=True, extra="forbid")
REQUIRED: Any = ...


def setting(default: Any, meaning: str, source: str = "", **limits: Any) -> Any:
    """Declare a field of a settings dataclass: its default, meaning and source, and pydantic's limits of its values.

    The default is REQUIRED if there is none; a type stands for a new object of it each time. The source is a section of
    the paper, or other words on where the default comes from.
    """
    kind = "default_factory" if isinstance(default, type) else "default"
    return Field(**{kind: default}, description=meaning, json_schema_extra={"source": source}, **limits)


# PyYAML has no error of its own for a value that does not fit its tag: !!int x, a 13th month.
_NOT_YAML = (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, ArithmeticError, RecursionError)


class _Loader(yaml.SafeLoader):
    """YAML's safe subset, with numbers such as 5e-4 as in YAML 1.2, and each key once."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Refuse a mapping with a repeated key."""
        seen: set[str] = set()
        for key, _ in node.value:
            if str(key.value) in seen:
                raise yaml.YAMLError(f"the key {key.value!r} again in line {key.start_mark.line + 1}")
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


_FLOAT = re.compile(r"^[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Read a YAML file that holds a mapping without repeated keys."""
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"config: expected a readable file, got {path} ({error})") from error
    value = parse_yaml(text, f"config: expected YAML in {path}")
    if not isinstance(value, dict):
        raise ValueError(f"config: expected a mapping in {path}, got {shown(value)}")
    return value


def parse_yaml(text: str, expected: str = "expected a value in YAML") -> Any:
    """Return the value of a piece of YAML; a `ValueError` that begins with `expected` if it is none."""
    try:
        return yaml.load(text, _Loader)
    except _NOT_YAML as error:
        raise ValueError(f"{expected}, got {error}") from error


def write_yaml(settings: Any) -> str:
    """Return a settings tree as YAML, every key with its value."""
    return yaml.safe_dump(dataclasses.asdict(settings), sort_keys=False, allow_unicode=True, width=120)


def value_text(value: Any) -> str:
    """Return a setting's value as YAML writes it, text without quotes."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def build(kind: type[T], values: Any) -> T:
    """Make a settings dataclass from a mapping, as YAML gives it, and nested ones from the mappings in it."""
    try:
        # As JSON: strictly, a list is no tuple, and a mapping no dataclass.
        return TypeAdapter(kind).validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        raise ValueError(_first_of(error, kind)) from error
    except (TypeError, RecursionError) as error:
        raise ValueError(f"config: expected settings by name, got {error}") from error


def _first_of(error: ValidationError, kind: Any) -> str:
    first: Any = error.errors()[0]
    if first["type"] == "value_error":
        return str(first["ctx"]["error"])
    *parents, last = first["loc"] or ("config",)
    path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in (*parents, last)).removeprefix(".")
    if first["type"] == "missing":
        return f"{path}: expected a value, got nothing"
    if first["type"] == "string_pattern_mismatch":
        return f"{path}: expected at least one character that is no space, got {shown(first['input'])}"
    if first["type"] != "unexpected_keyword_argument":
        return f"{path}: expected {re.sub('^.* should (be|have) ', '', first['msg'])}, got {shown(first['input'])}"
    for key in parents:
        kind = typing.get_args(kind)[0] if isinstance(key, int) else kind.__pydantic_fields__[key].annotation
    near = difflib.get_close_matches(last, kind.__pydantic_fields__, n=1)
    advice = f" ({near[0]!r} is near)" if near else ""
    return f"{path}: expected one of {', '.join(kind.__pydantic_fields__)}{advice}, got an unknown key"


def flat(settings: Any) -> dict[str, Any]:
    """Return the value of every setting in a tree by its key."""
    keys = (key for key, *_ in describe(type(settings)) if "[]" not in key)
    return {key: operator.attrgetter(key)(settings) for key in keys}


def describe(kind: Any, path: str = "") -> Iterator[tuple[str, str, str, str, str]]:
    """Yield (key, type, default, meaning, source) of every field of a settings tree, in order."""
    for name, field in kind.__pydantic_fields__.items():
        if dataclasses.is_dataclass(field.annotation):
            yield from describe(field.annotation, f"{path}{name}.")
            continue
        default = "required" if field.is_required() else repr(field.get_default(call_default_factory=True))
        source: Mapping[str, str] = field.json_schema_extra
        yield f"{path}{name}", kind.__annotations__[name], default, field.description, source["source"]
        for part in typing.get_args(field.annotation):
            if dataclasses.is_dataclass(part):
                yield from describe(part, f"{path}{name}[].")
