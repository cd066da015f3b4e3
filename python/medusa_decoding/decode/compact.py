"""Compact: accepted cache rows moved in place behind the prefix, in every layer, and the lengths advanced."""

from __future__ import annotations

import torch

from medusa_decoding.cache import TreeCache
from medusa_kernels import kv_compact


def compact(cache: TreeCache, path: torch.Tensor, accepted: torch.Tensor, finished: torch.Tensor) -> None:
    """Keep the rows of the accepted path: path int64 [B, P], accepted int32 [B], finished bool [B].

    A finished row keeps its length, so that the further passes it is carried through overwrite one place.
    """
    kept = accepted.masked_fill(finished, -1)
    kv_compact(cache.kv, cache.lengths, path.to(torch.int32), kept)
    cache.lengths += kept + 1
