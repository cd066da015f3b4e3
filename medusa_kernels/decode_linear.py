"""The projections of a decode step: few rows times one to three weight matrices, in one pass over the weights.

It does not know what is projected (queries, keys and values, or an MLP), and never packs or copies a weight.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from medusa_kernels import _checks, _cpu, quantised, reference
from medusa_kernels._registry import Implementation, register, served_by, triton_or

ACTIVATIONS = ("silu", "gelu_tanh")
"""Activations of a gate, in the order of the enum Activation of csrc/cpu/ops.h."""
MOST_WEIGHTS = 3
MOST_ROWS = 64
"""Rows up to which the Triton kernel streams the weights; with more, reading the weights is no longer the limit."""
MOST_ROWS_CPU = 256
"""Rows up to which the C++ ops serve; with more, PyTorch's matrix products are faster than theirs with AVX2."""


def decode_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    *,
    gate: bool = False,
    residual: Tensor | None = None,
    scales: Sequence[Tensor] | None = None,
    parts: int = 1,
    zeros: Sequence[Tensor] | None = None,
    codes: str = "int4",
    activation: str = "silu",
    factor: float = 1.0,
) -> Tensor:
    """Return `x W^T + b` for each weight side by side; gated, `SiLU(x Wg^T + bg) * (x Wu^T + bu)` (Shazeer 2020).

    Gemma's gate has GELU in the place of SiLU, and Granite multiplies the products: see `activation` and `factor`.

    Args:
        x: `[..., K]`, K of at least 1, fp16, bf16 or fp32; any strides.
        weights: 1 to 3 matrices `[N_i, K]`, dtype of x, or with scales in 8 or 4 bits as `medusa_kernels.quantised`
            says, all in the same form and group size; elements of a row adjacent, rows any distance apart. Gated: two,
            the gate's and the other's, of one shape.
        biases: for each weight `[N_i]`, dtype of x, or None; None: no biases.
        gate: whether the first product gates the second.
        residual: `[..., sum of N_i]`, gated `[..., 2 N]`, dtype of x; added to the products, before the gate: a layer's
            residual, or the products of an adapter (LoRA, arXiv:2106.09685).
        scales: for each weight fp32 `[N_i]`, the factor of each row of 8-bit numbers, or `[N_i, K / g]`, that of each
            group of 4-bit codes; None: the weights are in the dtype of x.
        parts: more than 1: the K columns are divided into so many consecutive parts, and each part's product is
            returned by itself, so that more programs stream a narrow weight. `add_rms_norm` and `rope_append` add them.
            Not with `gate` or `residual`. `linear_parts` says how many are best.
        zeros: for each weight uint8 `[N_i, K / g]`, the zero points of int4 codes; None: 8. Of "dynamic" int4 weights
            the sums of their rows (`quantised.row_sums`).
        codes: what 4-bit codes stand for: "int4", "nf4" or "fp4"; "dynamic" for int8 or int4 weights that meet
            x in 8 bits.
        activation: of the gate: "silu", or "gelu_tanh" (Gemma), the approximation
            `x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3))` (Hendrycks and Gimpel, arXiv:1606.08415).
        factor: of the products with their biases, before the residual is added (Granite). 1 with `gate`.

    Returns:
        `[..., sum of N_i]` in the order of the weights (gated: `[..., N]`), dtype of x, a new contiguous tensor.
        Products are accumulated in fp32; bias, factor, gate and residual are applied in fp32, and the result is rounded
        once. With several parts fp32 `[parts, ..., sum of N_i]`, not rounded: their sum is the product times the
        factor, biases are in the first. The PyTorch implementation rounds after each of these steps (parts it does not
        round). It serves more than 64 rows on a GPU and 256 on a CPU, when the product is no longer bound by reading
        the weights, and what the others lack: fp16 on a CPU. Numbers times scales may be rounded to the dtype of x
        before they are multiplied; of float8_e4m3fn the Triton kernel takes NaN for 480. With the C++ implementation (a
        CPU's), a row's result does not depend on the rows beside it.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device, layout or number.
    """
    _checks.require(x.dim() >= 1 and x.shape[-1] > 0, "x", "shape [..., K] with K of at least 1", list(x.shape))
    _checks.dtype("x", x, *_checks.FLOATS)
    count, size = len(weights), x.shape[-1]
    _checks.require(1 <= count <= MOST_WEIGHTS, "weights", f"1 to {MOST_WEIGHTS} matrices", count)
    _checks.require(not gate or count == 2, "weights", "two matrices, as gate is set", count)
    for name, given in (("scales", scales), ("zeros", zeros)):
        _checks.require(given is None or len(given) == count, name, f"{count}, one per weight", given and len(given))
    none: list[Tensor | None] = [None] * count
    of_each = zip(weights, scales or none, zeros or none, strict=True)
    for i, (weight, scale, zero) in enumerate(of_each):
        # Weights in other forms have the same bytes in another number of columns.
        shape = (weights[0].shape[0] if gate and i else "N", size)
        names = (f"weights[{i}]", f"scales[{i}]", f"zeros[{i}]")
        quantised.check(names, weight, scale, zero, codes, shape, "x", x)
        if size > 1 and weight.stride(1) != 1:
            raise ValueError(f"weights[{i}]: expected a row's elements adjacent, got strides {weight.stride()}")
        if scales is not None:
            form, first = ((w.dtype, quantised.group_size(w, s)) for w, s in ((weight, scale), (weights[0], scales[0])))
            _checks.require(form == first, f"weights[{i}]", f"dtype and group size {first} like weights[0]", form)
    if biases is not None:
        _checks.require(len(biases) == count, "biases", f"{count}, one per weight", len(biases))
        for i, (bias, weight) in enumerate(zip(biases, weights, strict=True)):
            if bias is not None:
                _checks.match(f"biases[{i}]", bias, (weight.shape[0],), "x", x)
    if gate or residual is not None:
        _checks.require(parts == 1, "parts", "1 with gate or residual", parts)
    _checks.require(1 <= parts <= size, "parts", f"1 to the {size} columns of x", parts)
    if residual is not None:
        width = sum(weight.shape[0] for weight in weights)
        _checks.match("residual", residual, (*x.shape[:-1], width), "x", x)
    _checks.require(activation in ACTIVATIONS, "activation", " or ".join(ACTIVATIONS), activation)
    _checks.require(factor == 1.0 or not gate, "factor", "1 with gate", factor)
    bias_list = None if biases is None else list(biases)
    scale_list, zero_list = (None if given is None else list(given) for given in (scales, zeros))
    return torch.ops.medusa_kernels.decode_linear.default(
        x, list(weights), bias_list, gate=gate, residual=residual, scales=scale_list, parts=parts, zeros=zero_list,
        codes=codes, activation=activation, factor=factor,
    )  # fmt: skip


