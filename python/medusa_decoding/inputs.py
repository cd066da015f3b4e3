"""What a caller hands to `generate`, checked: prompts split a row, counts, token ids."""

from __future__ import annotations

import operator
from typing import Any

import torch


def split_prompts(input_ids: torch.Tensor, attention_mask: torch.Tensor | None, vocab_size: int) -> list[torch.Tensor]:
    """Return each row's tokens without padding: int64 [T_b].

    Args:
        input_ids: int64 [B, T].
        attention_mask: [B, T] of 0 and 1, the ones of a row in one block at its left or right end; None for all ones.
        vocab_size: V; ids must lie in [0, V).

    Raises:
        ValueError: wrong shape or dtype, an empty row, a mask with holes, or an id outside the vocabulary.
    """
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


def whole(name: str, value: Any) -> int | None:
    """Return an optional count as an int.

    Raises:
        ValueError: not a whole number, or one that does not fit 32 bits.
    """
    if value is None:
        return None
    try:
        number = operator.index(value)
    except TypeError as error:
        raise ValueError(f"{name}: expected a whole number, got {value!r}") from error
    if abs(number) >= 2**31:
        raise ValueError(f"{name}: expected below 2**31, got {number}")
    return number


def token_list(value: Any) -> list[int]:
    """Return token ids given as None, an int, a list or an integer tensor as a list.

    Raises:
        ValueError: anything else.
    """
    if value is None or (isinstance(value, (list, tuple)) and not value):
        return []
    try:
        tokens = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"eos_token_id: expected token ids, got {value!r}") from error
    if tokens.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"eos_token_id: expected whole numbers, got {value!r}")
    return tokens.flatten().tolist()
