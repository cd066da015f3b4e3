"""Causal attention of a prefill's chunk to the cached rows before it and to itself.

On a GPU in 16 bits a flash kernel serves, which needs no mask in memory: flash-attn's if it is installed and works,
otherwise the one within PyTorch. `served_by` tries each of them once on a small case, so that a broken installation, an
old version with another meaning of "causal", or a head size without a kernel is noticed, named in the log, and the next
one serves. Everything else, fp32 included, runs through PyTorch's function, or where that would need a mask, through
`tree_attention` on a GPU and through masked pieces on a CPU.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from medusa_kernels import ancestor_words, tree_attention
from medusa_kernels.cache_rows import dequantised_rows
from medusa_kernels.reference import WORD
from medusa_kernels.tree_attention import MAX_NODES

logger = logging.getLogger("medusa_decoding")

FLASH_PREFILL = True
"""Whether flash kernels may serve. Without them, chunks after the first and windows go through `tree_attention`."""

Flash = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, int | None], torch.Tensor]
"""(q [B, T, Hq, D], k and v [B, S, Hkv, D], scale, window) -> [B, T, Hq, D]. The last query is at the last key's
position; queries see `window` keys up to their own position, all of them if it is None."""


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_lens: torch.Tensor,
    offset: int,
    *,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    places: Sequence[int] | None = None,
) -> torch.Tensor:
    """Attend causally from a chunk of the prompts to the rows before it and to itself, just written.

    Prompts begin at the start of their rows and padding follows them, so causality alone hides the padding. No mask of
    chunk times earlier rows is materialised on any device.

    Of a cache in 8 bits, one layer's filled rows are first copied in the dtype of the queries, those of this chunk
    included, so that a prompt sees what later steps see.

    Takes rotated queries [B, T, Hq, D] of positions `offset` to `offset + T`, caches [B, Hkv, S, D] of which rows
    [0, offset + T) are filled, and int32 [B] lengths, `offset` in every row. With `places`, those of each row in the
    caches, these have any number of sequences; rows that are not neighbours there attend one by one. Returns
    [B, T, Hq, D].
    """
    if places is not None:
        first, count = places[0], len(places)
        if list(places) != list(range(first, first + count)):
            attend_one = functools.partial(
                prefill_attention, offset=offset, scale=scale, window=window, softcap=softcap
            )
            rows = [slice(row, row + 1) for row in range(count)]
            found = [
                attend_one(q[row], k_cache, v_cache, cache_lens[row], places=[place])
                for row, place in zip(rows, places, strict=True)
            ]
            return torch.cat(found)
        k_cache, v_cache = k_cache[first : first + count], v_cache[first : first + count]
    length = q.shape[1]
    end = offset + length
    k_cache, v_cache = (dequantised_rows(cache[:, :, :end], q.dtype) for cache in (k_cache, v_cache))
    keys, values = k_cache, v_cache
    if softcap is not None:  # which PyTorch's functions do not have
        return _prefill_by_chains(q, k_cache, v_cache, cache_lens, offset, scale, window, softcap)
    flash = flash_kernel(q)
    if flash is not None:
        seen = window if window is not None and window < end else None
        return flash(q, keys.transpose(1, 2), values.transpose(1, 2), scale, seen)
    if offset > 0 or (window is not None and length > window):
        attend = _prefill_by_chains if q.is_cuda else _prefill_by_mask
        return attend(q, k_cache, v_cache, cache_lens, offset, scale, window)
    out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, is_causal=True, scale=scale, enable_gqa=True)
    return out.transpose(1, 2)


def flash_kernel(q: torch.Tensor) -> Flash | None:
    """Return the flash kernel that serves such queries, None if none does."""
    if not FLASH_PREFILL or not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16):
        return None
    return served_by(q.device, q.dtype, q.shape[-1]).flash


class Served(NamedTuple):
    """What serves prefill: a short name, why it was chosen, and the kernel, None if `tree_attention` serves."""

    name: str
    reason: str
    flash: Flash | None


@functools.cache
def served_by(device: torch.device, dtype: torch.dtype, head_dim: int) -> Served:
    """Return what serves prefill in 16 bits on a GPU; chosen and logged once per device, dtype and head size."""
    passed_over = []
    for name, load in _candidates(device).items():
        try:
            function = load()
            _check(function, device, dtype, head_dim)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a package built for another PyTorch raises whatever it likes
            first_line = str(error).strip().partition("\n")[0]
            passed_over.append(f"not {name}: {type(error).__name__}: {first_line}")
            continue
        chosen = Served(name, "; ".join(["right on a small case", *passed_over]), function)
        break
    else:
        chosen = Served("tree_attention", "; ".join(passed_over), None)
    where = f"{device}, {str(dtype).removeprefix('torch.')}, heads of {head_dim}"
    logger.info("prefill attention on %s: %s (%s)", where, chosen.name, chosen.reason)
    return chosen


def _candidates(device: torch.device) -> dict[str, Callable[[], Flash]]:
    """Return functions that load a flash kernel, by its name, the preferred ones first."""
    found: dict[str, Callable[[], Flash]] = {}
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9:
        found["flash-attn 3"] = functools.partial(_from_package, "flash_attn_interface")
    found["flash-attn 2"] = functools.partial(_from_package, "flash_attn")
    found["PyTorch's flash kernel"] = lambda: _of_pytorch
    return found


def _from_package(module: str) -> Flash:
    """Return the kernel of a flash-attn package, which takes the cache's strides as they are."""
    kernel = importlib.import_module(module).flash_attn_func

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
        # The window's ends are inclusive, and relative to the query's own position.
        left = -1 if window is None else window - 1
        out = kernel(q, k, v, softmax_scale=scale, causal=True, window_size=(left, -1 if window is None else 0))
        return out[0] if isinstance(out, tuple) else out  # early releases of version 3 add the log-sum-exp

    return attend


