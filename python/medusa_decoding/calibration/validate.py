"""Tokens a step that decoding really makes on prompts, beside what a calibration on other prompts expects of the tree.

Two samples of prompts differ by chance: what is expected is as uncertain as what is measured, and their ratio has an
interval that counts both. This module does not know how trees are searched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from medusa_decoding.calibration.expected import Expected, expect
from medusa_decoding.calibration.texts import Writer
from medusa_decoding.evaluation import interval
from medusa_decoding.evaluation.interval import Interval
from medusa_decoding.evaluation.prompts import Prompt
from medusa_decoding.trees.calibration import Calibration
from medusa_decoding.trees.replay import walk
from medusa_decoding.trees.tree import Tree

Rows = Sequence[tuple[int, int]]
"""Tokens and steps of each prompt."""


@dataclass(frozen=True)
class Beside:
    """One tree.

    Attributes:
        tree: the tree.
        expected: by the calibration.
        measured: tokens a step of the steps that were made.
        steps: how many those were.
        ratio: walked expectation over measurement, with an interval that counts the chance in both.
    """

    tree: Tree
    expected: Expected
    measured: Interval
    steps: int
    ratio: Interval

    def to_json(self) -> dict[str, Any]:
        """Return all as JSON has it."""
        return {
            "nodes": self.tree.num_nodes,
            "tree": self.tree.choices,
            "expected": self.expected.to_json(),
            "measured": self.measured.to_json(),
            "steps": self.steps,
            "ratio": self.ratio.to_json(),
        }


def steps_made(
    writer: Writer, prompts: Sequence[Prompt], tree: Tree, on_prompt: Callable[[], object] = lambda: None
) -> list[tuple[int, int]]:
    """Have each prompt answered with a tree.

    Args:
        writer: has the model write.
        prompts: what is asked.
        tree: verified each step.
        on_prompt: called behind each prompt, for a progress bar.

    Returns:
        Tokens and steps of each prompt; the tokens of prefills are not counted.
    """
    rows = []
    for number, prompt in enumerate(prompts):
        written = [one.accepted for one in writer.answers(prompt, number, tree) if one is not None]
        steps = sum(map(len, written))
        rows.append((steps + sum(map(sum, written)), steps))
        on_prompt()
    return rows


def beside(calibration: Calibration, tree: Tree, rows: Rows) -> Beside:
    """Put what is expected of a tree beside the steps that were made with it.

    Raises:
        ValueError: a calibration without texts, or no step made.
    """
    measured = interval.ratio(rows)
    if measured is None:
        raise ValueError("prompts: expected some with room for more than one new token, got none")
    ratio = interval.ratio_of_two(walk(calibration, tree).by_prompt, rows)
    return Beside(tree, expect(calibration, tree), measured, sum(steps for _, steps in rows), ratio)
