"""Compact: move accepted cache rows in place to the end of the prefix, in every layer."""

from __future__ import annotations

import torch

from medusa_decoding.backbone.kv_cache import TreeCache
from medusa_kernels import kv_compact


def compact(cache: TreeCache, path: torch.Tensor, accept_lens: torch.Tensor, cache_lens: torch.Tensor) -> None:
    """Keep the cache rows of the accepted path.

    The other arguments are what `accept` returned. A row that had ended keeps its length, so the further passes it
    takes part in overwrite the same cache rows.
    """
    kv_compact(cache.kv, cache_lens, path, accept_lens, slots=cache.slots)