def linear_parts(x: Tensor, out_features: int, weight: Tensor | None = None, scale: Tensor | None = None) -> int:
    """Return into how many parts `decode_linear` best divides the columns for weights of `out_features` rows in all.

    Only the Triton kernel gains by it, on 16-bit rows up to 64: the programs of a narrow weight are then enough to fill
    the GPU with tiles wide enough for few programs to read x. Elsewhere 1.

    Args:
        x: `[..., K]`, as for `decode_linear`.
        out_features: rows of the weights.
        weight: one of the weights, in 4 or 8 bits; None: they are in the dtype of x.
        scale: its scales, as for `decode_linear`.
    """
    if served_by("decode_linear", x.device).name != "triton":
        return 1
    from medusa_kernels._triton import launch  # needs triton
    from medusa_kernels._triton.decode_linear import VECTOR
    from medusa_kernels._triton.decode_linear_configs import best_parts

    rows, size = x.numel() // x.shape[-1], x.shape[-1]
    if size % VECTOR:
        return 1
    group = 0 if weight is None else quantised.group_size(weight, scale)
    bits = 0 if scale is None else 4 if group else 8
    return best_parts(launch.describe(x.device), x.dtype, rows, out_features, size, bits, group)


def with_linear(
    x, weights, biases=None, *, gate=False, residual=None, scales=None, parts=1, zeros=None, codes="int4",
    activation="silu", factor=1.0,
):  # fmt: skip
    """Run the op as matrix products in the dtype of x, each written to its place in the result, on any device.

    Of weights in 4 or 8 bits one at a time is dequantised.
    """
    if parts > 1:
        return reference.decode_linear(
            x, weights, biases, scales=scales, parts=parts, zeros=zeros, codes=codes, factor=factor
        )
    rows, count = quantised.rounded(x.reshape(-1, x.shape[-1]), codes, weights[0]), len(weights)
    sizes = [weight.shape[0] for weight in weights]
    out = x.new_empty(rows.shape[0], sum(sizes))
    each = (weights, biases or [None] * count, scales or [None] * count, zeros or [None] * count)
    for part, stored, bias, scale, zero in zip(out.split(sizes, 1), *each, strict=True):
        weight = quantised.dequantised(stored, scale, zero, codes).to(x.dtype)
        if bias is None:
            torch.mm(rows, weight.T, out=part)
        else:
            torch.addmm(bias, rows, weight.T, out=part)
    if factor != 1.0:
        out *= factor
    if residual is not None:
        out += residual.reshape(out.shape)
    if gate:
        first, second = out.split(sizes, 1)
        out = (silu(first) if activation == "silu" else gelu(first, approximate="tanh")).mul_(second)
    return out.view(*x.shape[:-1], out.shape[1])


