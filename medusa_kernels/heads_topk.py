"""The Medusa heads of one node: residual blocks, vocabulary projection and top-k, for all heads at once.

It does not know which hidden state it is given, how the heads were trained or how the tokens are used.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.functional import linear, log_softmax, silu

from medusa_kernels import _checks, _cpu
from medusa_kernels._registry import register, triton_or
from medusa_kernels.decode_linear import MOST_ROWS

MAX_K = 32
QUANTISED = (torch.int8, torch.float8_e4m3fn)


def heads_topk(
    hidden: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    k: int,
    *,
    w2_scale: Tensor | None = None,
    token_map: Tensor | None = None,
    gather: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return each head's k likeliest tokens with their log-probabilities (the paper's heads, section 2.1.1).

    Head j computes `h <- h + SiLU(W1_j h + b1_j)` for each of its residual blocks, `W2_j h`, and the log-softmax over
    the V' rows of `W2_j`.

    Args:
        hidden: hidden states `[B, H]`, or `[B, K, H]` if each head has its own; fp16, bf16 or fp32.
        w1: `[K, H, H]`, or `[K, L, H, H]` for L residual blocks; dtype of hidden; any strides.
        b1: `[K, H]`, or `[K, L, H]`, dtype of hidden, or None.
        w2: `[K, V', H]`, or `[V', H]` for one projection shared by all heads; dtype of hidden, int8 or float8_e4m3fn.
        k: how many tokens, 1 to min(32, V').
        w2_scale: fp32 `[K, V']` (or `[V']` with a shared w2), the factor of each row of w2. Required for int8 and fp8.
        token_map: int64 `[V']`, the real token id of each row of a trimmed vocabulary. None: the row is the id.
        gather: w2 and w2_scale hold the whole vocabulary of V instead (`[K, V, H]` or `[V, H]`), of which the
            projection has the rows that token_map names, in its order; token_map is required.

    Returns:
        logprobs fp32 `[B, K, k]` and tokens int64 `[B, K, k]`, best first. The order of equal logits is not specified.
        Products are accumulated in fp32 and the log-softmax is taken in fp32. The states `h + SiLU(W1 h + b1)` are
        rounded to the dtype of hidden. The PyTorch implementation rounds the result of each matrix product to that
        dtype too, which the Triton and C++ kernels do not. The Triton kernel runs the last block; PyTorch those before.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value.
    """
    _checks.axes("w1", w1, "K", *(["L"] if w1.dim() == 4 else []), "H", "H")
    heads, size, blocks = w1.shape[0], w1.shape[-1], w1.shape[1:-2]
    _checks.shape("w1", w1, (heads, *blocks, size, size))
    _checks.require(heads >= 1, "w1", "at least 1 head", heads)
    _checks.require(0 not in blocks, "w1", "at least one residual block", 0)
    _checks.dtype("hidden", hidden, *_checks.FLOATS)
    _checks.shape("hidden", hidden, ("B", size) if hidden.dim() == 2 else ("B", heads, size))
    _checks.match("w1", w1, w1.shape, "hidden", hidden)
    if b1 is not None:
        _checks.match("b1", b1, (heads, *blocks, size), "hidden", hidden)
    _checks.shape("w2", w2, ("V'", size) if w2.dim() == 2 else (heads, "V'", size))
    _checks.dtype("w2", w2, hidden.dtype, *QUANTISED)
    _checks.same_device("w2", w2, "hidden", hidden)
    _checks.require(not gather or token_map is not None, "token_map", "the rows to gather", None)
    vocabulary = w2.shape[-2]
    if token_map is not None:
        mapped = ("V'",) if gather else (vocabulary,)
        _checks.typed("token_map", token_map, mapped, torch.int64, "hidden", hidden)
        vocabulary = token_map.shape[0]
    _checks.require(1 <= k <= min(MAX_K, vocabulary), "k", f"1 to {min(MAX_K, vocabulary)}", k)
    if w2_scale is not None:
        _checks.typed("w2_scale", w2_scale, w2.shape[:-1], torch.float32, "hidden", hidden)
    scaled = w2_scale is not None or w2.dtype not in QUANTISED
    _checks.require(scaled, "w2_scale", "one scale per row of int8 and fp8 weights", None)
    return torch.ops.medusa_kernels.heads_topk.default(
        hidden, w1, b1, w2, k, w2_scale=w2_scale, token_map=token_map, gather=gather
    )


