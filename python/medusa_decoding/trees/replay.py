"""Walking a tree along texts: the steps that decoding with it makes.

A step starts at a position of the text, accepts the longest path of the tree that the text goes along with, and commits
its tokens and the model's own next one; the next step starts behind the accepted ones. As decoding is lossless, it
writes the same text with any tree, so that the ranks of the text's tokens (see `accuracy`) are all it takes to know its
steps. The first step starts at the prompt's last token, whose next one is prefill's; the last one is cut short by the
text's end, as in `MedusaOutput.accept_lengths`.

In float32 these are the very steps. In half precision sums are rounded otherwise for other trees: where two tokens, or
two of a head's drafts, are as likely but for that, decoding may write another one and step otherwise from there on.

This module knows ranks and trees, not models. A branch of copied tokens has no ranks, and which nodes of a dynamic tree
a step verifies they do not tell: neither is walked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from medusa_decoding.trees.calibration import NONE, Calibration, RankPath, Text
from medusa_decoding.trees.tree import Tree

Branches = dict[int, "Branches"]
"""A node's children by their rank, each with its own."""


@dataclass(frozen=True)
class Walked:
    """The steps of all texts.

    Attributes:
        tokens: committed by the steps of each prompt's texts: all new tokens but each text's first.
        steps: made for each prompt's texts.
        starts: how many steps start at a position with each path of ranks.
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
    """Walk a tree along all texts of a calibration.

    Raises:
        ValueError: a calibration that has no texts; a tree that the heads cannot fill, with ranks that were not looked
            at, dynamic, or with a copied branch.
    """
    texts = texts_of(calibration)
    check_walkable(tree)
    tree.check_fits(calibration.num_heads, calibration.ranks)
    branches = branches_of(tree)
    tokens, steps = [], []
    starts: Counter[RankPath] = Counter()
    for of_prompt in texts:
        begun = [path for text in of_prompt for path in steps_along(text, branches)]
        starts.update(begun)
        tokens.append(sum(map(len, of_prompt)))
        steps.append(len(begun))
    return Walked(tuple(tokens), tuple(steps), starts)


def check_walkable(tree: Tree) -> None:
    """Raise `ValueError` unless ranks tell all of a tree's steps."""
    if tree.lookup:
        raise ValueError(f"tree: expected no copied branch, whose tokens no head ranks, got one of {tree.lookup}")
    if tree.keep is not None:
        raise ValueError("tree: expected a static one, got a dynamic one, whose nodes are another step's others")


def texts_of(calibration: Calibration) -> tuple[tuple[Text, ...], ...]:
    """Return the texts of a calibration.

    Raises:
        ValueError: it has none.
    """
    if calibration.texts is None:
        raise ValueError(
            "calibration: expected one with its texts, to walk along (`medusa calibrate` again writes them), got one "
            "that was made before they were kept"
        )
    return calibration.texts


def branches_of(tree: Tree) -> Branches:
    """Return the children of a tree's root; copied tokens are left out."""
    root: Branches = {}
    for path in tree.choices:
        node = root
        for rank in path[:-1]:
            node = node[rank]
        node[path[-1]] = {}
    return root


def accepted(path: RankPath, branches: Branches) -> int:
    """Return how deep a tree goes along with a path of ranks."""
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
