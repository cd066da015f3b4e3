"""Trees as users write them: the argument `--tree` and its equivalents."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from medusa_decoding.trees.tree import Tree

_LOOKUP = "+lookup:"


def parse_tree(text: str) -> Tree | Literal["auto"]:
    """Parse a tree: a file, `chain:4`, `cartesian:7,6`, `root` (plain), `lookup:8`, `dynamic:16,4` (nodes, depth).

    Each may end in `+lookup:8`, unless a file of that whole name exists. `auto` is returned as it is.
    """
    if text == "auto":
        return "auto"
    shape, plus, length = text.rpartition(_LOOKUP)
    try:
        if not plus or Path(text).is_file():
            return _shape(text)
        return _shape(shape).with_lookup(int(length))
    except ValueError as error:
        words = str(error)
        raise ValueError(words if text in words else f"{text!r}: {words}") from error


def _shape(text: str) -> Tree:
    kind, _, rest = text.partition(":")
    if text == "root":
        return Tree([])
    if kind == "lookup":
        return Tree([]).with_lookup(int(rest))
    if kind == "chain":
        return Tree.chain(int(rest))
    if kind == "cartesian":
        return Tree.cartesian([int(width) for width in rest.split(",")])
    if kind == "dynamic":
        numbers = [int(number) for number in rest.split(",")]
        if len(numbers) not in (2, 3):
            raise ValueError("expected NODES,DEPTH or NODES,DEPTH,DRAFTS")
        return Tree.dynamic(*numbers)
    if not Path(text).is_file():
        raise ValueError(
            "expected a JSON file, root, chain:LENGTH, lookup:LENGTH, cartesian:WIDTH,WIDTH.., dynamic:NODES,DEPTH or "
            f"auto, got {text!r}"
        )
    return Tree.load(text)