def _native(
    x, weights, biases=None, *, gate=False, residual=None, scales=None, parts=1, zeros=None, codes="int4",
    activation="silu", factor=1.0,
):  # fmt: skip
    """Run the op by the C++ library, on a CPU."""
    rows = x.numel() // x.shape[-1]
    few = 0 < rows <= MOST_ROWS_CPU and x.dtype in _cpu.ACTIVATIONS
    if not few or parts > 1:
        return None
    width = weights[0].shape[0] if gate else sum(weight.shape[0] for weight in weights)
    out = x.new_empty(*x.shape[:-1], width)
    # Held until the call has returned.
    x, residual = x.contiguous(), None if residual is None else residual.contiguous()
    biases = [None if bias is None else bias.contiguous() for bias in biases or [None] * len(weights)]
    count = len(weights)
    # Held until the call has returned.
    scales = [None if scale is None else scale.float() for scale in scales or [None] * count]
    matrices = map(_cpu.matrix, weights, biases, scales, zeros or [None] * count, [codes] * count)
    _cpu.call(
        "decode_linear",
        _cpu.threads(), _cpu.TYPES[x.dtype], x, rows, x.shape[-1], residual, out,
        gate, ACTIVATIONS.index(activation), float(factor), count,
        *(member for matrix in matrices for member in matrix),
        *[0] * (_cpu.MATRIX * (MOST_WEIGHTS - count)),
    )  # fmt: skip
    return out


def _choose(device: torch.device) -> Implementation:
    chosen = triton_or("decode_linear", "linear", with_linear, "PyTorch matrix products")(device)
    if chosen.name != "triton":
        return chosen
    return replace(chosen, reason=f"{chosen.reason}; PyTorch matrix products for more than {MOST_ROWS} rows")


def _result(a):
    shape = (*a.x.shape[:-1], a.weights[0].shape[0] if a.gate else sum(weight.shape[0] for weight in a.weights))
    return a.x.new_empty(shape) if a.parts == 1 else a.x.new_empty(a.parts, *shape, dtype=torch.float32)


register(
    decode_linear,
    _result,
    cpu=_cpu.native_or(
        "decode_linear", _native, _choose, f"PyTorch matrix products for more than {MOST_ROWS_CPU} rows and float16"
    ),
    cuda=_choose,
    # Optional lists of optional tensors are not among the types that PyTorch infers.
    schema="(Tensor x, Tensor[] weights, Tensor?[]? biases=None, *, bool gate=False, Tensor? residual=None, "
    'Tensor[]? scales=None, int parts=1, Tensor[]? zeros=None, str codes="int4", str activation="silu", '
    "float factor=1.0) -> Tensor",
)