def _of_pytorch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int | None) -> torch.Tensor:
    """Attend by the kernel that PyTorch's own functions end in.

    Of these functions, `causal_lower_right` has no windows and may make a mask in memory, and `varlen_attn` takes one
    row of a cache at a time and has windows and grouped heads only in new versions. Like it, this passes "causal" as
    false with a window, which ends at the query.
    """
    left, right = (-1, -1) if window is None else (window - 1, 0)
    return torch.ops.aten._flash_attention_forward(
        q, k, v, None, None, q.shape[1], k.shape[1], 0.0, window is None, False,
        scale=scale, window_size_left=left, window_size_right=right,
    )[0]  # fmt: skip


def _check(attend: Flash, device: torch.device, dtype: torch.dtype, head_dim: int) -> None:
    """Raise if a kernel is wrong about three queries after four keys: grouped heads, with and without a window."""
    generator = torch.Generator().manual_seed(0)
    # On the CPU whatever PyTorch's default device is.
    shapes = [(2, rows, heads, head_dim) for rows, heads in ((3, 4), (7, 2), (7, 2))]
    inputs = [torch.randn(shape, generator=generator, device="cpu") for shape in shapes]
    q, k, v = (tensor.to(dtype) for tensor in inputs)
    age = torch.arange(4, 7, device="cpu")[:, None] - torch.arange(7, device="cpu")
    wide_q, wide_k, wide_v = (tensor.float().transpose(1, 2) for tensor in (q, k, v))
    for window in (None, 3):
        visible = (age >= 0) & (age < (window or 7))
        expected = F.scaled_dot_product_attention(
            wide_q, wide_k, wide_v, visible, scale=head_dim**-0.5, enable_gqa=True
        )
        got = attend(q.to(device), k.to(device), v.to(device), head_dim**-0.5, window)
        error = (got.transpose(1, 2).float().cpu() - expected).abs().max().item()
        if not error < 0.05:  # rounding makes a hundredth, one key too many or too few makes tenths
            raise RuntimeError(f"wrong by {error:.2g} on a small case{' with a window' if window else ''}")


def _prefill_by_chains(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_lens: torch.Tensor,
    offset: int,
    scale: float,
    window: int | None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attend by `tree_attention`, piece by piece: the tokens of each piece are a tree that is one chain.

    PyTorch's flash kernels take neither a mask nor, through the public function, a causal diagonal at the lower right;
    its other kernels need the mask in memory, and with grouped heads also the scores. A piece is given the filled rows
    only: the kernel divides the work for the rows that it is given.
    """
    out = torch.empty_like(q)
    for first in range(0, q.shape[1], MAX_NODES):
        piece = q[:, first : first + MAX_NODES]
        nodes = piece.shape[1]
        keys, values = (cache[:, :, : offset + first + nodes] for cache in (k_cache, v_cache))
        out[:, first : first + nodes] = tree_attention(
            piece,
            keys,
            values,
            cache_lens + first,
            chain_words(nodes, q.device),
            scale=scale,
            window=window,
            softcap=softcap,
        )
    return out


def chain_words(nodes: int, device: torch.device) -> torch.Tensor:
    """Return the ancestor words of a chain, each of whose nodes is the child of the one before it: int64 [nodes, W]."""
    return _longest_chain(device)[:nodes, : -(-nodes // WORD)]


@functools.lru_cache(maxsize=16)
def _longest_chain(device: torch.device) -> torch.Tensor:
    return ancestor_words(torch.ones(MAX_NODES, MAX_NODES, dtype=torch.bool).tril()).to(device)


MASKED_PIECE = 256
"""Queries that attend at once under a mask. PyTorch computes what a mask hides: half a piece per query, on average."""


def _prefill_by_mask(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_lens: torch.Tensor,
    offset: int,
    scale: float,
    window: int | None,
) -> torch.Tensor:
    """Attend by PyTorch's function with masks, piece by piece: each piece reads only the rows that one of it sees."""
    out = torch.empty_like(q)
    for first in range(0, q.shape[1], MASKED_PIECE):
        piece = slice(first, first + MASKED_PIECE)
        out[:, piece] = _masked_piece(q[:, piece], k_cache, v_cache, offset + first, scale, window)
    return out


def _masked_piece(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, offset: int, scale: float, window: int | None
) -> torch.Tensor:
    """Attend with a mask of one line of memory, where each row begins one element later.

    Whether a query sees a key depends only on their distance. With the queries in reverse order, the distance depends
    only on row + column, so a view of one line with strides (1, 1) is the whole mask.
    """
    length = q.shape[1]
    start = 0 if window is None else max(0, offset + 1 - window)
    keys, values = k_cache[:, :, start : offset + length], v_cache[:, :, start : offset + length]
    columns = offset - start + length
    age = columns - 1 - torch.arange(columns + length - 1, device=q.device)
    hidden = age < 0 if window is None else (age < 0) | (age >= window)
    line = torch.zeros(age.shape, dtype=q.dtype, device=q.device).masked_fill_(hidden, -torch.inf)
    mask = line.as_strided((length, columns), (1, 1))
    out = F.scaled_dot_product_attention(q.transpose(1, 2).flip(2), keys, values, mask, scale=scale, enable_gqa=True)
    return out.flip(2).transpose(1, 2)
