"""The tensors of a step's tree: how its nodes hang together, on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from medusa_decoding.trees.tree import Tree


@dataclass
class TreeShape:
    """How the nodes of a step hang together; with a leading row axis if every row has its own tree.

    Attributes:
        parents: int32 [N] or [B, N]; -1 for the root.
        depths: int32 [N] or [B, N].
        ancestors: int64 [N, W] or [B, N, W], bit words.
        paths: int64 [N, depth + 1] or [B, N, depth + 1].
        depth: the greatest depth a node may have.
    """

    parents: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor
    paths: torch.Tensor
    depth: int

    @property
    def per_row(self) -> bool:
        """Whether every row has its own tree."""
        return self.parents.dim() == 2

    def at_parents(self, values: torch.Tensor) -> torch.Tensor:
        """Return the value at each node's parent, [B, N] of [B, N]; at the root its own value."""
        parents = self.parents.clamp(min=0)
        return values.gather(1, parents.long()) if self.per_row else values[:, parents]

    def along_paths(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values along each node's path: [B, N] -> [B, N, depth + 1]."""
        if not self.per_row:
            return values[:, self.paths]
        return values.gather(1, self.paths.flatten(1)).view(self.paths.shape)

    def at(self, nodes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return depth int32 [B] and path int64 [B, depth + 1] of one node per row, int64 [B]."""
        if not self.per_row:
            return self.depths[nodes], self.paths[nodes]
        rows = torch.arange(len(nodes), device=nodes.device)
        return self.depths[rows, nodes], self.paths[rows, nodes]

    def children(self) -> list[list[list[int]]]:
        """Return the children of each node, for each row's tree or for the one that all share; read on the host."""
        trees = []
        for parents in (self.parents if self.per_row else self.parents[None]).tolist():
            below: list[list[int]] = [[] for _ in parents]
            for node, parent in enumerate(parents):
                if parent >= 0:
                    below[parent].append(node)
            trees.append(below)
        return trees


@dataclass
class TreeTensors(TreeShape):
    """A tree's tensors on a device, made once per tree.

    For a dynamic tree they describe its M candidate nodes instead of the N nodes of a step, without ancestors.

    Attributes:
        tree: the tree itself.
        slots: int64 [choices], the place of node i + 1's token in the flattened drafts [K * top_k].
        top_k: drafts per head.
        levels: for each depth from 1 on, its draft nodes in order: int64 [n] places of their parents among the nodes
            one level higher, int64 [n] ranks.
    """

    tree: Tree
    slots: torch.Tensor
    top_k: int
    levels: list[tuple[torch.Tensor, torch.Tensor]]
    _children: list[list[list[int]]] | None = None

    @classmethod
    def from_tree(cls, tree: Tree, device: torch.device) -> TreeTensors:
        """Copy a tree to a device."""
        top_k = max(tree.top_k, 1)
        drafted = slice(1, 1 + len(tree.choices))
        slots = (tree.depths[drafted] - 1) * top_k + tree.ranks[drafted]
        # Candidates of a dynamic tree are not attended to, and for thousands of them the words would be megabytes.
        ancestors = tree.ancestors if tree.keep is None else torch.zeros(0, 0, dtype=torch.int64)
        return cls(
            tree.parents.to(device),
            tree.depths.to(device),
            ancestors.to(device),
            tree.paths.long().to(device),
            tree.depth,
            tree,
            slots.long().to(device),
            top_k,
            _levels(tree, device),
        )

    def children(self) -> list[list[list[int]]]:
        """Return the children of each node; read once."""
        if self._children is None:
            self._children = super().children()
        return self._children


def _levels(tree: Tree, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    depths, found, above = tree.depths[: 1 + len(tree.choices)], [], 0
    for depth in range(1, int(depths.max()) + 1):
        nodes = (depths == depth).nonzero().squeeze(1)
        found.append(((tree.parents[nodes].long() - above).to(device), tree.ranks[nodes].long().to(device)))
        above = int(nodes[0])
    return found
