"""Inputs of `generate`, checked: prompts split into rows, settings as plain Python, streamers, seeds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from medusa_decoding.checks import index, shown

_PADDING = "; if nothing is padded, give torch.ones_like(input_ids) (without a mask, transformers' generate makes one)"


def split_prompts(input_ids: torch.Tensor, attention_mask: torch.Tensor | None, vocab_size: int) -> list[torch.Tensor]:
    """Return each row's tokens without padding: int64 [T_b].

    Args:
        input_ids: int64 [B, T].
        attention_mask: [B, T] of 0 and 1, the ones of a row in one block at its left or right end; None for all ones.
        vocab_size: V; ids must lie in [0, V).
    """
    _check_tensor("input_ids", input_ids, "a tensor of token ids [B, T]")
    if attention_mask is not None:
        _check_tensor("attention_mask", attention_mask, "a tensor of 0 and 1 [B, T], or None")
    if input_ids.ndim != 2 or input_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"input_ids: expected int64 [B, T], got {input_ids.dtype} {list(input_ids.shape)}")
    if input_ids.numel() == 0:
        raise ValueError(f"input_ids: expected at least one row and one token, got shape {list(input_ids.shape)}")
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if mask.shape != input_ids.shape:
        raise ValueError(f"attention_mask: expected shape {list(input_ids.shape)}, got {list(mask.shape)}")
    ids, mask = input_ids.long().cpu(), mask.cpu()
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("attention_mask: expected only 0 and 1, got other values")
    prompts = []
    for row, (tokens, real) in enumerate(zip(ids, mask.bool(), strict=True)):
        places = real.nonzero().flatten()
        if len(places) == 0:
            raise ValueError(f"attention_mask: row {row} has no token{_PADDING}")
        first, last = int(places[0]), int(places[-1])
        if last - first + 1 != len(places) or (first > 0 and last < len(real) - 1):
            got = real.int().tolist()
            raise ValueError(f"attention_mask: expected row {row} padded at one end only, got {got}{_PADDING}")
        prompt = tokens[real]
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


def plain(name: str, value: Any) -> Any:
    """Return a tensor or array as plain Python, all else unchanged; raise `ValueError` for unreadable entries."""
    if isinstance(value, torch.Tensor):
        _check_tensor(name, value, "numbers")
    return value.tolist() if isinstance(value, (torch.Tensor, np.ndarray, np.generic)) else value


def check_streamer(streamer: Any) -> None:
    """Raise `ValueError` unless an optional streamer can be written to."""
    if streamer is not None and (isinstance(streamer, torch.Tensor) or not callable(getattr(streamer, "end", None))):
        raise ValueError(f"streamer: expected a transformers streamer (put and end) or None, got {shown(streamer)}")


@contextlib.contextmanager
def ended_on_error(streamer: Any) -> Iterator[None]:
    """End a streamer if a generation is refused or fails: a thread may be waiting for its end."""
    try:
        yield
    except BaseException:
        if streamer is not None:
            with contextlib.suppress(Exception):
                streamer.end()
        raise


def whole_seed(seed: Any) -> int | None:
    """Return an optional seed as an int of 64 bits; one of more bits, or not whole, is a `ValueError`."""
    if seed is None:
        return None
    number = index("seed", seed)
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"seed: expected a whole number of up to 64 bits, got {number}")
    return number % 2**64
