"""Compare the tokens per step that decoding makes with what a calibration on other prompts expects of the tree.

Two samples of prompts differ by chance. The expectation is as uncertain as the measurement, and the interval of their
ratio accounts for both. This module does not know how trees are searched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from medusa_decoding.calibration.expected import Expected, expect
from medusa_decoding.calibration.texts import Writer
from medusa_decoding.evaluation import interval
from medusa_decoding.evaluation.interval import Interval
from medusa_decoding.evaluation.prompts import Prompt
from medusa_decoding.trees.calibration import Calibration
from medusa_decoding.trees.replay import walk
from medusa_decoding.trees.tree import Tree


@dataclass(frozen=True)
class Validation:
    """Tokens per step of one tree as expected by a calibration, and as measured by decoding, in `steps` steps.

    `ratio` is the walked expectation over the measurement; its interval accounts for the chance in both.
    """

    tree: Tree
    expected: Expected
    measured: Interval
    steps: int
    ratio: Interval

    def to_json(self) -> dict[str, Any]:
        """Return all as JSON values."""
        figures = {name: asdict(getattr(self, name)) for name in ("expected", "measured", "ratio")}
        return {"nodes": self.tree.num_nodes, "tree": self.tree.choices, "steps": self.steps, **figures}


def validate(
    calibration: Calibration,
    writer: Writer,
    prompts: Sequence[Prompt],
    tree: Tree,
    on_prompt: Callable[[], object] = lambda: None,
) -> Validation:
    """Answer prompts with a tree, and compare the steps with what a calibration with texts of other prompts expects.

    `on_prompt` is called after each prompt, for a progress bar.

    Raises:
        ValueError: a calibration without texts, or no step made.
    """
    rows = []  # tokens and steps of each prompt; the tokens of prefills are not counted
    for number, prompt in enumerate(prompts):
        lengths = [one.accept_lengths for one in writer.answers(prompt, number, tree) if one is not None]
        steps = sum(map(len, lengths))
        rows.append((steps + sum(map(sum, lengths)), steps))
        on_prompt()
    measured = interval.ratio(rows)
    if measured is None:
        raise ValueError("prompts: none leaves room for more than one new token")
    ratio = interval.ratio_of_two(walk(calibration, tree).by_prompt, rows)
    return Validation(tree, expect(calibration, tree), measured, sum(steps for _, steps in rows), ratio)
