"""Medusa decoding for Llama-family models of Hugging Face Transformers.

Extra heads draft several next tokens, one forward pass verifies a tree of them, and the longest path that the model
agrees with is kept: the text that the model alone would write, in fewer steps.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medusa_decoding.backbone.kv_cache import TreeCache
    from medusa_decoding.generation.output import MedusaOutput
    from medusa_decoding.generation.session import Session
    from medusa_decoding.heads import MedusaHeads
    from medusa_decoding.huggingface.custom_generate import medusa_generate
    from medusa_decoding.model import MedusaModel
    from medusa_decoding.trees.tree import Tree

__all__ = ["MedusaHeads", "MedusaModel", "MedusaOutput", "Session", "Tree", "TreeCache", "medusa_generate"]

_MODULES = {
    "MedusaHeads": "heads",
    "MedusaModel": "model",
    "MedusaOutput": "generation.output",
    "Session": "generation.session",
    "Tree": "trees.tree",
    "TreeCache": "backbone.kv_cache",
    "medusa_generate": "huggingface.custom_generate",
}


def __getattr__(name: str) -> Any:
    # Imported at first use, so that the command line is in control (Ctrl-C, errors) before torch is imported.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def moved(old: str, new: str) -> Callable[[str], Any]:
    """Return `__getattr__` of a module `old` that is called `new` now: names are found there, with a warning."""

    def find(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        warnings.warn(f"{old} is {new} now", DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(new), name)

    return find


def __dir__() -> list[str]:
    return [*globals(), *__all__]
