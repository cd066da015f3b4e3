"""A tree of dataclasses read from YAML strictly, checked, and written back.

Every field carries what it means, where its default comes from, and what values it takes (`Field`). Errors are
ValueErrors in the form "key.path: expected X, got Y": unknown and repeated keys, missing ones, wrong types, values out
of range. This module knows dataclasses and YAML; it does not know what the settings are for.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml  # type: ignore[import-untyped]

from medusa_decoding.checks import shown
from medusa_decoding.files import read_text

T = TypeVar("T")


@dataclass(frozen=True)
class Range:
    """Values that a setting takes beyond those of its type; None and other types are not asked."""

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


@dataclass(frozen=True)
class Field:
    """What is said of a field, in its annotation: `name: Annotated[int, Field("how many", "B.2", at_least(1))] = 5`.

    Attributes:
        meaning: what it does.
        source: where the default comes from: a section of the paper, or what else.
        within: the values it takes.
    """

    meaning: str
    source: str = ""
    within: Range | None = None


@dataclass(frozen=True)
class _Field:
    name: str
    hint: Any
    note: Field
    required: bool
    default: str


def _fields(kind: Any) -> list[_Field]:
    hints, found = typing.get_type_hints(kind, include_extras=True), []
    for field in dataclasses.fields(kind):
        hint, note = typing.get_args(hints[field.name])
        required = field.default is MISSING and field.default_factory is MISSING
        default = repr(field.default) if field.default is not MISSING else "required" if required else "{}"
        found.append(_Field(field.name, hint, note, required, default))
    return found


YAML_BYTES = 2**16
"""Size of a YAML text; PyYAML reads about as much in a second."""
YAML_VALUES = 10**5
"""Values in a YAML text, those that stand for it in the place of an alias counted each time."""
YAML_DEPTH = 50
"""Levels of lists and mappings within each other."""


def read_yaml(path: str | Path) -> dict[str, Any]:
    """Return a YAML file's mapping, in which no key stands twice.

    Numbers are read as in YAML 1.2, so that 5e-4 is one.

    Raises:
        ValueError: no such file, not YAML, not a mapping, a repeated key, too large or too deep.
    """
    try:
        text = read_text(path, YAML_BYTES)
    except (OSError, ValueError) as error:
        raise ValueError(f"config: expected a readable file, got {path} ({error})") from error
    try:
        value = _parsed(text)
    except yaml.YAMLError as error:
        raise ValueError(f"config: expected YAML in {path}, got {error}") from error
    if not isinstance(value, dict):
        got = "nothing" if value is None else {"list": "seq"}.get(type(value).__name__, type(value).__name__)
        raise ValueError(f"config: expected a mapping in {path}, got {got}")
    return value


def parse_yaml(text: str) -> Any:
    """Return the value that a piece of YAML stands for, its numbers as in `read_yaml`.

    Raises:
        ValueError: not YAML, too large or too deep.
    """
    if len(text) > YAML_BYTES:
        raise ValueError(f"expected a value in at most {YAML_BYTES:,} characters of YAML, got {len(text):,}")
    try:
        return _parsed(text)
    except yaml.YAMLError as error:
        raise ValueError(f"expected a value in YAML, got {shown(text)}") from error


def _parsed(text: str) -> Any:
    """Return the value of a YAML text.

    Raises:
        yaml.YAMLError: it is not YAML.
        ValueError: a repeated key, or more than the bounds above.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
    except RecursionError as error:
        raise ValueError(f"config: expected YAML of at most {YAML_DEPTH} levels, got more") from error
    if node is None:
        return None
    _check_extent(node, {})
    _refuse_repetition(node, "")
    try:
        return loader.construct_document(node)
    except (ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
        # PyYAML does not say in its own way that a value does not fit its tag: !!int x, a 13th month.
        raise yaml.YAMLError(f"a value that does not fit its type ({error})") from error


def _check_extent(node: Any, known: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """Return how many values and levels a node stands for; raise `ValueError` if they are too many.

    Args:
        node: of `yaml.compose`; an alias is the very node that it stands for.
        known: by the nodes' ids, so that each is visited once.
    """
    if id(node) not in known:
        known[id(node)] = 1, 1  # for one that holds itself, which is refused afterwards
        entries = node.value if isinstance(node, yaml.CollectionNode) else ()
        parts = [_check_extent(part, known) for one in entries for part in (one if isinstance(one, tuple) else (one,))]
        values, levels = 1 + sum(part[0] for part in parts), 1 + max((part[1] for part in parts), default=0)
        if values > YAML_VALUES or levels > YAML_DEPTH:
            raise ValueError(
                f"config: expected at most {YAML_VALUES:,} values in {YAML_DEPTH} levels, aliases counted as what "
                "they stand for, got more"
            )
        known[id(node)] = values, levels
    return known[id(node)]


class _Loader(yaml.SafeLoader):
    """YAML's safe subset."""


_FLOAT = re.compile(r"^[-+]?(?:[0-9][0-9_]*)(?:\.[0-9_]*)?[eE][-+]?[0-9]+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))


def _refuse_repetition(node: Any, path: str, above: tuple[Any, ...] = ()) -> None:
    if any(node is one for one in above):
        raise ValueError(f"{path}: expected values that do not hold themselves, got an alias of what it is in")
    above = (*above, node)
    if isinstance(node, yaml.SequenceNode):
        for place, entry in enumerate(node.value):
            _refuse_repetition(entry, f"{path}[{place}]", above)
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = _joined(path, str(key.value))
            if name in seen:
                raise ValueError(f"{name}: expected one such key, got a second in line {key.start_mark.line + 1}")
            seen.add(name)
            _refuse_repetition(value, name, above)


def build(kind: type[T], values: Any, path: str = "") -> T:
    """Make a settings dataclass of a mapping, fields that are such dataclasses of the mappings in it.

    Args:
        kind: the dataclass.
        values: what YAML gave.
        path: of the keys above it.

    Raises:
        ValueError: not a mapping, an unknown key, a missing one. (Types and ranges: `check`.)
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{path or 'config'}: expected a mapping, got {_shown(values)}")
    fields = {field.name: field for field in _fields(kind)}
    for key in values:
        if key not in fields:
            near = difflib.get_close_matches(str(key)[:60], fields, n=1)
            hint = f" ({near[0]!r} is near)" if near else ""
            raise ValueError(
                f"{_joined(path, str(key)[:60])}: expected one of {', '.join(fields)}{hint}, got an unknown key"
            )
    for name, field in fields.items():
        if field.required and name not in values:
            raise ValueError(f"{_joined(path, name)}: expected {_type_words(field.hint)}, got nothing")
    return kind(**{name: _converted(value, fields[name].hint, _joined(path, name)) for name, value in values.items()})


def _converted(value: Any, hint: Any, path: str) -> Any:
    if _is_settings(hint):
        return build(hint, value, path)
    if typing.get_origin(hint) is tuple and isinstance(value, list):
        inner = typing.get_args(hint)[0]
        return tuple(_converted(entry, inner, f"{path}[{place}]") for place, entry in enumerate(value))
    return float(value) if _is_whole(value) and float in _alternatives(hint) else value


def check(settings: Any, path: str = "") -> None:
    """Raise unless every value in the tree has its field's type and range.

    Raises:
        ValueError: naming the key's path, what was expected and what came.
    """
    for field in _fields(type(settings)):
        name, value = _joined(path, field.name), getattr(settings, field.name)
        _check_type(value, field.hint, name)
        within = field.note.within
        if within is not None and value is not None and not within.accepts(value):
            raise ValueError(f"{name}: expected {within.words}, got {_shown(value)}")


def _check_type(value: Any, hint: Any, path: str) -> None:
    if _is_settings(hint):
        if not isinstance(value, hint):
            raise ValueError(f"{path}: expected {hint.__name__}, got {_shown(value)}")
        check(value, path)
        return
    if typing.get_origin(hint) is tuple and isinstance(value, tuple):
        for place, entry in enumerate(value):
            _check_type(entry, typing.get_args(hint)[0], f"{path}[{place}]")
        return
    if not any(_fits(value, alternative) for alternative in _alternatives(hint)):
        raise ValueError(f"{path}: expected {_type_words(hint)}, got {_shown(value)}")


def _fits(value: Any, hint: Any) -> bool:
    if hint is types.NoneType:
        return value is None
    if typing.get_origin(hint) is Literal:
        return isinstance(value, str) and value in typing.get_args(hint)
    if typing.get_origin(hint) is dict:
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)
    if hint in (int, float):
        return isinstance(value, hint) and not isinstance(value, bool)
    return isinstance(hint, type) and isinstance(value, hint)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def _type_words(hint: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false", types.NoneType: "null"}

    def words(one: Any) -> str:
        if typing.get_origin(one) is Literal:
            return " or ".join(map(repr, typing.get_args(one)))
        if _is_settings(one) or typing.get_origin(one) is dict:
            return "a mapping"
        return "a list" if typing.get_origin(one) is tuple else names.get(one, str(one))

    return " or ".join(words(one) for one in _alternatives(hint))


def _is_settings(hint: Any) -> bool:
    return isinstance(hint, type) and dataclasses.is_dataclass(hint)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def plain(settings: Any) -> Any:
    """Return a settings tree as dicts, lists and scalars."""
    if dataclasses.is_dataclass(settings):
        return {field.name: plain(getattr(settings, field.name)) for field in dataclasses.fields(settings)}
    if isinstance(settings, tuple | list):
        return [plain(entry) for entry in settings]
    return {key: plain(value) for key, value in settings.items()} if isinstance(settings, dict) else settings


def write_yaml(settings: Any) -> str:
    """Return a settings tree as YAML, every key with its value."""
    text: str = yaml.safe_dump(plain(settings), sort_keys=False, allow_unicode=True, width=120)
    return text


def describe(kind: type, path: str = "") -> Iterator[tuple[str, str, str, str, str]]:
    """Yield (key, type, default, meaning, source) of every field of a settings tree, in order."""
    for field in _fields(kind):
        name = _joined(path, field.name)
        if _is_settings(field.hint):
            yield from describe(field.hint, name)
            continue
        yield name, _type_words(field.hint), field.default, field.note.meaning, field.note.source
        if typing.get_origin(field.hint) is tuple:
            yield from describe(typing.get_args(field.hint)[0], f"{name}[]")
