"""The Medusa heads of one node: residual blocks, vocabulary projection and top-k, for all heads at once.

It does not know which hidden state it is given, how the heads were trained or how the tokens are used.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.functional import linear, log_softmax, silu

from medusa_kernels import _checks, _cpu, quantised
from medusa_kernels._registry import register, triton_or
from medusa_kernels.decode_linear import MOST_ROWS_CPU
from medusa_kernels.reference import scaled_logits

MAX_K = 32


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
    root: Tensor | None = None,
    w_root: Tensor | None = None,
    temperature: float = 1.0,
    noise: Tensor | None = None,
    w2_zero: Tensor | None = None,
    codes: str = "int4",
    divisor: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Return each head's k most likely tokens with their log-probabilities (the paper's heads, section 2.1.1).

    Head j computes `h <- h + W_root_j root` if there is a root, `h <- h + SiLU(W1_j h + b1_j)` for each of its residual
    blocks, its logits `W2_j h / divisor`, `x = logits / temperature + noise`, and the log-softmax of x over the V' rows
    of `W2_j`.

    Args:
        hidden: hidden states `[B, H]`, or `[B, K, H]` if each head has its own; fp16, bf16 or fp32.
        w1: `[K, H, H]`, or `[K, L, H, H]` for L residual blocks; dtype of hidden; any strides.
        b1: `[K, H]`, or `[K, L, H]`, dtype of hidden, or None.
        w2: `[K, V', H]`, or `[V', H]` for one projection shared by all heads; dtype of hidden, or with w2_scale in 8 or
            4 bits as `medusa_kernels.quantised` says.
        k: how many tokens, 1 to min(32, V').
        w2_scale: fp32 `[K, V']` (or `[V']` with a shared w2), the factor of each row of w2 in 8 bits; of 4-bit codes
            `[.., V', H / g]`, that of each group. Required for both.
        token_map: int64 `[V']`, the real token id of each row of a trimmed vocabulary. None: the row is the id.
        gather: w2 and w2_scale hold the whole vocabulary of V instead (`[K, V, H]` or `[V, H]`), of which the
            projection has the rows that token_map names, in its order; token_map is required.
        root: `[B, R]`, dtype of hidden, a second input of every head, made of the last drawn token.
        w_root: `[K, H, R]`, dtype of hidden; any strides. Required with root, and only then.
        temperature: finite, above 0.
        noise: fp32 `[B, R, V]`, R at least K: head j of batch row b adds element `noise[b, j, token id]` to each logit.
            V is the number of ids (without a token_map V', with `gather` that of the rows of w2). With standard Gumbel
            noise the first token is a sample of the softmax, and the k are samples without replacement (Gumbel-top-k,
            arXiv:1903.06059). None: none.
        w2_zero: uint8 `[.., V', H / g]`, the zero points of int4 codes; None: 8. Of "dynamic" int4 weights the sums of
            their rows (`quantised.row_sums`).
        codes: what 4-bit codes of w2 stand for: "int4", "nf4" or "fp4"; "dynamic" for int8 or int4 numbers that meet
            the heads' states in 8 bits.
        divisor: finite, above 0.
        softcap: logits become `softcap * tanh(logits / softcap)`, before the temperature. None: no cap.

    Returns:
        logprobs fp32 `[B, K, k]` and tokens int64 `[B, K, k]`, best first. The order of equal x is not specified.
        Products are accumulated in fp32. Dividing and capping them, x and its log-softmax are fp32. Each new h is
        rounded to the dtype of hidden. The PyTorch implementation rounds the result of each matrix product to that
        dtype too, which the Triton and C++ kernels do not. With a w2 in 8 or 4 bits (groups of a multiple of 32) the
        Triton kernel multiplies 16-bit states in fp16: it rounds the last h of a head to fp16 instead, in which finite
        numbers beyond 65504 become 65504 of their sign, and numbers below 2^-17 have fewer bits than in bf16.

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
    quantised_w2 = w2.dtype in (*quantised.BYTES, torch.uint8)
    _checks.require(w2_scale is not None or not quantised_w2, "w2_scale", "scales for weights in 8 or 4 bits", None)
    _checks.require(w2_scale is None or quantised_w2, "w2_scale", "None for weights in the dtype of hidden", "scales")
    shape = ("V'", size) if w2.dim() == 2 else (heads, "V'", size)
    quantised.check(("w2", "w2_scale", "w2_zero"), w2, w2_scale, w2_zero, codes, shape, "hidden", hidden)
    _checks.require(not gather or token_map is not None, "token_map", "the rows to gather", None)
    vocabulary = w2.shape[-2]
    if token_map is not None:
        mapped = ("V'",) if gather else (vocabulary,)
        _checks.typed("token_map", token_map, mapped, torch.int64, "hidden", hidden)
        vocabulary = token_map.shape[0]
    _checks.require(1 <= k <= min(MAX_K, vocabulary), "k", f"1 to {min(MAX_K, vocabulary)}", k)
    _checks.require(root is not None or w_root is None, "root", "the input of w_root", None)
    _checks.require(w_root is not None or root is None, "w_root", "the weights of root", None)
    if root is not None and w_root is not None:
        _checks.match("root", root, (hidden.shape[0], "R"), "hidden", hidden)
        _checks.match("w_root", w_root, (heads, size, root.shape[1]), "hidden", hidden)
    _checks.require(0 < temperature < float("inf"), "temperature", "a finite number above 0", temperature)
    _checks.require(0 < divisor < float("inf"), "divisor", "a finite number above 0", divisor)
    _checks.require(softcap is None or softcap > 0, "softcap", "None or more than 0", softcap)
    if noise is not None:
        ids = "V" if token_map is not None and not gather else w2.shape[-2]
        _checks.typed("noise", noise, (hidden.shape[0], "R", ids), torch.float32, "hidden", hidden)
        _checks.require(noise.shape[1] >= heads, "noise", f"a row for each of {heads} heads", noise.shape[1])
    if hidden.shape[0] == 0:
        return _outputs(SimpleNamespace(hidden=hidden, w1=w1, k=k))
    return torch.ops.medusa_kernels.heads_topk.default(
        hidden, w1, b1, w2, k,
        w2_scale=w2_scale, token_map=token_map, gather=gather, root=root, w_root=w_root, temperature=temperature,
        noise=noise, w2_zero=w2_zero, codes=codes, divisor=divisor, softcap=softcap,
    )  # fmt: skip


def _matmul(
    hidden, w1, b1, w2, k,
    *, w2_scale=None, token_map=None, gather=False, root=None, w_root=None, temperature=1.0, noise=None,
    w2_zero=None, codes="int4", divisor=1.0, softcap=None,
):  # fmt: skip
    """Run the op as matrix products in the dtype of hidden and a top-k over the logits, on any device."""
    heads, size = w1.shape[0], w1.shape[-1]
    states = hidden if hidden.dim() == 3 else hidden[:, None]
    if root is not None:
        states = states + _of_every_head(root[:, None], w_root, None)
    for weight, bias in residual_blocks(w1, b1):
        states = states + silu(_of_every_head(states, weight, bias))
    states = quantised.rounded(states, codes, w2)
    if gather:
        rows = (..., token_map) if w2.dtype != torch.uint8 else (..., token_map, slice(None))
        w2_scale, w2_zero = (None if one is None else one[rows] for one in (w2_scale, w2_zero))
        w2 = w2[..., token_map, :]
    if w2.dtype == torch.uint8:
        w2, w2_scale = quantised.dequantised(w2, w2_scale, w2_zero, codes).to(states.dtype), None
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
    if temperature * divisor != 1 or softcap is not None:
        logits = scaled_logits(logits.float(), divisor, softcap) / temperature
    if noise is not None:
        logits = logits + (noise[:, :heads] if token_map is None else noise[:, :heads, token_map])
    tokens = logits.topk(k, dim=-1).indices
    logprobs = log_softmax(logits, -1, dtype=torch.float32).gather(-1, tokens)
    return logprobs, tokens if token_map is None else token_map[tokens]


def residual_blocks(w1: Tensor, b1: Tensor | None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the weights `[K, H, H]` and the biases `[K, H]` of each residual block."""
    if w1.dim() == 3:
        yield w1, b1
        return
    for block in range(w1.shape[1]):
        yield w1[:, block], None if b1 is None else b1[:, block]


