"""Training Medusa heads: data, losses, the loop, and the configuration (Medusa paper, sections 2.2, 2.3.2 and B).

    records -> examples -> rows -> hidden states -> loss        -> step       -> checkpoint, heads, card
    data.py    chat.py     packing.py  backbone.py  objective.py   trainer.py    saving.py, recipe.py, card.py

`losses` are what an objective is made of (`targets`: of what; `chunked`: without all logits), `schedules` says how
rates and weights move, `processes` who else computes, `config` holds every setting with its source (`strict` reads it).
A run from its configuration is `train(Config.read(FILE))`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from medusa_decoding.training.config import Config

if TYPE_CHECKING:
    from medusa_decoding.training.loop.recipe import Result


def train(config: Config, **options: Any) -> Result:
    """Train as a configuration says; see `recipe.train`, whose arguments these are."""
    from medusa_decoding.training.loop import recipe  # its libraries are for training alone

    return recipe.train(config, **options)


__all__ = ["Config", "train"]
