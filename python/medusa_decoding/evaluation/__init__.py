"""Measure a model with its heads on prompts: tokens per step, speedups, equal texts, and how often heads are right.

`prompts` reads files of questions, `run` writes each text by every way of decoding in turn, `own_text` measures the
heads on it, and `report` adds up, with the bootstrap of `interval`.
"""

from medusa_decoding.evaluation.prompts import Prompt, read_prompts
from medusa_decoding.evaluation.report import Evaluation, Figures
from medusa_decoding.evaluation.run import evaluate

__all__ = ["Evaluation", "Figures", "Prompt", "evaluate", "read_prompts"]
