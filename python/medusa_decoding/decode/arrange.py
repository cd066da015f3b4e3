"""Arrange: root, guesses and copied tokens laid out as the tree's tokens (Medusa paper, section 2.1.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from medusa_decoding.decode.lookup import look_up
from medusa_decoding.decode.state import DecodeState
from medusa_decoding.heads import Children
from medusa_decoding.tree import Tree


@dataclass
class TreeOnDevice:
    """A tree's tensors on a device, made once with the tree's step.

    Attributes:
        tree: the shape itself.
        parents: int32 [N]; -1 for the root.
        depths: int32 [N].
        ancestors: int64 [N, W] bit words.
        paths: int64 [N, depth + 1].
        slots: int64 [choices], where node i + 1's token stands in the flattened guesses [K * top_k].
        top_k: guesses a head.
        children: the nodes below each node, on the host.
        levels: for each depth from 1 the guessed nodes there, in their order: int64 [n] places of their parents among
            the nodes one level higher, int64 [n] ranks.
    """

    tree: Tree
    parents: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor
    paths: torch.Tensor
    slots: torch.Tensor
    top_k: int
    children: list[list[int]]
    levels: list[tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def make(cls, tree: Tree, device: torch.device) -> TreeOnDevice:
        """Copy a tree to a device."""
        top_k = max(tree.top_k, 1)
        guessed = slice(1, 1 + len(tree.choices))
        slots = (tree.depths[guessed] - 1) * top_k + tree.ranks[guessed]
        children: list[list[int]] = [[] for _ in range(tree.num_nodes)]
        for node, parent in enumerate(tree.parents.tolist()):
            if parent >= 0:
                children[parent].append(node)
        return cls(
            tree,
            tree.parents.to(device),
            tree.depths.to(device),
            tree.ancestors.to(device),
            tree.paths.long().to(device),
            slots.long().to(device),
            top_k,
            children,
            _levels(tree, device),
        )


def arrange(state: DecodeState, guesses: torch.Tensor | Children | None, shape: TreeOnDevice) -> torch.Tensor:
    """Lay tokens out in node order: the root, guesses int64 [B, K, top_k], what is copied from the text -> [B, N]."""
    parts = [state.root[:, None]]
    if isinstance(guesses, Children):
        parts += _depth_by_depth(guesses, shape)
    elif guesses is not None:
        parts.append(guesses.flatten(1)[:, shape.slots])
    if shape.tree.lookup:
        assert state.text is not None, "the loop gives a state its text where a tree copies from it"
        parts.append(look_up(state.text, state.output, state.count, shape.tree.lookup))
    return torch.cat(parts, dim=1)


def _depth_by_depth(guesses: Children, shape: TreeOnDevice) -> list[torch.Tensor]:
    """Return the tokens of each depth, [B, n]: the child of rank r is the r-th best behind its parent's candidate."""
    found, order = [], guesses.order.flatten(2)
    places = torch.zeros_like(guesses.tokens[:, 0, :1])  # the root, whose row is the first (they are all equal)
    for depth, (parents, ranks) in enumerate(shape.levels):
        places = order[:, depth].gather(1, places[:, parents] * shape.top_k + ranks)
        found.append(guesses.tokens[:, depth].gather(1, places))
    return found


def _levels(tree: Tree, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    depths, found, above = tree.depths[: 1 + len(tree.choices)], [], 0
    for depth in range(1, int(depths.max()) + 1):
        nodes = (depths == depth).nonzero().squeeze(1)
        found.append(((tree.parents[nodes].long() - above).to(device), tree.ranks[nodes].long().to(device)))
        above = int(nodes[0])
    return found
