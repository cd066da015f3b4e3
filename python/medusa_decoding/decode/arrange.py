"""Arrange: root and guesses laid out as the tree's tokens (Medusa paper, section 2.1.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

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
        slots: int64 [N - 1], where node i + 1's token stands in the flattened guesses [K * top_k].
        top_k: guesses a head.
        children: the nodes below each node, on the host.
    """

    tree: Tree
    parents: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor
    paths: torch.Tensor
    slots: torch.Tensor
    top_k: int
    children: list[list[int]]

    @classmethod
    def make(cls, tree: Tree, device: torch.device) -> TreeOnDevice:
        """Copy a tree to a device."""
        top_k = max(tree.top_k, 1)
        slots = (tree.depths[1:] - 1) * top_k + tree.ranks[1:]
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
        )


def arrange(root: torch.Tensor, guesses: torch.Tensor, shape: TreeOnDevice) -> torch.Tensor:
    """Lay tokens out in node order: root [B], guesses int64 [B, K, top_k] -> [B, N]."""
    return torch.cat([root[:, None], guesses.flatten(1)[:, shape.slots]], dim=1)
