"""Close objects in JSON schemas: those that list their properties and say nothing of others admit no others.

JSON Schema admits any further field, and a model that is made to write such an object may add fields without end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

MOST_STEPS = 50_000
"""Parts of a schema that are looked at, so that definitions that use each other cost no time."""
_PARTS = ("allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "dependentSchemas")
"""Keywords whose schemas describe the same value as the schema that they are in."""
_SAID = ("additionalProperties", "unevaluatedProperties", "minProperties", "propertyNames")
"""Keywords that say more about an object's other properties."""
_SCHEMAS = ("allOf", "anyOf", "oneOf", "items", "prefixItems", "additionalItems", "contains", "additionalProperties")


def closed(schema: Mapping[str, Any]) -> Any:
    """Return a copy of a schema whose objects are closed.

    An object that several schemas describe together (`allOf`, or `anyOf` next to `properties`) admits the properties of
    all of them; a definition that is used so stays open elsewhere. `additionalProperties` is obeyed where it is given.

    Raises:
        ValueError: too many combinations to look at.
    """
    return _Closing(schema).copy(schema, True)


class _Closing:
    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root, self._steps = root, 0
        # What is combined with other schemas, which may have other properties, stays open. (llguidance supports no
        # keyword next to a `$ref` that is recursive, so it cannot be closed where it is used alone.)
        self._combined: set[str] = set()
        self._find_combined(root)

    def copy(self, schema: Any, close: bool, place: str = "#") -> Any:
        """Return a copy of a schema with closed objects; `close` for the value that it describes itself."""
        if not isinstance(schema, Mapping):
            return schema
        close &= place not in self._combined
        alone = close and not self._combines(schema)
        result = dict(schema)
        for key, value in schema.items():
            inner = alone if key in ("allOf", "anyOf", "oneOf") else True
            at = f"{place}/{key}"
            if key in ("$defs", "definitions", "properties", "patternProperties") and isinstance(value, Mapping):
                result[key] = {name: self.copy(one, True, f"{at}/{_escaped(name)}") for name, one in value.items()}
            elif key in _SCHEMAS and _is_list(value):
                result[key] = [self.copy(one, inner, f"{at}/{number}") for number, one in enumerate(value)]
            elif key in _SCHEMAS:
                result[key] = self.copy(value, inner, at)
        if alone and "properties" in schema and not any(key in schema for key in _SAID):
            result["additionalProperties"] = False
        elif close and not alone:
            names: dict[str, dict[str, bool]] = {"properties": {}, "patternProperties": {}}
            if self._reach(schema, names, set()) and names["properties"]:
                result["allOf"] = [*result.get("allOf", ()), {**names, "additionalProperties": False}]
        return result

    def _combines(self, schema: Mapping[str, Any]) -> bool:
        """Return whether several schemas describe this value together."""
        parts = [key for key in _PARTS if key in schema]
        several = len(parts) > 1 or (parts == ["allOf"] and _is_list(schema["allOf"]) and len(schema["allOf"]) > 1)
        own = any(key in schema for key in ("properties", "patternProperties", *_SAID))
        missing = bool(_required(schema) - set(_names(schema, "properties")))
        return several or missing or (parts != [] and own)

    def _find_combined(self, schema: Any) -> None:
        self._step()
        if _is_list(schema):
            for one in schema:
                self._find_combined(one)
        elif isinstance(schema, Mapping):
            if self._combines(schema):
                self._reach(schema, {"properties": {}, "patternProperties": {}}, self._combined)
            for key, value in schema.items():
                if key not in ("enum", "const", "default", "examples"):
                    self._find_combined(value)

    def _reach(self, schema: Any, names: dict[str, dict[str, bool]], seen: set[str]) -> bool:
        """Collect the names of properties in all schemas of a value; return whether none says more about others."""
        self._step()
        if not isinstance(schema, Mapping):
            return True
        free = not any(key in schema for key in (*_SAID, "$dynamicRef", "if", "dependentSchemas"))
        for key, found in names.items():
            found.update(dict.fromkeys(_names(schema, key), True))
        names["properties"].update(dict.fromkeys(sorted(_required(schema)), True))
        parts = [one for key in ("allOf", "anyOf", "oneOf") if _is_list(schema.get(key)) for one in schema[key]]
        place = _place(schema.get("$ref"))
        if place is not None and place not in seen:
            seen.add(place)
            target = self._target(place)
            free &= target is not None
            parts.append(target)
        return all([self._reach(one, names, seen) for one in parts]) and free

    def _target(self, place: str) -> Any:
        """Return the schema that a `$ref` within the document names, or None."""
        found: Any = self._root
        for name in place.split("/")[1:]:
            found = found.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
        return found if place.startswith("#/") or place == "#" else None

    def _step(self) -> None:
        self._steps += 1
        if self._steps > MOST_STEPS:
            raise ValueError("json_schema: expected fewer combinations of schemas (allOf, anyOf, $ref), got too many")


def _names(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = schema.get(key)
    return found if isinstance(found, Mapping) else {}


def _required(schema: Mapping[str, Any]) -> set[str]:
    found: Any = schema.get("required")
    return {name for name in found if isinstance(name, str)} if _is_list(found) and "properties" in schema else set()


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _place(reference: Any) -> str | None:
    return unquote(reference) if isinstance(reference, str) else None


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)
