"""Dynamic trees: keep the most likely nodes of a tree of candidates, always the same number of them.

It does not know heads or tokenizers: the candidates' probabilities and the tree that they form are given.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from torch import Tensor

from medusa_kernels import _checks, reference
from medusa_kernels._registry import register, triton_or

MAX_CANDIDATES = 8192


def tree_select(
    tokens: Tensor, logprobs: Tensor, depths: Tensor, paths: Tensor, nodes: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Keep the candidates with the most probable paths (the paper's section 2.3.3, for one step instead of a data set).

    A candidate's probability is the product of those along its path, so it never exceeds its parent's, and the
    most likely candidates are a tree again. Sums of log-probabilities are taken in fp32 from the root on; equal ones
    stay in the order of the candidates. A log-probability above 0 counts as 0, NaN as minus infinity.

    Args:
        tokens: int64 `[B, M]`, the token of each candidate; candidate 0 is the root, which is always kept. M is at most
            8,192.
        logprobs: fp32 `[B, M]`, natural log of each candidate's probability given its parent; the root's is not read.
        depths: int32 `[M]`, 0 for the root. Parents come before their children.
        paths: int64 `[M, P]`, the candidates from the root to each one, padded with the last; P is the greatest
            depth + 1.
        nodes: N, how many to keep, the root included; 1 to min(256, M).

    Returns:
        The kept ones, in their order: tokens int64 `[B, N]`; parents int32 `[B, N]`, -1 for the root; depths int32
        `[B, N]`; ancestors int64 `[B, N, W]`, the words that `tree_attention` takes; paths int64 `[B, N, P]`, in
        the numbers of the kept nodes. All new and contiguous.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value. Values in tensors are not read.
    """
    _checks.axes("tokens", tokens, "B", "M")
    batch, candidates = tokens.shape
    _checks.require(1 <= candidates <= MAX_CANDIDATES, "tokens", f"1 to {MAX_CANDIDATES} candidates", candidates)
    _checks.axes("paths", paths, "M", "P")
    _checks.require(paths.shape[1] >= 1, "paths", "at least 1 step", paths.shape[1])
    most = min(256, candidates)
    _checks.require(1 <= nodes <= most, "nodes", f"1 to {most}", nodes)
    for name, tensor, shape, dtype in (
        ("tokens", tokens, (batch, candidates), torch.int64),
        ("logprobs", logprobs, (batch, candidates), torch.float32),
        ("depths", depths, (candidates,), torch.int32),
        ("paths", paths, (candidates, "P"), torch.int64),
    ):
        _checks.typed(name, tensor, shape, dtype, "tokens", tokens)
    return torch.ops.medusa_kernels.tree_select.default(tokens, logprobs, depths, paths, nodes)


def _on_host(tokens, logprobs, depths, paths, nodes):
    """Run the op on the CPU in NumPy, whose calls on a few hundred numbers take a fraction of PyTorch's time."""
    batch, (candidates, places) = len(tokens), paths.shape
    all_paths, all_depths, own = paths.numpy(), depths.numpy(), logprobs.numpy()
    own = np.where(own != own, np.float32(-np.inf), np.minimum(own, np.float32(0)))
    scores = np.zeros((batch, candidates), dtype=np.float32)
    for place in range(1, places):
        node = all_paths[:, place]
        scores += np.where(node != all_paths[:, place - 1], own[:, node], np.float32(0))
    # Stable: of equal scores the parent, which comes first, is taken first.
    chosen = np.sort(np.argsort(-scores, axis=1, kind="stable")[:, :nodes], axis=1)
    rows = np.arange(batch)[:, None]
    numbers = np.zeros((batch, candidates), dtype=np.int64)
    numbers[rows, chosen] = np.arange(nodes)
    kept_depths = all_depths[chosen]
    kept_paths = numbers[rows[..., None], all_paths[chosen]]
    parents = np.take_along_axis(kept_paths, np.maximum(kept_depths - 1, 0)[..., None], axis=2)[..., 0]
    parents = np.where(kept_depths > 0, parents, -1).astype(np.int32)
    word, bit = np.divmod(kept_paths, reference.WORD)
    bits = np.left_shift(np.uint64(1), bit.astype(np.uint64))
    words = [
        np.bitwise_or.reduce(np.where(word == number, bits, np.uint64(0)), axis=-1)
        for number in range(-(-nodes // reference.WORD))
    ]
    ancestors = np.stack(words, axis=-1).view(np.int64)
    kept = tokens.numpy()[rows, chosen], parents, kept_depths, ancestors, kept_paths
    return tuple(torch.from_numpy(array) for array in kept)


def _outputs(a: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    shape, words = (a.tokens.shape[0], a.nodes), -(-a.nodes // reference.WORD)
    tokens, ancestors, paths = (a.tokens.new_empty(*shape, *rest) for rest in ((), (words,), (a.paths.shape[1],)))
    return tokens, a.depths.new_empty(shape), a.depths.new_empty(shape), ancestors, paths


register(
    tree_select,
    _outputs,
    cpu=triton_or("tree_select", "numpy", _on_host, "NumPy, one call for all rows"),
    cuda=triton_or("tree_select", "reference", reference.tree_select),
)
