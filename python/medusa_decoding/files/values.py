"""Check values that were read from JSON, by pydantic: dataclasses with these types, and others, as one `ValueError`."""

from __future__ import annotations

import reprlib
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

T = TypeVar("T")
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
WholeFrom1 = Annotated[int, Field(ge=1)]


def validated(kind: type[T], values: Any) -> T:
    """Return values as a dataclass or another type that pydantic knows; keys without a field are passed over.

    Raises:
        ValueError: missing or wrong values; says which.
    """
    try:
        return TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        first: Any = error.errors()[0]
        if first["type"] == "value_error":
            raise ValueError(str(first["ctx"]["error"])) from error
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{where}: {first['msg']}, got {reprlib.repr(first['input'])}") from error
