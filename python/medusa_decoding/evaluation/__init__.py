"""Measuring a model with its heads on prompts: tokens a step, speedups, equal texts, and how often heads are right.

    prompts -> conversation -> run (own_text: heads on the text) -> report (interval)

`prompts` reads files of questions, `conversation` makes token ids of them, `run` writes each text by every way of
decoding, in turn, and `report` adds up.
"""

from medusa_decoding.evaluation.prompts import Prompt, read_prompts
from medusa_decoding.evaluation.report import Evaluation, Figures
from medusa_decoding.evaluation.run import evaluate

__all__ = ["Evaluation", "Figures", "Prompt", "evaluate", "read_prompts"]
