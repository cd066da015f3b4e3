"""Cache a model's MedusaModels between calls of transformers' `generate`, while the model itself stays unpatched.

Between calls a MedusaModel is suspended: the model has its own attention modules again, and caches, compiled and
captured steps, and heads read from a folder are kept.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from torch import nn

from medusa_decoding.backbone.generation_lock import lock_of
from medusa_decoding.decode.runtime.steps import Backend
from medusa_decoding.heads import MedusaHeads
from medusa_decoding.model import MedusaModel

MAX_CACHED = 2
"""How many MedusaModels are cached per model, the most recently used ones."""

# From a model to its heads (an object, or the name of a checkpoint) with the dtype of activations to the MedusaModel. A
# suspended MedusaModel does not keep its base model alive, so an entry is deleted with its model.
_cache: weakref.WeakKeyDictionary[nn.Module, dict[Any, MedusaModel]] = weakref.WeakKeyDictionary()
_cache_lock = threading.RLock()


@contextlib.contextmanager
def borrow_model(
    model: nn.Module,
    heads: MedusaHeads | str | Path | None,
    backend: Backend = "auto",
    cache_dtype: Literal["int8"] | None = None,
    activation_dtype: Literal["int8"] | None = None,
) -> Iterator[MedusaModel]:
    """Yield a MedusaModel of a model for one call, the one cached by the last such call if there is one.

    It is cached by heads and `activation_dtype`. `backend` and `cache_dtype` say how it runs in this call, and which
    stored tuning is looked for when it is made.

    Calls of several threads wait for each other. A MedusaModel in use is not in the cache: a call within a call gets
    another one.
    """
    if not isinstance(heads, (MedusaHeads, str, Path)):
        raise ValueError(f"heads: expected MedusaHeads, or a folder or hub id of heads, got {type(heads).__name__}")
    key: Any = heads
    if not isinstance(heads, MedusaHeads):
        folder = Path(heads).expanduser()
        key = str(folder.resolve() if folder.is_dir() else heads)
    key = key, activation_dtype
    with lock_of(getattr(model, "model", model)).held():
        with _cache_lock:
            medusa = _cache.get(model, {}).pop(key, None)
        if medusa is None or not _resumed(medusa, model):
            medusa = (
                MedusaModel(model, heads, activation_dtype=activation_dtype)
                if isinstance(heads, MedusaHeads)
                else MedusaModel.from_pretrained(
                    heads, model, backend=backend, cache_dtype=cache_dtype, activation_dtype=activation_dtype
                )
            )
        medusa.backend = backend
        try:
            medusa.cache_dtype = cache_dtype
            yield medusa
        finally:
            medusa.suspend()
            with _cache_lock:
                cached = _cache.setdefault(model, {})
                cached[key] = medusa
                dropped = [cached.pop(oldest) for oldest in list(cached)[:-MAX_CACHED]]
            for one in dropped:
                one.undo()


def _resumed(medusa: MedusaModel, model: Any) -> bool:
    """Resume a cached MedusaModel, unless the model has been moved, cast or given other layers since."""
    backbone, heads = medusa.backbone, medusa.heads
    same_layers = backbone.decoder is model.model and backbone.swap.layers == list(model.model.layers)
    if same_layers and heads is not None:
        medusa.resume()
        expected = backbone.device, backbone.dtype, backbone.vocab_size
        if (heads.w1.device, heads.w1.dtype, heads.vocab_size) == expected:
            return True
    medusa.undo()
    return False
