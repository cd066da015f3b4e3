"""Accept: the longest path whose tokens the model itself would have chosen (Medusa paper, section 2.3.1, greedy).

Acceptance knows tokens and the tree; it does not know caches or models.
"""

from __future__ import annotations

import torch

from medusa_decoding.decode.arrange import TreeOnDevice


def accept(
    tokens: torch.Tensor, next_tokens: torch.Tensor, shape: TreeOnDevice
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find each row's longest path on which every node's token is the model's choice at its parent.

    Args:
        tokens: int64 [B, N], the nodes' tokens; the root is always right.
        next_tokens: int64 [B, N], the model's own next token at every node.
        shape: the tree.

    Returns:
        path: int64 [B, depth + 1], the accepted nodes from the root on, padded with the last one.
        accepted: int32 [B], accepted nodes below the root.
        last: int64 [B], the last accepted node.
    """
    right = tokens == next_tokens[:, shape.parent_index]
    right[:, 0] = True
    accepted_nodes = right[:, shape.paths].all(-1)
    # Siblings with the same token could both be right: the earlier node wins, as `order` is strict.
    last = torch.where(accepted_nodes, shape.order, -shape.order.numel()).argmax(1)
    return shape.paths[last], shape.depths[last], last
