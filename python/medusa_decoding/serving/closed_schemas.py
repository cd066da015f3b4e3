"""Close objects in JSON schemas: those that list their properties and say nothing of others admit no others.

JSON Schema admits any further field, and a model that is made to write such an object may add fields without end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PARTS = {"allOf", "anyOf", "oneOf", "$ref", "$dynamicRef", "if", "dependentSchemas"}
"""Keywords whose schemas describe the same value as the schema that they are in."""
_SAID = {"additionalProperties", "unevaluatedProperties", "minProperties", "propertyNames"}
"""Keywords that say more about an object's other properties."""
_OWN = {"properties", "patternProperties", *_SAID}
_SCHEMAS = {"allOf", "anyOf", "oneOf", "items", "prefixItems", "additionalItems", "contains", "additionalProperties"}
_NAMED = {"$defs", "definitions", "properties", "patternProperties"}


class _TogetherError(Exception):
    """Several schemas describe one object together."""


def closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a copy of a schema whose objects are closed. `additionalProperties` is obeyed where it is given.

    If several schemas of it describe one object together (`allOf`, or `anyOf` next to `properties`), each names only a
    part of its properties, and the schema is returned as it is.
    """
    try:
        return dict(_copied(schema))
    except _TogetherError:
        return schema


def _copied(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    parts, several, properties = _PARTS & schema.keys(), schema.get("allOf"), schema.get("properties")
    if len(parts) > 1 or (parts and _OWN & schema.keys()) or (isinstance(several, list) and len(several) > 1):
        raise _TogetherError
    result = dict(schema)
    for key, value in schema.items():
        if key in _NAMED and isinstance(value, Mapping):
            result[key] = {name: _copied(one) for name, one in value.items()}
        elif key in _SCHEMAS:
            result[key] = [_copied(one) for one in value] if isinstance(value, list) else _copied(value)
    names = {*schema.get("required", ())}
    if isinstance(properties, Mapping) and not _SAID & schema.keys() and names <= properties.keys():
        result["additionalProperties"] = False
    return result
