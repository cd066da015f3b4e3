"""Verification of every tree node: the model's next token, and the statistics that acceptance rules need.

It does not know acceptance rules, tokenizers or logits processors; randomness is given to it.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn.functional import linear

from medusa_kernels import _checks, _cpu, quantised
from medusa_kernels._registry import register, triton_or
from medusa_kernels.decode_linear import MOST_ROWS_CPU, decode_linear
from medusa_kernels.reference import of_nodes, scaled_logits, verify_stats


def tree_verify(
    hidden: Tensor,
    weight: Tensor,
    candidates: Tensor,
    parents: Tensor | None = None,
    *,
    temperature: float = 0.0,
    noise: Tensor | None = None,
    noise_rows: Tensor | None = None,
    want_stats: bool = True,
    weight_scale: Tensor | None = None,
    weight_zero: Tensor | None = None,
    codes: str = "int4",
    divisor: float = 1.0,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Project every node to the vocabulary and keep what verification needs (the paper's section 2.3.1 and 2.1.2).

    Args:
        hidden: final hidden states `[B, N, H]`; fp16, bf16 or fp32.
        weight: the output projection `[V, H]`, dtype of hidden, or with weight_scale in 8 or 4 bits as
            `medusa_kernels.quantised` says.
        candidates: int64 `[B, N]`, the token of each node.
        parents: int32 `[N]` or `[B, N]`, the node index of each node's parent, -1 for the root. None: a chain,
            in which the parent of node i is i - 1.
        temperature: 0 takes the most likely token; above 0 samples from `softmax(logits / temperature)`.
        noise: fp32 `[B, R, V]`, independent standard Gumbel noise, from which the sample is
            `argmax(logits / temperature + noise)`. Required at a temperature above 0; at 0, where the limit of the
            sample is the argmax whatever the noise, it is ignored. See `gumbel_noise`.
        noise_rows: int32 `[N]` or `[B, N]`, the row of the noise that each node takes. None: R is N, and node i takes
            row i.
        want_stats: whether the three statistics are computed.
        weight_scale: fp32 `[V]`, the factor of each row of 8-bit numbers, or `[V, H / g]`, that of each group of codes.
        weight_zero: uint8 `[V, H / g]`, the zero points of int4 codes; None: 8. Of "dynamic" int4 weights the sums of
            their rows (`quantised.row_sums`).
        codes: what 4-bit codes stand for: "int4", "nf4" or "fp4"; "dynamic" for int8 or int4 weights that meet
            hidden in 8 bits.
        divisor: logits are `hidden weight^T / divisor`.
        softcap: logits become `softcap * tanh(logits / softcap)`, before the temperature. None: no cap.

    Returns:
        next_tokens int64 `[B, N]` (the lowest id on exact ties), and in fp32 `[B, N]`: the log-sum-exp of
        `logits / temperature`, the entropy in nats of its softmax, and the log-probability of `candidates[b, i]` under
        the softmax at its parent (0 for the root). At temperature 0 the statistics are those of temperature 1. Without
        `want_stats` they have shape `[0]`. Logits are rounded to the dtype of hidden, as a model rounds them: after
        the product, after each division, after tanh and after the factor. On a GPU they are not stored, except up to
        2^24 at a time for 256 or more nodes in fp16 or bf16 at temperature 0 without statistics.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value (on the CPU also if a candidate is outside the
            vocabulary, a parent outside the tree or a row outside the noise; on a GPU values are not read).
    """
    _checks.axes("hidden", hidden, "B", "N", "H")
    _checks.axes("weight", weight, "V", "H")
    batch, nodes, size = hidden.shape
    vocabulary = weight.shape[0]
    _checks.require(vocabulary >= 1, "weight", "at least 1 row", vocabulary)
    _checks.dtype("hidden", hidden, *_checks.FLOATS)
    names = ("weight", "weight_scale", "weight_zero")
    quantised.check(names, weight, weight_scale, weight_zero, codes, (vocabulary, size), "hidden", hidden)
    _checks.typed("candidates", candidates, (batch, nodes), torch.int64, "hidden", hidden)
    if parents is not None:
        shape = (nodes,) if parents.dim() == 1 else (batch, nodes)
        _checks.typed("parents", parents, shape, torch.int32, "hidden", hidden)
    _checks.require(temperature >= 0, "temperature", "0 or more", temperature)
    _checks.require(divisor > 0, "divisor", "more than 0", divisor)
    _checks.require(softcap is None or softcap > 0, "softcap", "None or more than 0", softcap)
    if noise is not None:
        rows = nodes if noise_rows is None else "R"
        _checks.typed("noise", noise, (batch, rows, vocabulary), torch.float32, "hidden", hidden)
    if noise_rows is not None:
        shape = (nodes,) if noise_rows.dim() == 1 else (batch, nodes)
        _checks.typed("noise_rows", noise_rows, shape, torch.int32, "hidden", hidden)
    _checks.require(noise is not None or temperature == 0, "noise", "Gumbel noise at a temperature above 0", None)
    if candidates.numel() == 0:
        return _outputs(SimpleNamespace(hidden=hidden, candidates=candidates, want_stats=want_stats))
    return torch.ops.medusa_kernels.tree_verify.default(
        hidden,
        weight,
        candidates,
        parents,
        temperature=temperature,
        noise=noise,
        noise_rows=noise_rows,
        want_stats=want_stats,
        weight_scale=weight_scale,
        weight_zero=weight_zero,
        codes=codes,
        divisor=divisor,
        softcap=softcap,
    )


