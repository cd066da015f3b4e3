"""Training Medusa heads (Medusa paper, sections 2.2, 2.3.2 and B).

    records -> examples -> rows     -> hidden states -> loss         -> step    -> checkpoints -> results
    data/      data/       loop/rows   loop/backbone    loop/objective  loop/trainer  loop/saving   loop/run

`loss/` has the losses, `config` every setting with its source, and `loop/run` is a whole run, which
`train(Config.read(FILE))` starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from medusa_decoding.training.config import Config

if TYPE_CHECKING:
    from medusa_decoding.training.loop.run import Result


def train(config: Config, **options: Any) -> Result:
    """Train as a configuration says; `options` are the arguments of `loop.run.train`."""
    from medusa_decoding.training.loop import run  # imports libraries that only training needs

    return run.train(config, **options)


__all__ = ["Config", "train"]
