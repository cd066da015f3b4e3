"""Arrange: root, drafts and copied tokens laid out as the tree's tokens (Medusa paper, section 2.1.2).

Of a dynamic tree this step's likeliest nodes are laid out, so that its shape is this step's, and each row's, own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from medusa_decoding.decode.lookup import look_up
from medusa_decoding.decode.state import DecodeState
from medusa_decoding.heads import Children, DraftTokens
from medusa_decoding.trees.tree import Tree
from medusa_kernels import tree_select

ALMOST_CERTAIN = -1e-30
"""A log-probability below 0, though the probability is 1 in any precision."""


@dataclass
class Shape:
    """How the nodes of a step hang together; with a row axis in front where every row has a tree of its own.

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
    def own(self) -> bool:
        """Whether every row has a tree of its own."""
        return self.parents.dim() == 2

    def at_parents(self, values: torch.Tensor) -> torch.Tensor:
        """Return what stands at each node's parent, [B, N] of [B, N]; at the root what stands there itself."""
        parents = self.parents.clamp(min=0)
        return values.gather(1, parents.long()) if self.own else values[:, parents]

    def along_paths(self, values: torch.Tensor) -> torch.Tensor:
        """Return what stands along each node's path: [B, N] -> [B, N, depth + 1]."""
        if not self.own:
            return values[:, self.paths]
        return values.gather(1, self.paths.flatten(1)).view(self.paths.shape)

    def at(self, nodes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return depth int32 [B] and path int64 [B, depth + 1] of one node a row, int64 [B]."""
        if not self.own:
            return self.depths[nodes], self.paths[nodes]
        rows = torch.arange(len(nodes), device=nodes.device)
        return self.depths[rows, nodes], self.paths[rows, nodes]

    def children(self) -> list[list[list[int]]]:
        """Return the nodes below each node, for each tree there is: each row's, or one for all. Read on the host."""
        trees = []
        for parents in (self.parents if self.own else self.parents[None]).tolist():
            below: list[list[int]] = [[] for _ in parents]
            for node, parent in enumerate(parents):
                if parent >= 0:
                    below[parent].append(node)
            trees.append(below)
        return trees


@dataclass
class TreeOnDevice(Shape):
    """A tree's tensors on a device, made once with the tree's step.

    Of a dynamic tree they are those of its candidates, M in the place of N; no ancestors, which nothing asks for.

    Attributes:
        tree: the shape itself.
        slots: int64 [choices], where node i + 1's token stands in the flattened drafts [K * top_k].
        top_k: drafts a head.
        levels: for each depth from 1 the guessed nodes there, in their order: int64 [n] places of their parents among
            the nodes one level higher, int64 [n] ranks.
    """

    tree: Tree
    slots: torch.Tensor
    top_k: int
    levels: list[tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def make(cls, tree: Tree, device: torch.device) -> TreeOnDevice:
        """Copy a tree to a device."""
        top_k = max(tree.top_k, 1)
        guessed = slice(1, 1 + len(tree.choices))
        slots = (tree.depths[guessed] - 1) * top_k + tree.ranks[guessed]
        # No candidate is attended to as such, and of thousands the words would be megabytes.
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
        """Return the nodes below each node; read once."""
        if self._children is None:
            self._children = super().children()
        return self._children

    _children: list[list[list[int]]] | None = None


def arrange(
    state: DecodeState, drafts: DraftTokens | Children | None, tree: TreeOnDevice
) -> tuple[torch.Tensor, Shape]:
    """Lay tokens out in node order: the root, the heads' drafts, what is copied from the text.

    Returns:
        tokens int64 [B, N] and the shape they have: the tree's, or this step's own.
    """
    dynamic = tree.tree.keep is not None
    tokens = [state.root[:, None]]
    logprobs: list[torch.Tensor] = []
    if isinstance(drafts, Children):
        found, logprobs = _depth_by_depth(drafts, tree, dynamic)
        tokens += found
    elif drafts is not None:
        tokens.append(drafts.tokens.flatten(1)[:, tree.slots])
        logprobs = [drafts.logprobs.flatten(1)[:, tree.slots]] if dynamic else []
    if tree.tree.lookup:
        assert state.text is not None, "the loop gives a state its text where a tree copies from it"
        tokens.append(look_up(state.text, state.output, state.count, tree.tree.lookup))
    laid_out = torch.cat(tokens, dim=1)
    if not dynamic:
        return laid_out, tree
    # The root is certain, and so is what is copied: always kept, since no guess quite is.
    certain = state.check.new_zeros(len(laid_out), 1)
    copied = certain.expand(-1, tree.tree.lookup)
    if tree.tree.lookup:
        logprobs = [probable.clamp(max=ALMOST_CERTAIN) for probable in logprobs]
    kept, parents, depths, ancestors, paths = tree_select(
        laid_out, torch.cat([certain, *logprobs, copied], dim=1), tree.depths, tree.paths, tree.tree.num_nodes
    )
    return kept, Shape(parents, depths, ancestors, paths, tree.depth)


def _depth_by_depth(
    drafts: Children, tree: TreeOnDevice, weighed: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tokens of each depth, [B, n]: the child of rank r is the r-th best behind its parent's candidate.

    If weighed, the log-probabilities that they have there as well, fp32 [B, n].
    """
    tokens, logprobs, order = [], [], drafts.order.flatten(2)
    probable = drafts.of_children().flatten(2) if weighed else None
    places = torch.zeros_like(drafts.tokens[:, 0, :1])  # the root, whose row is the first (they are all equal)
    for depth, (parents, ranks) in enumerate(tree.levels):
        slots = places[:, parents] * tree.top_k + ranks
        places = order[:, depth].gather(1, slots)
        tokens.append(drafts.tokens[:, depth].gather(1, places))
        if probable is not None:
            logprobs.append(probable[:, depth].gather(1, slots))
    return tokens, logprobs


def _levels(tree: Tree, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
    depths, found, above = tree.depths[: 1 + len(tree.choices)], [], 0
    for depth in range(1, int(depths.max()) + 1):
        nodes = (depths == depth).nonzero().squeeze(1)
        found.append(((tree.parents[nodes].long() - above).to(device), tree.ranks[nodes].long().to(device)))
        above = int(nodes[0])
    return found
