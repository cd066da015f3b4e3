"""Draws at every tree node from the most likely tokens: temperature, top-k, top-p and min-p, without sorting.

It does not know seeds, processors as objects or trees: the noise is given, and which of the drawn tokens matter is
decided elsewhere.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from medusa_kernels import _checks, reference
from medusa_kernels._registry import register, triton_or


def draw_tokens(
    logits: Tensor,
    noise: Tensor,
    noise_rows: Tensor | None = None,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Draw a token at every node: the argmax of `logits / temperature + noise` among the tokens that are kept.

    Tokens are kept as transformers' processors of these names keep them, one after the other. Top-k keeps the k
    most likely tokens and what ties with the last of them. Top-p drops tokens from the least likely up, equally likely
    ones by their ids, while their sum is at most `1 - top_p` of what top-k has kept. Min-p drops what is less than
    `min_p` times as likely as the most likely token, which always stays.

    Args:
        logits: `[B, N, V]`; fp16, bf16 or fp32; any strides.
        noise: fp32 `[B, R, V]`, independent standard Gumbel noise. See `gumbel_noise`.
        noise_rows: int32 `[N]` or `[B, N]`, the row of the noise that each node takes. None: R is N, and node i takes
            row i.
        temperature: above 0.
        top_k: how many tokens to keep; 0 for all.
        top_p: from 0 to 1, which keeps all.
        min_p: from 0, which keeps all, to 1.

    Returns:
        The tokens, int64 `[B, N]` (the lowest id on exact ties), and their `logits / temperature + noise`, fp32
        `[B, N]`. Everything is computed in fp32; shares of probability are summed in a fixed order.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value. Values in tensors are not read.
    """
    _checks.axes("logits", logits, "B", "N", "V")
    _checks.dtype("logits", logits, *_checks.FLOATS)
    batch, nodes, vocabulary = logits.shape
    _checks.require(1 <= vocabulary <= 2**24, "logits", "1 to 16777216 tokens", vocabulary)  # counted in fp32
    rows = nodes if noise_rows is None else "R"
    _checks.typed("noise", noise, (batch, rows, vocabulary), torch.float32, "logits", logits)
    if noise_rows is not None:
        shape = (nodes,) if noise_rows.dim() == 1 else (batch, nodes)
        _checks.typed("noise_rows", noise_rows, shape, torch.int32, "logits", logits)
    _checks.require(0 < temperature < math.inf, "temperature", "more than 0", temperature)
    _checks.require(top_k >= 0, "top_k", "0 or more", top_k)
    _checks.require(0 <= top_p <= 1, "top_p", "0 to 1", top_p)
    _checks.require(0 <= min_p <= 1, "min_p", "0 to 1", min_p)
    return torch.ops.medusa_kernels.draw_tokens.default(
        logits, noise, noise_rows, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
    )


register(
    draw_tokens,
    lambda a: (
        a.logits.new_empty(a.logits.shape[:2], dtype=torch.int64),
        a.logits.new_empty(a.logits.shape[:2], dtype=torch.float32),
    ),
    cpu=triton_or("draw_tokens", "reference", reference.draw_tokens, "PyTorch, operation by operation, sorted"),
)
