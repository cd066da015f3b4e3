"""What a caller hands to `generate`, checked: prompts split a row, counts, token ids."""

from __future__ import annotations

import operator
import reprlib
from typing import Any

import numpy as np
import torch

MAX_ROWS = 2**16
"""Rows of a batch. Each has objects on the host, which take time and memory before the cache's size is checked."""


def split_prompts(input_ids: torch.Tensor, attention_mask: torch.Tensor | None, vocab_size: int) -> list[torch.Tensor]:
    """Return each row's tokens without padding: int64 [T_b].

    Args:
        input_ids: int64 [B, T].
        attention_mask: [B, T] of 0 and 1, the ones of a row in one block at its left or right end; None for all ones.
        vocab_size: V; ids must lie in [0, V).

    Raises:
        ValueError: no tensors, wrong shape or dtype, an empty row, a mask with holes, or an id outside the vocabulary.
    """
    _check_tensor("input_ids", input_ids, "a tensor of token ids [B, T]")
    if attention_mask is not None:
        _check_tensor("attention_mask", attention_mask, "a tensor of 0 and 1 [B, T], or None")
    if input_ids.ndim != 2 or input_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"input_ids: expected int64 [B, T], got {input_ids.dtype} {list(input_ids.shape)}")
    if input_ids.numel() == 0:
        raise ValueError(f"input_ids: expected at least one row and one token, got shape {list(input_ids.shape)}")
    if len(input_ids) > MAX_ROWS:
        raise ValueError(f"input_ids: expected at most {MAX_ROWS:,} rows, got {len(input_ids):,}")
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask: expected shape {list(input_ids.shape)}, got {list(mask.shape)}")
    ids, mask = input_ids.long().cpu(), mask.cpu()
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("attention_mask: expected only 0 and 1, got other values")
    prompts = []
    for row, (tokens, kept) in enumerate(zip(ids, mask.bool(), strict=True)):
        places = kept.nonzero().flatten()
        if len(places) == 0:
            raise ValueError(f"attention_mask: expected at least one token in row {row}, got none")
        first, last = int(places[0]), int(places[-1])
        if last - first + 1 != len(places) or (first > 0 and last < len(kept) - 1):
            raise ValueError(f"attention_mask: expected row {row} padded at one end only, got {kept.int().tolist()}")
        prompt = tokens[kept]
        low, high = int(prompt.min()), int(prompt.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(f"input_ids: expected ids in [0, {vocab_size}) in row {row}, got {low} to {high}")
        prompts.append(prompt)
    return prompts


def _check_tensor(name: str, value: Any, expected: str) -> None:
    """Raise `ValueError` unless a value is a tensor whose entries can be read."""
    if not isinstance(value, torch.Tensor):
        remedy = "; tokenize it first" if isinstance(value, (str, bytes)) else ""
        raise ValueError(f"{name}: expected {expected}, got {type(value).__name__}{remedy}")
    if value.layout != torch.strided or value.is_meta or value.is_nested or value.is_quantized:
        raise ValueError(f"{name}: expected {expected}, got one that is sparse, nested, quantized or on meta")


def check_text(name: str, text: str) -> None:
    """Raise `ValueError` unless UTF-8 can write a text: bytes of a command line, or JSON, may be no characters."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name}: expected UTF-8 text, got {text[error.start]!a} at character {error.start}"
        ) from error


def whole(name: str, value: Any) -> int | None:
    """Return an optional count as an int.

    Raises:
        ValueError: not a whole number, or one that does not fit 32 bits.
    """
    if value is None:
        return None
    number = index(name, value)
    if abs(number) >= 2**31:
        raise ValueError(f"{name}: expected below 2**31, got {shown(number)}")
    return number


def plain(name: str, value: Any) -> Any:
    """Return a setting as plain Python: a tensor's or array's entries in place of it, anything else as it is.

    Raises:
        ValueError: a tensor whose entries cannot be read.
    """
    if isinstance(value, torch.Tensor):
        _check_tensor(name, value, "numbers")
    return value.tolist() if isinstance(value, (torch.Tensor, np.ndarray, np.generic)) else value


def check_truth(name: str, value: Any) -> None:
    """Raise `ValueError` unless an optional flag is one."""
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{name}: expected True or False, got {shown(value)}")


def check_streamer(streamer: Any) -> None:
    """Raise `ValueError` unless an optional streamer can be written to."""
    if streamer is not None and (isinstance(streamer, torch.Tensor) or not callable(getattr(streamer, "end", None))):
        raise ValueError(f"streamer: expected a transformers streamer (put and end) or None, got {shown(streamer)}")


def shown(value: Any) -> str:
    """Return a value for a message, shortened."""
    try:
        return reprlib.repr(value)
    except ValueError:  # a number of thousands of digits
        return f"{type(value).__name__} too large to print"


def index(name: str, value: Any) -> int:
    """Return a whole number, of numpy or a tensor too, as an int.

    Raises:
        ValueError: anything else, True and False among it.
    """
    try:
        if isinstance(value, bool) or (isinstance(value, torch.Tensor) and value.dtype == torch.bool):
            raise TypeError("a truth value")
        return operator.index(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}: expected a whole number, got {shown(value)}") from error


def token_list(value: Any, name: str = "eos_token_id") -> list[int]:
    """Return token ids given as None, an int, a list or an integer tensor as a list.

    Raises:
        ValueError: anything else.
    """
    if value is None or (isinstance(value, (list, tuple)) and not value):
        return []
    try:
        tokens = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{name}: expected token ids, got {shown(value)}") from error
    if tokens.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{name}: expected whole numbers, got {shown(value)}")
    return tokens.flatten().tolist()
