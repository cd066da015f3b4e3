"""What calls of transformers' `generate` with heads leave for the next call, while the model itself stays unpatched.

A model's MedusaModel is suspended between calls: its attention modules are the model's own again, and caches, compiled
and captured steps, and heads read from a folder wait. This module does not know how transformers calls.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from medusa_decoding.backbone.backbone import Backbone
from medusa_decoding.backbone.generation_lock import lock_of
from medusa_decoding.checkpoints import read_heads
from medusa_decoding.heads import MedusaHeads
from medusa_decoding.model import DEFAULT_TREE_FILE, MedusaModel
from medusa_decoding.trees.tree import Tree

KEPT_HEADS = 2
"""Sets of heads for which a model's MedusaModel is kept, the most recently used ones."""

# A model to its heads (an object, or the name of a checkpoint) to what runs them. A suspended MedusaModel does not keep
# its base model alive, so that an entry goes with its model.
_kept: weakref.WeakKeyDictionary[nn.Module, dict[Any, MedusaModel]] = weakref.WeakKeyDictionary()
_taking = threading.RLock()


@contextlib.contextmanager
def borrow_model(model: nn.Module, heads: MedusaHeads | str | Path | None) -> Iterator[MedusaModel]:
    """Swap a model's attention for the time of a call, with what was kept of the last call with these heads.

    Calls of several threads wait for each other. What is in use is nowhere else: a call within a call gets a
    MedusaModel of its own.

    Raises:
        ValueError: no heads, a checkpoint that cannot be read, or heads or a model that do not fit.
    """
    if not isinstance(heads, (MedusaHeads, str, Path)):
        raise ValueError(f"heads: expected MedusaHeads, or a folder or hub id of heads, got {type(heads).__name__}")
    key = heads if isinstance(heads, MedusaHeads) else _name(heads)
    with lock_of(getattr(model, "model", model)).held():
        with _taking:
            medusa = _kept.get(model, {}).pop(key, None)
        if medusa is None or not _resumed(medusa, model):
            medusa = MedusaModel(model, heads) if isinstance(heads, MedusaHeads) else _read(model, heads)
        try:
            yield medusa
        finally:
            medusa.suspend()
            with _taking:
                kept = _kept.setdefault(model, {})
                kept[key] = medusa
                dropped = [kept.pop(oldest) for oldest in list(kept)[:-KEPT_HEADS]]
            for one in dropped:
                one.undo()


def _name(heads: str | Path) -> str:
    folder = Path(heads).expanduser()
    return str(folder.resolve() if folder.is_dir() else heads)


def _read(model: nn.Module, heads: str | Path) -> MedusaModel:
    backbone = Backbone(model)  # refuses what has no use for heads, before gigabytes of them are read
    backbone.swap.undo()
    checkpoint = read_heads(heads, hidden_size=backbone.config.hidden_size, vocab_size=backbone.vocab_size)
    tree = checkpoint.path / DEFAULT_TREE_FILE
    return MedusaModel(
        model,
        checkpoint.heads.place(backbone.device, backbone.dtype),
        Tree.load(tree) if tree.is_file() else None,
    )


def _resumed(medusa: MedusaModel, model: Any) -> bool:
    """Resume what was kept, unless the model has become another since: moved, cast, or given other layers."""
    backbone, heads = medusa.backbone, medusa.heads
    same_layers = backbone.decoder is model.model and backbone.swap.layers == list(model.model.layers)
    if same_layers and heads is not None:
        medusa.resume()
        if (heads.w1.device, heads.w1.dtype, heads.vocab_size) == (
            backbone.device,
            backbone.dtype,
            backbone.vocab_size,
        ):
            return True
    medusa.undo()
    return False


def forget(model: nn.Module) -> None:
    """Free what calls have kept of a model: caches, compiled and captured steps, heads read from folders."""
    with _taking:
        forgotten = _kept.pop(model, {})
    for medusa in forgotten.values():
        medusa.undo()


__all__ = ["KEPT_HEADS", "borrow_model", "forget"]
