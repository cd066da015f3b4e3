"""The model's own word on every tree node: next token, and the statistics that acceptance rules ask for.

It does not know acceptance rules, tokenizers or logits processors; randomness is given to it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from medusa_kernels import _checks
from medusa_kernels._registry import declare, serve, triton_or
from medusa_kernels.reference import verify_stats


def tree_verify(
    hidden: Tensor,
    weight: Tensor,
    candidates: Tensor,
    parents: Tensor | None = None,
    *,
    temperature: float = 0.0,
    noise: Tensor | None = None,
    want_stats: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Project every node to the vocabulary and keep what verification needs (the paper's section 2.3.1 and 2.1.2).

    Args:
        hidden: final hidden states `[B, N, H]`; fp16, bf16 or fp32.
        weight: the output projection `[V, H]`, dtype of hidden.
        candidates: int64 `[B, N]`, the token of each node.
        parents: int32 `[N]` or `[B, N]`, the node index of each node's parent, -1 for the root. None: a chain, where
            the parent of node i is i - 1.
        temperature: 0 takes the likeliest token; above 0 samples from `softmax(logits / temperature)`.
        noise: fp32 `[B, N, V]`, independent standard Gumbel noise, from which the sample is
            `argmax(logits / temperature + noise)`. Required at a temperature above 0; at 0, where the limit of the
            sample is the argmax whatever the noise, it is ignored.
        want_stats: whether the three statistics are computed.

    Returns:
        next_tokens int64 `[B, N]` (the lowest id on exact ties), and in fp32 `[B, N]`: the log-sum-exp of
        `logits / temperature`, the entropy in nats of its softmax, and the log-probability of `candidates[b, i]` under
        the softmax at its parent (0 for the root). At temperature 0 the statistics are those of temperature 1. Without
        `want_stats` they have shape `[0]`. Logits are rounded to the dtype of hidden, as a model rounds them.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value (on the CPU also where a candidate lies
            outside the vocabulary or a parent outside the tree; on a GPU values are not read).
    """
    _checks.axes("hidden", hidden, "B", "N", "H")
    _checks.axes("weight", weight, "V", "H")
    batch, nodes, size = hidden.shape
    vocabulary = weight.shape[0]
    _checks.dtype("hidden", hidden, *_checks.FLOATS)
    _checks.shape("weight", weight, (vocabulary, size))
    _checks.match("weight", weight, "hidden", hidden)
    _checks.shape("candidates", candidates, (batch, nodes))
    _checks.dtype("candidates", candidates, torch.int64)
    _checks.same_device("candidates", candidates, "hidden", hidden)
    if parents is not None:
        _checks.shape("parents", parents, (nodes,) if parents.dim() == 1 else (batch, nodes))
        _checks.dtype("parents", parents, torch.int32)
        _checks.same_device("parents", parents, "hidden", hidden)
    _checks.require(temperature >= 0, "temperature", "0 or more", temperature)
    if noise is not None:
        _checks.shape("noise", noise, (batch, nodes, vocabulary))
        _checks.dtype("noise", noise, torch.float32)
        _checks.same_device("noise", noise, "hidden", hidden)
    _checks.require(noise is not None or temperature == 0, "noise", "Gumbel noise at a temperature above 0", None)
    return torch.ops.medusa_kernels.tree_verify.default(
        hidden, weight, candidates, parents, temperature=temperature, noise=noise, want_stats=want_stats
    )


def _linear(
    hidden: Tensor,
    weight: Tensor,
    candidates: Tensor,
    parents: Tensor | None = None,
    *,
    temperature: float = 0.0,
    noise: Tensor | None = None,
    want_stats: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the op with all logits in memory, on any device."""
    logits = linear(hidden, weight)
    if temperature > 0:
        logits = logits.float() / temperature
    next_tokens = _argmax(logits if temperature == 0 or noise is None else logits + noise)
    if not want_stats:
        return next_tokens, *_stats_like(hidden, (0,))
    return next_tokens, *verify_stats(logits.float(), candidates, parents)


def _linear_on_host(
    hidden: Tensor,
    weight: Tensor,
    candidates: Tensor,
    parents: Tensor | None = None,
    *,
    temperature: float = 0.0,
    noise: Tensor | None = None,
    want_stats: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run the op on the CPU, where the values of the indices can be checked."""
    if want_stats:
        _in_range("candidates", candidates, 0, weight.shape[0])
        if parents is not None:
            _in_range("parents", parents, -1, hidden.shape[1])
    return _linear(hidden, weight, candidates, parents, temperature=temperature, noise=noise, want_stats=want_stats)


def _in_range(name: str, indices: Tensor, low: int, end: int) -> None:
    least, most = (int(bound) for bound in indices.aminmax())
    _checks.require(low <= least and most < end, name, f"values from {low} to {end - 1}", f"{least} to {most}")


_BLOCK = 64
_BLOCKED_FROM_ROWS = 4


def _argmax(logits: Tensor) -> Tensor:
    """Return the argmax of the last axis, the lowest index on ties.

    On the CPU argmax is not vectorised while amax is: the best block of 64 is found first, then the best in it. Below 4
    rows the extra passes gain nothing.
    """
    rows = logits.numel() // logits.shape[-1]
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    if rows < _BLOCKED_FROM_ROWS or logits.shape[-1] % _BLOCK:
        return logits.max(-1).indices
    blocks = logits.float().view(rows, -1, _BLOCK)
    block = blocks.amax(-1).argmax(-1, keepdim=True)
    within = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK)).argmax(-1)
    return (block * _BLOCK + within).view(logits.shape[:-1])


def _stats_like(hidden: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    logsumexp, entropy, child_logprobs = (hidden.new_empty(shape, dtype=torch.float32) for _ in range(3))
    return logsumexp, entropy, child_logprobs


def _fake(
    hidden: Tensor,
    weight: Tensor,
    candidates: Tensor,
    parents: Tensor | None = None,
    *,
    temperature: float = 0.0,
    noise: Tensor | None = None,
    want_stats: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    stats = tuple(candidates.shape) if want_stats else (0,)
    return candidates.new_empty(candidates.shape), *_stats_like(hidden, stats)


declare(
    "tree_verify(Tensor hidden, Tensor weight, Tensor candidates, Tensor? parents=None, *, float temperature=0.0, "
    "Tensor? noise=None, bool want_stats=True) -> (Tensor, Tensor, Tensor, Tensor)",
    _fake,
)
_CPU = "one PyTorch linear over all nodes, then the reductions"
serve("tree_verify", "cpu", lambda device: triton_or("tree_verify", "linear", _linear_on_host, _CPU, device=device))
serve("tree_verify", "cuda", lambda device: triton_or("tree_verify", "linear", _linear, "", device=device))
