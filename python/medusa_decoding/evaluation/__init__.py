"""Measure a model with its heads on prompts: tokens per step, speedups, equal texts, and how often heads are right.

`prompts` reads files of questions, `run` writes each text by every way of decoding in turn, `own_text` measures the
heads on it, and `report` adds up, with the bootstrap of `interval`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medusa_decoding.evaluation.prompts import Prompt, read_prompts
    from medusa_decoding.evaluation.report import Evaluation, Figures
    from medusa_decoding.evaluation.run import evaluate

__all__ = ["Evaluation", "Figures", "Prompt", "evaluate", "read_prompts"]

_MODULES = {
    "Evaluation": "report", "Figures": "report", "Prompt": "prompts", "evaluate": "run", "read_prompts": "prompts",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    # Imported at first use: intervals and tables are printed without a model, so without transformers.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