def _linear(
    hidden, weight, candidates, parents=None,
    *, temperature=0.0, noise=None, noise_rows=None, want_stats=True, weight_scale=None, weight_zero=None, codes="int4",
    divisor=1.0, softcap=None,
):  # fmt: skip
    """Run the op with all logits in memory, on any device. On a CPU the values of the indices are checked."""
    if want_stats and hidden.device.type == "cpu":
        _in_range("candidates", candidates, 0, weight.shape[0])
        if parents is not None:
            _in_range("parents", parents, -1, hidden.shape[1])
    if temperature > 0 and noise_rows is not None and hidden.device.type == "cpu":
        _in_range("noise_rows", noise_rows, 0, noise.shape[1])
    if weight_scale is None:
        logits = linear(hidden, weight)
    else:
        weight = weight if weight.stride(1) == 1 else weight.contiguous()
        zeros = None if weight_zero is None else [weight_zero]
        logits = decode_linear(hidden, [weight], scales=[weight_scale], zeros=zeros, codes=codes)
    logits = scaled_logits(logits, divisor, softcap)
    if temperature > 0:
        logits = logits.float() / temperature
    next_tokens = (logits if temperature == 0 else logits + of_nodes(noise, noise_rows)).argmax(-1)
    if not want_stats:
        return next_tokens, *(hidden.new_empty(0, dtype=torch.float32) for _ in range(3))
    return next_tokens, *verify_stats(logits.float(), candidates, parents)


def _in_range(name: str, indices: Tensor, low: int, end: int) -> None:
    least, most = (int(bound) for bound in indices.aminmax())
    _checks.require(low <= least and most < end, name, f"values from {low} to {end - 1}", f"{least} to {most}")


def _outputs(a: SimpleNamespace) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shape = a.candidates.shape if a.want_stats else (0,)
    logsumexp, entropy, child_logprobs = (a.hidden.new_empty(shape, dtype=torch.float32) for _ in range(3))
    return a.candidates.new_empty(a.candidates.shape), logsumexp, entropy, child_logprobs


def _native(
    hidden, weight, candidates, parents=None,
    *, temperature=0.0, noise=None, noise_rows=None, want_stats=True, weight_scale=None, weight_zero=None, codes="int4",
    divisor=1.0, softcap=None,
):  # fmt: skip
    """Run the op on a CPU: without statistics by the C++ library, which stores no logits."""
    batch, nodes, size = hidden.shape
    rows = batch * nodes
    fits = 0 < rows <= MOST_ROWS_CPU and hidden.dtype in _cpu.ACTIVATIONS and weight.stride(1) == 1
    if want_stats or not fits:
        return None
    next_tokens = candidates.new_empty(batch, nodes)
    # Tensors are held until the call has returned.
    hidden, drawn = hidden.contiguous(), (None, None, nodes, 0, 0)
    weight_scale = None if weight_scale is None else weight_scale.float()
    if temperature > 0:
        noise_rows = torch.arange(nodes, dtype=torch.int32) if noise_rows is None else noise_rows.contiguous()
        drawn = noise.contiguous(), noise_rows, nodes, noise.shape[1], (noise_rows.dim() - 1) * nodes
    try:
        _cpu.call(
            "argmax",
            _cpu.threads(), _cpu.TYPES[hidden.dtype], hidden, rows, size,
            *_cpu.matrix(weight, None, weight_scale, weight_zero, codes),
            next_tokens, divisor, softcap or 0.0, temperature, *drawn,
        )  # fmt: skip
    except _cpu.OutsideError:
        _in_range("noise_rows", noise_rows, 0, noise.shape[1])
        raise
    return next_tokens, *(hidden.new_empty(0, dtype=torch.float32) for _ in range(3))


_or_linear = triton_or("tree_verify", "linear", _linear, "one PyTorch linear over all nodes, then the reductions")
register(
    tree_verify,
    _outputs,
    cpu=_cpu.native_or(
        "tree_verify", _native, _or_linear, f"PyTorch for statistics, more than {MOST_ROWS_CPU} rows and float16"
    ),
    cuda=_or_linear,
)
