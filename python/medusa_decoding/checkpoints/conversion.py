"""Check what a format can hold, and convert heads for it: storage, dtype, order of the rows.

This module does not know files.
"""

from __future__ import annotations

import torch

from medusa_decoding.checkpoints.layout import DTYPES, unpack
from medusa_decoding.heads import MedusaHeads, Storage


def check_holds(heads: MedusaHeads, target: str) -> None:
    """Raise `ValueError` if a format cannot hold such heads; the message says what can be done."""
    if target in ("native", "embedded"):
        return
    anywhere, wanted, got = "native and embedded hold it", None, None
    if heads.parent_rank:
        wanted = (
            f"none whose drafts depend on their parent token for {target} ({anywhere}; heads trained with "
            "heads.parent_rank 0 have none)"
        )
        got = f"parent_rank {heads.parent_rank}"
    elif heads.storage != "float":
        wanted = f"projections in floats for {target} ({anywhere}; storage float, --storage float, turns them back)"
        got = heads.storage
    elif heads.token_map is not None and not (target == "vllm" and heads.shared_projection):
        wanted = f"the whole vocabulary for {target} ({anywhere}; what a trimmed one never proposes has no projection)"
        got = f"{heads.num_candidates} of {heads.vocab_size} tokens"
    elif target == "original-v2" and not heads.shared_projection:
        wanted, got = f"a projection shared with lm_head for {target} (original-v1 holds own ones)", "own"
    elif target == "original-v2" and heads.num_layers > 1:
        wanted = (
            f"one residual block per head for {target} ({anywhere}; the original project's code makes one block of "
            "several)"
        )
        got = f"{heads.num_layers}"
    if wanted is not None:
        raise ValueError(f"heads: expected {wanted}, got {got}")


def converted(heads: MedusaHeads, storage: Storage | None, dtype: torch.dtype | None) -> MedusaHeads:
    """Return heads with another storage of the projections and another dtype.

    Raises:
        ValueError: an unknown storage or dtype, a shared projection to be stored in 8 bits, 8 bits of another kind, or
            numbers too large for the dtype.
    """
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype: expected float16, bfloat16, float32 or None, got {dtype}")
    if storage not in (None, "float", "int8", "fp8"):
        raise ValueError(f"storage: expected 'float', 'int8', 'fp8' or None, got {storage!r}")
    wanted = heads.w1.dtype if dtype is None else dtype
    if storage in (None, heads.storage):
        found = heads.to(wanted)
    elif storage == "float":
        found = heads.remade(dtype=wanted)
        stored, scale, floats = heads.get_buffer("w2"), heads.get_buffer("w2_scale"), found.get_parameter("w2")
        for head in range(heads.num_heads):
            floats[head] = stored[head].float() * scale[head, :, None]
    else:
        # Quantised before the conversion, so that weights are rounded once.
        found = heads.quantized(storage).to(wanted)
    for name, weight in unpack(found).items():
        # Weights in 8 bits have not been converted.
        if weight.is_floating_point() and weight.element_size() > 1 and not bool(weight.isfinite().all()):
            raise ValueError(f"dtype: expected one that holds {name}, got {dtype}, in which it is not finite")
    return found


def in_order(heads: MedusaHeads) -> MedusaHeads:
    """Return heads without a token_map if theirs covers the whole vocabulary: rows in the order of token ids.

    vLLM's format and the original ones have no token_map. Other heads are returned unchanged.
    """
    mapped = heads.token_map
    if mapped is None or len(mapped) != heads.vocab_size or heads.storage != "float" or heads.parent_rank:
        return heads
    found = heads.remade(token_map=None)
    if not heads.shared_projection:
        found.get_parameter("w2")[:, mapped] = heads.get_parameter("w2")
    return found
