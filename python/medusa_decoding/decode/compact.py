"""Compact: accepted cache rows moved in place behind the prefix, in every layer."""

from __future__ import annotations

import torch

from medusa_decoding.backbone.kv_cache import TreeCache
from medusa_kernels import kv_compact


def compact(cache: TreeCache, path: torch.Tensor, kept: torch.Tensor, lengths: torch.Tensor) -> None:
    """Keep the rows of the accepted path: path int32 [B, P], kept int32 [B], lengths int32 [B] before the step.

    A row that had ended (kept -1) keeps its length, so that the further passes it is carried through overwrite one
    place.
    """
    kv_compact(cache.kv, lengths, path, kept)
