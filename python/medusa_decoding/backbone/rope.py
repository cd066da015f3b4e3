"""Rotary tables by position, computed by the model's own rotary module so that every RoPE variant stays exact.

Only with dynamic NTK scaling do the frequencies depend on the sequence length. Position p is written when the sequence
has p + 1 tokens (or in the prefill), so its table row has the frequencies of that length, as transformers computes
them. In a batch each row has the frequencies that it has alone; transformers uses those of the longest row.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from medusa_decoding.backbone.unsupported import foreign_forward
from medusa_decoding.linears.reading import is_hooked

Tables = tuple[torch.Tensor, torch.Tensor]


def tables_of_layers(
    rotary: Any, names: Sequence[str] | None, prompt_lengths: list[int], capacity: int, dtype: torch.dtype,
    device: torch.device,
) -> Tables:  # fmt: skip
    """Return the rotary tables of a model whose layers have different ones: see `Family.tables`.

    With names [len(names), ..], else those of `rope_tables`. "not rotated" is a rotation by nothing; other names are
    the types of layers that the rotary module takes, each with tables that depend on the position alone.
    """
    if names is None or "not rotated" in names:
        rotated = rope_tables(rotary, prompt_lengths, capacity, dtype, device)
        if names is None:
            return rotated
        still = torch.ones_like(rotated[0]), torch.zeros_like(rotated[1])
        return torch.stack((rotated[0], still[0])), torch.stack((rotated[1], still[1]))
    for name, kind in rotary.rope_type.items():
        if kind in ("dynamic", "longrope"):
            raise ValueError(f"rope: expected default, linear, llama3 or yarn for {name}, got {kind}")
    if is_hooked(rotary) or foreign_forward(type(rotary)):
        raise ValueError(
            "base_model.model.rotary_emb: expected transformers' own module without hooks for layers with different "
            f"rotations, got {type(rotary).__name__}; use transformers' own generate"
        )
    sample = torch.empty(0, dtype=dtype, device=device)
    of_each = [_rows(functools.partial(rotary, layer_type=name), sample, 0, capacity) for name in names]
    return torch.stack([found[0] for found in of_each]), torch.stack([found[1] for found in of_each])


def rope_tables(
    rotary: Any, prompt_lengths: list[int], capacity: int, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (cos, sin), each [capacity, D], or [B, capacity, D] if the rows of a batch differ.

    The rotary module, called as `rotary(x, position_ids)`, is not modified. Prompt lengths, one per row, decide the
    frequencies of dynamic scaling.
    """
    if "longrope" in rotary.rope_type:
        # Beyond that, transformers computes all keys anew with other frequencies. `Backbone.context_limit` ends there.
        within = min(capacity, rotary.config.rope_parameters["original_max_position_embeddings"])
        short = _rows(_fresh(rotary), torch.empty(0, dtype=dtype, device=device), 0, within)
        missing = (0, 0, 0, capacity - within)
        return F.pad(short[0], missing), F.pad(short[1], missing)
    sample = torch.empty(0, dtype=dtype, device=device)
    if "dynamic" not in rotary.rope_type or capacity <= rotary.original_max_seq_len:
        positions = _rows(_fresh(rotary), sample, 0, capacity)
        if is_hooked(rotary) or foreign_forward(type(rotary)):
            # transformers would call it in each step, with that step's positions alone.
            for alone, table in zip(_rows(_fresh(rotary), sample, 1, 2), positions, strict=True):
                if not torch.allclose(alone, table[1:2], rtol=0.0, atol=1e-2):  # a rounding of bfloat16
                    raise ValueError(
                        "base_model.model.rotary_emb: expected rotations that depend on the position alone, got others "
                        f"of position 1 beside {capacity - 1} more ({type(rotary).__name__}); use transformers' own "
                        "generate"
                    )
        return positions
    tables = {length: _dynamic_tables(rotary, sample, length, capacity) for length in set(prompt_lengths)}
    if len(tables) == 1:
        return tables[prompt_lengths[0]]
    cos, sin = zip(*(tables[length] for length in prompt_lengths), strict=True)
    return torch.stack(cos), torch.stack(sin)


def _rows(rotary: Any, sample: torch.Tensor, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = rotary(sample, torch.arange(start, stop, device=sample.device)[None])
    # OLMo's are in fp32.
    return cos[0].to(sample.dtype).contiguous(), sin[0].to(sample.dtype).contiguous()


def _dynamic_tables(rotary: Any, sample: torch.Tensor, prompt: int, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    fresh, first = _fresh(rotary), max(prompt, rotary.original_max_seq_len)
    blocks = [_rows(fresh, sample, 0, first), *(_rows(fresh, sample, p, p + 1) for p in range(first, capacity))]
    cos, sin = zip(*blocks, strict=True)
    return torch.cat(cos), torch.cat(sin)


def _fresh(rotary: Any) -> Any:
    """Copy a rotary module in its state before any forward pass, which dynamic scaling changes."""
    fresh = copy.deepcopy(rotary)
    if "dynamic" in fresh.rope_type:
        fresh.register_buffer("inv_freq", fresh.original_inv_freq.clone().to(fresh.inv_freq.device), persistent=False)
        fresh.max_seq_len_cached = fresh.original_max_seq_len
    return fresh