def _of_every_head(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `W x + b` of every head, `[B, K, H]`, of inputs `[B, K, H]`, or `[B, 1, H]` if all have the same."""
    heads, size, columns = weight.shape
    if x.shape[1] == 1 and weight.is_contiguous():
        # All heads read one input: their weights are one matrix.
        return linear(x, weight.view(-1, columns), None if bias is None else bias.reshape(-1)).view(-1, heads, size)
    inner = torch.matmul(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)
    return inner if bias is None else inner + bias


def _outputs(a: SimpleNamespace) -> tuple[Tensor, Tensor]:
    shape = a.hidden.shape[0], a.w1.shape[0], a.k
    return a.hidden.new_empty(shape, dtype=torch.float32), a.hidden.new_empty(shape, dtype=torch.int64)


def _native(
    hidden, w1, b1, w2, k,
    *, w2_scale=None, token_map=None, gather=False, root=None, w_root=None, temperature=1.0, noise=None,
    w2_zero=None, codes="int4", divisor=1.0, softcap=None,
):  # fmt: skip
    """Run the op by the C++ library, on a CPU."""
    batch, heads, size = hidden.shape[0], w1.shape[0], w1.shape[-1]
    # For the library a w2 whose heads are 0 apart is a shared one, with one scale for all heads.
    shared, dense = w2.dim() == 2, w1.stride(-1) == 1 and w2.stride(-1) == 1 and w2.stride(0) != 0
    dense &= w_root is None or w_root.stride(-1) == 1
    few = 0 < batch <= MOST_ROWS_CPU
    if not dense or not few or hidden.dtype not in _cpu.ACTIVATIONS:
        return None
    vocabulary = len(token_map) if gather else w2.shape[-2]
    logprobs = hidden.new_empty(batch, heads, k, dtype=torch.float32)
    tokens = hidden.new_empty(batch, heads, k, dtype=torch.int64)
    # Held until the call has returned.
    hidden, b1 = hidden.contiguous(), None if b1 is None else b1.contiguous()
    w2_scale = None if w2_scale is None else w2_scale.float()
    token_map = None if token_map is None else token_map.contiguous()
    root = None if root is None else root.contiguous()
    noise = None if noise is None else noise.contiguous()
    try:
        _cpu.call(
            "heads_topk",
            _cpu.threads(), _cpu.TYPES[hidden.dtype], hidden, hidden.dim() - 2,
            batch, heads, size, vocabulary, w2.shape[-2], k,
            w1.shape[1] if w1.dim() == 4 else 1, w1, b1,
            *(stride * w1.element_size() for stride in (w1.stride(0), w1.stride(1), w1.stride(-2))),
            root, w_root, 0 if root is None else root.shape[1],
            *((0, 0) if w_root is None else (s * w_root.element_size() for s in w_root.stride()[:2])),
            w2, 0 if shared else w2.stride(0) * w2.element_size(), w2.stride(-2) * w2.element_size(),
            _cpu.weight_type(w2, codes), w2_scale, w2_zero, 0 if shared or w2_scale is None else w2_scale.stride(0),
            quantised.group_size(w2, w2_scale),
            token_map, gather, float(divisor), float(softcap or 0), float(temperature),
            noise, *((0, 0) if noise is None else noise.shape[1:]), logprobs, tokens,
        )  # fmt: skip
    except _cpu.OutsideError:
        low, high = (int(row) for row in token_map.aminmax())
        rows = f"{w2.shape[-2] - 1} of w2" if gather else f"{noise.shape[-1] - 1} of noise"
        raise ValueError(f"token_map: expected rows 0 to {rows}, got {low} to {high}") from None
    return logprobs, tokens


_or_matmul = triton_or("heads_topk", "matmul", _matmul, "PyTorch matrix products, then top-k")
register(
    heads_topk,
    _outputs,
    cpu=_cpu.native_or(
        "heads_topk",
        _native,
        _or_matmul,
        f"PyTorch for more than {MOST_ROWS_CPU} rows and float16",
    ),
    cuda=_or_matmul,
)
