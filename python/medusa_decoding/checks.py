"""Checks of values that callers give: counts, token ids, flags, texts."""

from __future__ import annotations

import importlib
import operator
import reprlib
from typing import Any


def check_text(name: str, text: str) -> None:
    """Raise `ValueError` unless a text can be encoded in UTF-8; command lines and JSON may hold invalid characters."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name}: expected UTF-8 text, got {text[error.start]!a} at character {error.start}"
        ) from error


def check_count(name: str, value: Any, least: int = 1) -> int:
    """Return a value that is an int of at least `least`; raise `ValueError` for any other."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}: expected a whole number from {least}, got {shown(value)}")
    return value


def whole(name: str, value: Any) -> int | None:
    """Return an optional count as an int; raise `ValueError` if it is not whole or does not fit 32 bits."""
    if value is None:
        return None
    number = index(name, value)
    if abs(number) >= 2**31:
        raise ValueError(f"{name}: expected below 2**31, got {shown(number)}")
    return number


def import_library(module: str, purpose: str, instead: str = "", extra: str = "train") -> Any:
    """Import a module that an extra of the package installs.

    Raises:
        ModuleNotFoundError: it is missing; names the purpose, and what else to do `instead` (", or use adamw").
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error.name}: expected the library for {purpose} (pip install 'medusa-kernels[{extra}]'{instead}), "
            "got none"
        ) from error


def check_truth(name: str, value: Any) -> None:
    """Raise `ValueError` unless a value is True, False or None."""
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name}: expected True or False, got {shown(value)}")


def shown(value: Any) -> str:
    """Return a shortened form of a value for a message."""
    try:
        return reprlib.repr(value)
    except ValueError:  # a number of thousands of digits
        return f"{type(value).__name__} too large to print"


def index(name: str, value: Any) -> int:
    """Return a whole number, also one of numpy or torch, as an int; raise `ValueError` for all else, even booleans."""
    try:
        if isinstance(value, bool) or str(getattr(value, "dtype", None)) in ("torch.bool", "bool"):
            raise TypeError("a truth value")
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}: expected a whole number, got {shown(value)}") from error


def token_list(value: Any, name: str = "eos_token_id") -> list[int]:
    """Return token ids given as None, an int, a list or an integer tensor as a list; else raise `ValueError`."""
    if value is None or (isinstance(value, (list, tuple)) and not value):
        return []
    import torch  # the command line imports this module before torch

    try:
        tokens = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{name}: expected token ids, got {shown(value)}") from error
    if tokens.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name}: expected whole numbers, got {shown(value)}")
    return tokens.flatten().tolist()