def _matmul(hidden, w1, b1, w2, k, *, w2_scale=None, token_map=None, gather=False):
    """Run the op as matrix products in the dtype of hidden and a top-k over the logits, on any device."""
    hidden, w1, b1 = last_block(hidden, w1, b1)
    heads, size = w1.shape[0], w1.shape[2]
    states = _residual_block(hidden, w1, b1)
    if gather:
        w2 = w2[..., token_map, :]
        w2_scale = None if w2_scale is None else w2_scale[..., token_map]
    if w2_scale is not None and states.dtype == torch.float16:
        # Without its scale a logit may overflow float16: 127 is an ordinary int8 weight.
        states = states.float()
    weight = w2.to(states.dtype)
    if w2.dim() == 2:
        logits = linear(states.reshape(-1, size), weight).view(-1, heads, w2.shape[0])
    else:
        logits = torch.matmul(states.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)
    if w2_scale is not None:
        logits = logits.float() * w2_scale
    tokens = logits.topk(k, dim=-1).indices
    logprobs = log_softmax(logits, -1, dtype=torch.float32).gather(-1, tokens)
    return logprobs, tokens if token_map is None else token_map[tokens]


def last_block(hidden: Tensor, w1: Tensor, b1: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run all residual blocks but the last; return its input, `[B, H]` or `[B, K, H]`, and its weights."""
    if w1.dim() == 3:
        return hidden, w1, b1
    for block in range(w1.shape[1] - 1):
        hidden = _residual_block(hidden, w1[:, block], None if b1 is None else b1[:, block])
    return hidden, w1[:, -1], None if b1 is None else b1[:, -1]


def _residual_block(hidden: Tensor, w1: Tensor, b1: Tensor | None) -> Tensor:
    """Return `h + SiLU(W1 h + b1)` of every head, `[B, K, H]`."""
    heads, size = w1.shape[0], w1.shape[2]
    if hidden.dim() == 2:
        hidden = hidden[:, None]
        if w1.is_contiguous():
            # All heads read one input: their weights are one matrix.
            flat_bias = None if b1 is None else b1.reshape(-1)
            return hidden + silu(linear(hidden, w1.view(-1, size), flat_bias)).view(-1, heads, size)
    inner = torch.matmul(hidden.transpose(0, 1), w1.transpose(1, 2)).transpose(0, 1)
    return hidden + silu(inner if b1 is None else inner + b1)


def _outputs(a: SimpleNamespace) -> tuple[Tensor, Tensor]:
    shape = a.hidden.shape[0], a.w1.shape[0], a.k
    return a.hidden.new_empty(shape, dtype=torch.float32), a.hidden.new_empty(shape, dtype=torch.int64)


def _native(hidden, w1, b1, w2, k, *, w2_scale=None, token_map=None, gather=False):
    """Run the op by the C++ library, on a CPU."""
    batch, heads, size = hidden.shape[0], w1.shape[0], w1.shape[-1]
    # For the library a w2 whose heads are 0 apart is a shared one, with one scale for all heads.
    shared, dense = w2.dim() == 2, w1.stride(-1) == 1 and w2.stride(-1) == 1 and w2.stride(0) != 0
    few = 0 < batch <= MOST_ROWS
    if not dense or not few or hidden.dtype not in _cpu.ACTIVATIONS or w2.dtype not in (hidden.dtype, torch.int8):
        return _matmul(hidden, w1, b1, w2, k, w2_scale=w2_scale, token_map=token_map, gather=gather)
    vocabulary = len(token_map) if gather else w2.shape[-2]
    logprobs = hidden.new_empty(batch, heads, k, dtype=torch.float32)
    tokens = hidden.new_empty(batch, heads, k, dtype=torch.int64)
    # Held until the call has returned.
    hidden, b1 = hidden.contiguous(), None if b1 is None else b1.contiguous()
    w2_scale = None if w2_scale is None else w2_scale.contiguous()
    token_map = None if token_map is None else token_map.contiguous()
    try:
        _cpu.call(
            "heads_topk",
            _cpu.threads(), _cpu.TYPES[hidden.dtype], hidden, hidden.dim() - 2,
            batch, heads, size, vocabulary, w2.shape[-2], k,
            w1.shape[1] if w1.dim() == 4 else 1, w1, b1,
            *(stride * w1.element_size() for stride in (w1.stride(0), w1.stride(1), w1.stride(-2))),
            w2, 0 if shared else w2.stride(0) * w2.element_size(), w2.stride(-2) * w2.element_size(),
            _cpu.TYPES[w2.dtype], w2_scale, 0 if shared else w2.shape[-2],
            token_map, gather, logprobs, tokens,
        )  # fmt: skip
    except _cpu.OutsideError:
        low, high = (int(row) for row in token_map.aminmax())
        raise ValueError(f"token_map: expected rows 0 to {w2.shape[-2] - 1} of w2, got {low} to {high}") from None
    return logprobs, tokens


_or_matmul = triton_or("heads_topk", "matmul", _matmul, "PyTorch matrix products, then top-k")
register(
    heads_topk,
    _outputs,
    cpu=_cpu.native_or(
        "heads_topk",
        _native,
        _or_matmul,
        f"PyTorch for more than {MOST_ROWS} rows, float16 and float8",
    ),
    cuda=_or_matmul,
)
