"""Read a tree of dataclasses from YAML strictly, check its values, and write it back.

Each field (`setting`) says what it means, where its default comes from and which values it takes. Errors are
ValueErrors of the form "key.path: expected X, got Y": unknown, repeated and missing keys, wrong types and values.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml  # type: ignore[import-untyped]

from medusa_decoding.checks import shown
from medusa_decoding.files import read_text

T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """Values that a setting takes beyond those of its type. None is always accepted if the type allows it."""

    words: str
    accepts: Callable[[Any], bool]


def at_least(least: float) -> Range:
    """Accept finite numbers from `least` on."""
    return Range(f"at least {least:g}", lambda value: least <= value < math.inf)


POSITIVE = Range("a finite number above 0", lambda value: 0 < value < math.inf)
SHARE = Range("a number from 0 to below 1", lambda value: 0 <= value < 1)
DECAY = Range("a number above 0 and at most 1", lambda value: 0 < value <= 1)
WORDS = Range("at least one character", lambda value: bool(value.strip()))
SEED = Range("from 0 to below 2^32", lambda value: 0 <= value < 2**32)
ENTRIES = Range("at least one entry", lambda value: len(value) > 0)


REQUIRED: Any = dataclasses.MISSING


def setting(default: Any, meaning: str, source: str = "", within: Range | None = None) -> Any:
    """Declare a field of a settings dataclass: its default, meaning and source, and the values that it takes.

    The default is REQUIRED if there is none; a type stands for a new object of it each time. The source is a section of
    the paper, or other words on where the default comes from.
    """
    said = {"meaning": meaning, "source": source, "within": within}
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=said)
    return dataclasses.field(default=default, metadata=said)


# -- YAML --------------------------------------------------------------------------------------------------------------

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
    """Read a YAML file that holds a mapping without repeated keys.

    Raises:
        ValueError: no such file, not YAML, not a mapping, a repeated key.
    """
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"config: expected a readable file, got {path} ({error})") from error
    try:
        value = yaml.load(text, _Loader)
    except _NOT_YAML as error:
        raise ValueError(f"config: expected YAML in {path}, got {error}") from error
    if not isinstance(value, dict):
        got = "nothing" if value is None else {"list": "seq"}.get(type(value).__name__, type(value).__name__)
        raise ValueError(f"config: expected a mapping in {path}, got {got}")
    return value


def parse_yaml(text: str) -> Any:
    """Return the value of a piece of YAML.

    Raises:
        ValueError: not YAML.
    """
    try:
        return yaml.load(text, _Loader)
    except _NOT_YAML as error:
        raise ValueError(f"expected a value in YAML, got {shown(text)}") from error


def write_yaml(settings: Any) -> str:
    """Return a settings tree as YAML, every key with its value."""
    return yaml.safe_dump(dataclasses.asdict(settings), sort_keys=False, allow_unicode=True, width=120)


def value_text(value: Any) -> str:
    """Return a setting's value as YAML writes it, text without quotes."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


# -- dataclasses -------------------------------------------------------------------------------------------------------


def _settings(kind: Any) -> dict[str, tuple[Any, dataclasses.Field[Any]]]:
    hints = typing.get_type_hints(kind)
    return {field.name: (hints[field.name], field) for field in dataclasses.fields(kind)}


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not REQUIRED:
        return repr(field.default)
    return "required" if field.default_factory is dataclasses.MISSING else "{}"


def build(kind: type[T], values: Any, path: str = "") -> T:
    """Make a settings dataclass from a mapping, as YAML gives it, and nested ones from the mappings in it.

    Raises:
        ValueError: not a mapping, an unknown key, a missing one. (Types and ranges: `check`.)
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{path or 'config'}: expected a mapping, got {shown(values)}")
    known = _settings(kind)
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key)[:60], known, n=1)
            advice = f" ({near[0]!r} is near)" if near else ""
            raise ValueError(
                f"{_join(path, str(key)[:60])}: expected one of {', '.join(known)}{advice}, got an unknown key"
            )
    for name, (hint, field) in known.items():
        if name not in values and _default(field) == "required":
            raise ValueError(f"{_join(path, name)}: expected {_type_words(hint)}, got nothing")
    return kind(**{name: _convert(value, known[name][0], _join(path, name)) for name, value in values.items()})


def _convert(value: Any, hint: Any, path: str) -> Any:
    if _is_settings(hint):
        return build(hint, value, path)
    if typing.get_origin(hint) is tuple and isinstance(value, (list, tuple)):
        inner = typing.get_args(hint)[0]
        return tuple(_convert(entry, inner, f"{path}[{place}]") for place, entry in enumerate(value))
    return float(value) if type(value) is int and float in _alternatives(hint) else value


def check(value: Any, hint: Any = None, path: str = "") -> None:
    """Raise unless a value has its type (`hint`, or its own) and every field in it its type and range.

    Raises:
        ValueError: names the key's path, what was expected and what was received.
    """
    hint = type(value) if hint is None else hint
    if not any(_fits(value, one) for one in _alternatives(hint)):
        expected = hint.__name__ if _is_settings(hint) else _type_words(hint)
        raise ValueError(f"{path}: expected {expected}, got {shown(value)}")
    if typing.get_origin(hint) is tuple:
        for place, entry in enumerate(value):
            check(entry, typing.get_args(hint)[0], f"{path}[{place}]")
    elif _is_settings(hint):
        for name, (inner_hint, field) in _settings(hint).items():
            inner, within = getattr(value, name), field.metadata["within"]
            check(inner, inner_hint, _join(path, name))
            if within is not None and inner is not None and not within.accepts(inner):
                raise ValueError(f"{_join(path, name)}: expected {within.words}, got {shown(inner)}")


_TYPES = {
    int: "a whole number", float: "a number", str: "text", bool: "true or false", types.NoneType: "null",
    dict: "a mapping", tuple: "a list",
}  # fmt: skip


def _fits(value: Any, hint: Any) -> bool:
    kind = typing.get_origin(hint) or hint
    if kind is Literal:
        return value in typing.get_args(hint)
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, kind) and (kind is not dict or all(isinstance(key, str) for key in value))


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def _type_words(hint: Any) -> str:
    def words(one: Any) -> str:
        kind = typing.get_origin(one) or one
        if kind is Literal:
            return " or ".join(map(repr, typing.get_args(one)))
        return _TYPES[dict if _is_settings(kind) else kind]

    return " or ".join(words(one) for one in _alternatives(hint))


def _is_settings(hint: Any) -> bool:
    return dataclasses.is_dataclass(hint)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def flat(settings: Any) -> dict[str, Any]:
    """Return the value of every setting in a tree by its key."""
    keys = (key for key, *_ in describe(type(settings)) if "[]" not in key)
    return {key: operator.attrgetter(key)(settings) for key in keys}


def describe(kind: type, path: str = "") -> Iterator[tuple[str, str, str, str, str]]:
    """Yield (key, type, default, meaning, source) of every field of a settings tree, in order."""
    for key, (hint, field) in _settings(kind).items():
        name = _join(path, key)
        if _is_settings(hint):
            yield from describe(hint, name)
            continue
        yield name, _type_words(hint), _default(field), field.metadata["meaning"], field.metadata["source"]
        if typing.get_origin(hint) is tuple:
            yield from describe(typing.get_args(hint)[0], f"{name}[]")
