"""Replay a tree along calibrated texts: the steps that decoding with it would make.

A step starts at a position of the text, accepts the longest path of the tree that matches the text, and adds the
model's own next token; the next step starts after them. Decoding is lossless and writes the same text with any tree, so
the ranks of the text's tokens determine its steps. The first step starts at the prompt's last token, whose next token
comes from the prefill; the last step is cut by the end of the text, as in `MedusaOutput.accept_lengths`.

In float32 these are exactly the steps of decoding. In half precision other trees round sums differently: if two tokens
or two draft tokens are equally likely up to rounding, decoding may pick the other one and continue differently.

Trees with a copied branch and dynamic trees cannot be replayed: ranks do not determine their nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from medusa_decoding.trees.tree import Tree
from medusa_decoding.tuning.calibration import NONE, Calibration, RankPath, Text

Branches = dict[int, "Branches"]
"""A node's children by their rank, each with its own."""


@dataclass(frozen=True)
class Walked:
    """The steps of all texts.

    Attributes:
        tokens: new tokens in the texts of each prompt, without the first one of each text.
        steps: number of steps for the texts of each prompt.
        starts: for each path of ranks, how many steps start at a position that has it.
    """

    tokens: tuple[int, ...]
    steps: tuple[int, ...]
    starts: Counter[RankPath]

    @property
    def tokens_per_step(self) -> float:
        """Tokens over steps; NaN without a step."""
        return sum(self.tokens) / sum(self.steps) if any(self.steps) else float("nan")

    @property
    def by_prompt(self) -> list[tuple[int, int]]:
        """Tokens and steps of each prompt."""
        return list(zip(self.tokens, self.steps, strict=True))


def walk(calibration: Calibration, tree: Tree) -> Walked:
    """Replay a tree along all texts of a calibration.

    Raises:
        ValueError: the heads cannot fill the tree, or it is dynamic or has a copied branch.
    """
    check_walkable(tree)
    tree.check_fits(calibration.num_heads, max(calibration.ranks, tree.top_k))  # others are never right
    branches = branches_of(tree)
    tokens, steps = [], []
    starts: Counter[RankPath] = Counter()
    for of_prompt in calibration.texts:
        begun = [path for text in of_prompt for path in steps_along(text, branches)]
        starts.update(begun)
        tokens.append(sum(map(len, of_prompt)))
        steps.append(len(begun))
    return Walked(tuple(tokens), tuple(steps), starts)


def check_walkable(tree: Tree) -> None:
    """Raise `ValueError` unless ranks determine all steps of the tree."""
    if tree.lookup:
        raise ValueError(f"tree: expected no copied branch, whose tokens no head ranks, got one of {tree.lookup}")
    if tree.keep is not None:
        raise ValueError("tree: expected a static one, got a dynamic one, which has no fixed nodes")


def branches_of(tree: Tree) -> Branches:
    """Return the children of a tree's root, without the copied branch."""
    root: Branches = {}
    for path in tree.choices:
        node = root
        for rank in path[:-1]:
            node = node[rank]
        node[path[-1]] = {}
    return root


def accepted(path: RankPath, branches: Branches) -> int:
    """Return the length of the longest path of the tree that a path of ranks begins with."""
    depth = 0
    for rank in path:
        if rank == NONE or rank not in branches:
            break
        branches, depth = branches[rank], depth + 1
    return depth


def steps_along(text: Text, branches: Branches) -> Iterable[RankPath]:
    """Yield the path of ranks at each position of a text at which a step starts."""
    place = 0
    while place < len(text):
        yield text[place]
        place += 1 + accepted(text[place], branches)
