"""Draw trees as text, like the Medusa paper's figure 6: nodes by depth, likelier ones darker.

The least likely nodes are left out if the tree is wider than the terminal.
"""

from __future__ import annotations

import heapq
import math
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from medusa_decoding.trees.tree import Tree

LEAST_WIDTH = 20
SHADES = ((0.3, "█"), (0.1, "▓"), (0.03, "▒"), (0.0, "░"))
"""The least share of each shade."""
ROOT, COPIED, MORE = "●", "◇", "…"
PLAIN_CHARACTERS = str.maketrans("█▓▒░●◇…│─┌┬┐┴┼", "#*+.oc~|-+++++")
"""Replacements for terminals that only show ASCII."""
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"


def path_shares(tree: Tree, accuracies: Sequence[Sequence[float]]) -> list[float]:
    """Return the probability of each of a tree's choices, for independent heads (Medusa paper, section 2.3.3)."""
    tree.expected_tokens(accuracies)  # which checks them
    return [math.prod(accuracies[head][rank] for head, rank in enumerate(path)) for path in tree.choices]


@dataclass
class _Node:
    """A node as it is drawn.

    Attributes:
        mark: its character.
        weight: nodes with the lowest weight are left out first.
        left_out: children that are not drawn.
    """

    mark: str
    weight: float
    depth: int
    parent: _Node | None = None
    children: list[_Node] = field(default_factory=list)
    left_out: list[_Node] = field(default_factory=list)
    column: int = 0

    def below(self) -> Iterator[_Node]:
        """Yield the node and all drawn below it, from left to right."""
        yield self
        for child in self.children:
            yield from child.below()


def as_text(tree: Tree, width: int = 80, shares: Sequence[float] | None = None) -> str:
    """Return the drawing of a tree for a terminal of `width` columns, without a final line break.

    Shares are how likely each of the tree's choices is right, ancestors included. Nodes are shaded by them; without
    them they are marked by their rank among the draft tokens of their head.
    """
    if width < LEAST_WIDTH:
        raise ValueError(f"width: expected at least {LEAST_WIDTH} columns, got {width}")
    nodes = _nodes(tree, shares)
    root = nodes[0]
    margin = len(str(tree.depth)) + 1
    hidden = _leave_out(root, (width - margin + 1) // 2)
    drawn = list(root.below())
    leaves = sum(not node.children for node in drawn)
    _place(root, max(2, min(4, (width - margin - 1) // max(1, leaves - 1))))
    lines = []
    for depth in range(max(node.depth for node in drawn) + 1):
        level = [node for node in drawn if node.depth == depth]
        if depth:
            lines.append(" " * margin + _row(_edges([node for node in drawn if node.depth == depth - 1])))
        lines.append(f"{depth:>{margin - 1}} " + _row({node.column: node.mark for node in level}))
    words = [_title(tree, shares), _legend(tree, shares)]
    if hidden:
        words.append(f"{MORE} stands for {hidden} of {len(nodes)} nodes that are not drawn, the least likely ones.")
    return "\n".join([*lines, "", *(line for text in words for line in textwrap.wrap(text, width))])


def _nodes(tree: Tree, shares: Sequence[float] | None) -> list[_Node]:
    """Return the nodes to draw, in the tree's own order: the root first, a copied branch last."""
    if shares is not None and len(shares) != len(tree.choices):
        raise ValueError(f"shares: expected one for each of {len(tree.choices)} choices, got {len(shares)}")
    root = _Node(ROOT, math.inf, 0)
    known: dict[tuple[int, ...], _Node] = {(): root}
    for number, path in enumerate(tree.choices):
        share = None if shares is None else shares[number]
        mark = _DIGITS[path[-1]] if path[-1] < len(_DIGITS) else "+"
        if share is not None:
            mark = next(shade for least, shade in SHADES if share >= least)
        # Without shares, low ranks near the root are taken for likelier.
        weight = share if share is not None else -float(sum(path) + len(path))
        known[tuple(path)] = _below(known[tuple(path[:-1])], mark, weight)
    nodes = list(known.values())
    last = root
    for depth in range(1, tree.lookup + 1):
        last = _below(last, COPIED, -float(depth))
        nodes.append(last)
    return nodes


def _below(parent: _Node, mark: str, weight: float) -> _Node:
    node = _Node(mark, weight, parent.depth + 1, parent)
    parent.children.append(node)
    return node


def _leave_out(root: _Node, columns: int) -> int:
    """Remove the least likely nodes, leaves first, until the tree fits; return how many are not drawn."""
    # Of nodes with the same weight, deeper ones and those further right go first.
    places = {id(node): place for place, node in enumerate(root.below())}

    def entry(node: _Node) -> tuple[float, int, int, _Node]:
        return node.weight, -node.depth, -places[id(node)], node

    order = [entry(node) for node in root.below() if not node.children]
    heapq.heapify(order)
    while sum(not node.children or bool(node.left_out) for node in root.below()) > columns:
        node = heapq.heappop(order)[-1]
        assert node.parent is not None  # the root alone has room
        node.parent.children.remove(node)
        node.parent.left_out.append(node)
        if not node.parent.children:
            heapq.heappush(order, entry(node.parent))
    drawn = list(root.below())
    for node in drawn:
        if node.left_out:
            _below(node, MORE, 0.0)
    return len(places) - len(drawn)


def _place(root: _Node, pitch: int) -> None:
    """Set the columns: leaves side by side, other nodes above the middle of their children."""
    column = 0
    for node in root.below():
        if not node.children:
            node.column = column
            column += pitch
    for node in reversed(list(root.below())):
        if node.children:
            node.column = (node.children[0].column + node.children[-1].column) // 2


def _edges(parents: Sequence[_Node]) -> dict[int, str]:
    """Return the characters between parents and their children."""
    row: dict[int, str] = {}
    for parent in parents:
        columns = [child.column for child in parent.children]
        if len(columns) == 1:
            row[columns[0]] = "│"
        elif columns:
            row |= dict.fromkeys(range(columns[0], columns[-1] + 1), "─")
            row |= dict.fromkeys(columns, "┬") | {columns[0]: "┌", columns[-1]: "┐"}
            row[parent.column] = "┼" if parent.column in columns else "┴"
    return row


def _row(characters: dict[int, str]) -> str:
    return "".join(characters.get(column, " ") for column in range(max(characters, default=-1) + 1))


def _title(tree: Tree, shares: Sequence[float] | None) -> str:
    copied = f", {tree.lookup} of them copied from the text" if tree.lookup else ""
    if tree.keep is not None:  # accuracies do not tell which of them a step verifies
        candidates = 1 + len(tree.choices) + tree.lookup
        return f"{tree.num_nodes} nodes per step{copied}, of {candidates} candidates, depth {tree.depth}."
    tokens = "" if shares is None else f"; {1 + math.fsum(shares):.3f} tokens per step expected"
    return f"{tree.num_nodes} nodes{copied}, depth {tree.depth}{tokens}."


def _legend(tree: Tree, shares: Sequence[float] | None) -> str:
    words = [f"{ROOT} root"]
    if shares is None:
        words += ["digits (a is 10): rank among the drafts of the head of that depth"] if tree.choices else []
    else:
        words += ["right at " + ", ".join(f"{shade} {least:.0%} or more" for least, shade in SHADES[:-1])]
        words[-1] += f", {SHADES[-1][1]} fewer of the positions"
    return "; ".join(words + ([f"{COPIED} copied"] if tree.lookup else [])) + "."
