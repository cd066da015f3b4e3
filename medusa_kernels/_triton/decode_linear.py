"""`decode_linear` as one Triton launch: every program streams its rows of one weight past all rows of x.

All rows of x are in one tile. The programs of the first weight come first, then those of the second and the third. If
gated, a program streams the same rows of both weights into two accumulators. If the columns are divided into parts, a
program streams one part of its rows, and the parts of a tile are next to each other. Weights in 4 and 8 bits are
decoded in registers. With more than 64 rows PyTorch's matrix products run instead.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from medusa_kernels import quantised
from medusa_kernels._triton import launch
from medusa_kernels._triton.decode_linear_configs import Config, configuration, scales_weights
from medusa_kernels._triton.four_bits import decode_codes
from medusa_kernels._triton.streaming import decode_e4m3, decode_int8, dot_accumulate
from medusa_kernels.decode_linear import MOST_ROWS, MOST_WEIGHTS, with_linear

VECTOR = 16
"""Strides and sizes must be multiples of this for Triton to load 16 bytes at once."""


@triton.jit
def _accumulate(b_acc, b_comp, b_x, b_w, SWAP: tl.constexpr):
    """Return b_acc + x W^T in fp32, [BLOCK_M, BLOCK_N] or with SWAP its transpose; only fp32 is compensated."""
    if SWAP:
        b_a, b_b = b_w, tl.trans(b_x)
    else:
        b_a, b_b = b_x, tl.trans(b_w)
    if b_x.dtype == tl.float32:
        b_acc, b_comp = dot_accumulate(b_a, b_b, b_acc, b_comp)
    else:
        b_acc = tl.dot(b_a, b_b, b_acc, input_precision="ieee")
    return b_acc, b_comp


@triton.jit
def _across(b_n, SWAP: tl.constexpr):
    """Return [BLOCK_N] numbers in the shape of what `_accumulate` returns, to be broadcast over the rows of x."""
    return b_n[:, None] if SWAP else b_n[None, :]


@triton.jit
def _add_bias(b_acc, bias, o_n, m_n, SWAP: tl.constexpr):
    """Return b_acc plus the bias of each column of the result, in fp32."""
    return b_acc + _across(tl.load(bias + o_n, mask=m_n, other=0.0).to(tl.float32), SWAP)


@triton.jit
def _write(
    b_acc, b_acc_u, bias, b1, residual, out, factor, o_m, o_n, i_s, rows, features, width, first, stride_residual_m,
    GATE: tl.constexpr, GELU: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """Write the products of rows o_n of a weight with rows o_m of x to part i_s, after bias, factor, residual, gate."""
    m_m, m_n = o_m < rows, o_n < features
    if HAS_BIAS:
        m_bias = o_n < tl.where(i_s == 0, features, 0)
        b_acc = _add_bias(b_acc, bias, o_n, m_bias, SWAP)
        if GATE:
            b_acc_u = _add_bias(b_acc_u, b1, o_n, m_n, SWAP)
    if factor is not None:
        b_acc *= factor
    if SWAP:
        o_r, o_c, m_out = o_m[None, :], o_n[:, None], m_m[None, :] & m_n[:, None]
    else:
        o_r, o_c, m_out = o_m[:, None], o_n[None, :], m_m[:, None] & m_n[None, :]
    if HAS_RESIDUAL:
        # [BLOCK_M, BLOCK_N], transposed with SWAP
        p_residual = residual + o_r.to(tl.int64) * stride_residual_m + first + o_c
        b_acc += tl.load(p_residual, mask=m_out, other=0.0).to(tl.float32)
        if GATE:
            b_acc_u += tl.load(p_residual + features, mask=m_out, other=0.0).to(tl.float32)
    if GATE:
        b_inner = b_acc
        if GELU:
            # sqrt(8 / pi), for tanh(y) = 2 sigmoid(2 y) - 1.
            b_inner = 1.5957691216057308 * (b_acc + 0.044715 * b_acc * b_acc * b_acc)
        b_acc = b_acc * tl.sigmoid(b_inner) * b_acc_u
    o_r += i_s * rows
    tl.store(out + o_r.to(tl.int64) * width + first + o_c, b_acc.to(out.dtype.element_ty), mask=m_out)


@triton.jit
def _scales(p_s, p_z, i_g, HAS_ZERO: tl.constexpr):
    """Return the scales of group i_g in fp32, and its zero points less the 8 that `decode_codes` subtracts."""
    b_s = tl.load(p_s + i_g).to(tl.float32)
    b_z = b_s
    if HAS_ZERO:
        b_z = tl.load(p_z + i_g).to(tl.float32) - 8
    return b_s, b_z


@triton.jit
def _multiplied(
    b_acc, b_comp, b_x, b_w, b_s, b_z,
    FORM: tl.constexpr, FOUR_BITS: tl.constexpr, ON_WEIGHTS: tl.constexpr, HAS_ZERO: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """Return b_acc plus the product of b_x `[BLOCK_M, BLOCK_K]` and weights as they are stored, as `_accumulate` does.

    Of 4-bit codes each pair of columns is a byte; scales of groups are applied to the weights or to the product, and
    b_s and b_z broadcast to the shape of b_w or are [BLOCK_N].
    """
    DTYPE: tl.constexpr = b_x.dtype
    if not FOUR_BITS:
        if FORM == "int8":
            b_w = decode_int8(b_w, tl.float16 if DTYPE.is_fp32() else DTYPE).to(DTYPE)
        elif FORM == "e4m3":
            b_w = decode_e4m3(b_w, tl.float16 if DTYPE.is_fp32() else DTYPE).to(DTYPE)
        return _accumulate(b_acc, b_comp, b_x, b_w, SWAP)
    else:
        b_even, b_odd = tl.split(tl.reshape(b_x, (b_x.shape[0], b_x.shape[1] // 2, 2)))
        b_w_even, b_w_odd = decode_codes(b_w, FORM, DTYPE)
        if HAS_ZERO:
            b_zero = (b_z if ON_WEIGHTS else b_z[:, None]).to(DTYPE)
            b_w_even, b_w_odd = (b_w_even - b_zero).to(DTYPE), (b_w_odd - b_zero).to(DTYPE)
        if ON_WEIGHTS:
            b_w_even, b_w_odd = (b_w_even.to(tl.float32) * b_s).to(DTYPE), (b_w_odd.to(tl.float32) * b_s).to(DTYPE)
            b_acc, b_comp = _accumulate(b_acc, b_comp, b_even, b_w_even, SWAP)
            return _accumulate(b_acc, b_comp, b_odd, b_w_odd, SWAP)
        else:
            if SWAP:
                b_sum = tl.dot(b_w_even, tl.trans(b_even)) + tl.dot(b_w_odd, tl.trans(b_odd))
            else:
                b_sum = tl.dot(b_even, tl.trans(b_w_even)) + tl.dot(b_odd, tl.trans(b_w_odd))
            return b_acc + b_sum * _across(b_s, SWAP), b_comp


@triton.jit(do_not_specialize=["rows"])
def _decode_linear_kernel(
    x, w0, w1, w2, s0, s1, s2, z0, z1, z2, b0, b1, b2, residual, out, factor,
    rows, size, groups, features_0, features_1, features_2,
    stride_x_m, stride_w0_n, stride_w1_n, stride_w2_n, stride_residual_m,
    COUNT: tl.constexpr, PARTS: tl.constexpr, GATE: tl.constexpr, GELU: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, EVEN_K: tl.constexpr, SWAP: tl.constexpr, PDL: tl.constexpr,
    FORM: tl.constexpr, GROUP: tl.constexpr, ON_WEIGHTS: tl.constexpr, HAS_ZERO: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute (x W^T + b) factor for BLOCK_N rows of one weight; gated, act(x Wg^T + bg) (x Wu^T + bu).

    x [M, K], w0 to w2 [N_i, K], b0 to b2 [N_i], residual [M, sum of N_i], which is added before the gate, and out
    [PARTS, M, sum of N_i] (gated: [1, M, N]), which is contiguous. Products are accumulated in fp32; bias, factor
    (None: 1), residual and gate (SiLU or GELU) are fp32 too, and the result is rounded once. Of several PARTS each is
    the product over its share of the columns; the bias is in the first.

    FORM "": weights in the dtype of x, without s0 to s2 and z0 to z2, which are None. Else a form of
    `medusa_kernels.quantised`: int8 or e4m3 (bytes), with s0 to s2 [N_i], or a kind of 4-bit codes, [N_i, K / 2], with
    s0 to s2 [N_i, groups] and z0 to z2 like them. ON_WEIGHTS: a step has several groups, or x is fp32: the scales are
    multiplied into the weights, and rounded with them. Otherwise a step has one, and each sum is multiplied.
    """
    i_s, i_p = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS
    # The program's weight and what belongs to it, its tile of the weight, and the weight's first column of the result.
    w, s, z, bias, features, stride_w_n, first, i_t = w0, s0, z0, b0, features_0, stride_w0_n, 0, i_p
    width = features_0
    if COUNT > 1 and not GATE:
        tiles_0, tiles_1 = tl.cdiv(features_0, BLOCK_N), tl.cdiv(features_1, BLOCK_N)
        is_0, is_1 = i_p < tiles_0, i_p < tiles_0 + tiles_1
        w = tl.where(is_0, w0, tl.where(is_1, w1, w2))
        if FORM != "":
            s = tl.where(is_0, s0, tl.where(is_1, s1, s2))
            z = tl.where(is_0, z0, tl.where(is_1, z1, z2))
        bias = tl.where(is_0, b0, tl.where(is_1, b1, b2))
        features = tl.where(is_0, features_0, tl.where(is_1, features_1, features_2))
        stride_w_n = tl.where(is_0, stride_w0_n, tl.where(is_1, stride_w1_n, stride_w2_n))
        first = tl.where(is_0, 0, tl.where(is_1, features_0, features_0 + features_1))
        i_t = i_p - tl.where(is_0, 0, tl.where(is_1, tiles_0, tiles_0 + tiles_1))
        width = features_0 + features_1 + features_2

    FOUR_BITS: tl.constexpr = GROUP > 0
    COLUMNS: tl.constexpr = 2 if FOUR_BITS else 1  # of an element of a weight
    o_m, o_k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    o_j = tl.arange(0, BLOCK_K // COLUMNS)
    o_n = i_t * BLOCK_N + tl.arange(0, BLOCK_N)
    m_m = o_m < rows
    # Past the last row of a weight read the last row again, so that the loop needs no mask for rows.
    o_row = tl.minimum(o_n, features - 1).to(tl.int64)
    p_x = x + o_m.to(tl.int64)[:, None] * stride_x_m + o_k[None, :]
    p_w, p_u = w + o_row[:, None] * stride_w_n + o_j[None, :], w1 + o_row[:, None] * stride_w1_n + o_j[None, :]
    if FORM != "":
        p_s, p_z, p_s_u, p_z_u = s + o_row * groups, z + o_row * groups, s1 + o_row * groups, z1 + o_row * groups
        if ON_WEIGHTS:
            p_s, p_z, p_s_u, p_z_u = p_s[:, None], p_z[:, None], p_s_u[:, None], p_z_u[:, None]
    begin, end = 0, size
    if PARTS > 1:
        steps = tl.cdiv(size, BLOCK_K)
        begin, end = i_s * steps // PARTS * BLOCK_K, tl.minimum((i_s + 1) * steps // PARTS * BLOCK_K, size)
    if PDL:
        tl.extra.cuda.gdc_wait()
    b_acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    b_acc_u, b_comp, b_comp_u = b_acc, b_acc, b_acc
    b_s, b_z, b_s_u, b_z_u = None, None, None, None
    if FORM != "":
        i_g = 0
        if ON_WEIGHTS:
            i_g = tl.minimum(tl.minimum((begin + COLUMNS * o_j)[None, :], size - 1) // GROUP, groups - 1)
        elif FOUR_BITS:
            i_g = tl.minimum(begin // GROUP, groups - 1)
        # One step ahead, for they are too small to be loaded asynchronously.
        b_s, b_z = _scales(p_s, p_z, i_g, HAS_ZERO)
        if GATE:
            b_s_u, b_z_u = _scales(p_s_u, p_z_u, i_g, HAS_ZERO)
    for k in range(begin, end, BLOCK_K):
        # x: [BLOCK_M, BLOCK_K], weight: [BLOCK_N, BLOCK_K / COLUMNS]
        if EVEN_K:
            b_x = tl.load(p_x + k, mask=m_m[:, None], other=0.0)
            b_w = tl.load(p_w + k // COLUMNS)
        else:
            m_k, m_j = (k + o_k < size)[None, :], (k + COLUMNS * o_j < size)[None, :]
            b_x = tl.load(p_x + k, mask=m_m[:, None] & m_k, other=0.0)
            b_w = tl.load(p_w + k // COLUMNS, mask=m_j, other=0)
        if FOUR_BITS:
            i_g = (k + BLOCK_K) // GROUP
            if ON_WEIGHTS:
                i_g = (k + BLOCK_K + COLUMNS * o_j)[None, :] // GROUP
            i_g = tl.minimum(i_g, groups - 1)
            b_s_next, b_z_next = _scales(p_s, p_z, i_g, HAS_ZERO)
        b_acc, b_comp = _multiplied(b_acc, b_comp, b_x, b_w, b_s, b_z, FORM, FOUR_BITS, ON_WEIGHTS, HAS_ZERO, SWAP)
        if GATE:
            b_u = tl.load(p_u + k // COLUMNS) if EVEN_K else tl.load(p_u + k // COLUMNS, mask=m_j, other=0)
            b_acc_u, b_comp_u = _multiplied(
                b_acc_u, b_comp_u, b_x, b_u, b_s_u, b_z_u, FORM, FOUR_BITS, ON_WEIGHTS, HAS_ZERO, SWAP
            )
            if FOUR_BITS:
                b_s_u, b_z_u = _scales(p_s_u, p_z_u, i_g, HAS_ZERO)
        if FOUR_BITS:
            b_s, b_z = b_s_next, b_z_next
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if FORM != "" and not FOUR_BITS:
        # Decoding made 1/256 of e4m3.
        b_acc *= _across(b_s, SWAP) * (256 if FORM == "e4m3" else 1)
        if GATE:
            b_acc_u *= _across(b_s_u, SWAP) * (256 if FORM == "e4m3" else 1)
    _write(b_acc, b_acc_u, bias, b1, residual, out, factor, o_m, o_n, i_s, rows, features, width, first,
           stride_residual_m, GATE, GELU, HAS_BIAS, HAS_RESIDUAL, SWAP)  # fmt: skip


def decode_linear(
    x, weights, biases=None, *, gate=False, residual=None, scales=None, parts=1, zeros=None, codes="int4",
    activation="silu", factor=1.0,
):  # fmt: skip
    """Launch a kernel, or PyTorch's products for many rows; see the public `decode_linear`."""
    size, features = x.shape[-1], [weight.shape[0] for weight in weights]
    if x.numel() > MOST_ROWS * size or codes == "dynamic":
        return with_linear(
            x, weights, biases, gate=gate, residual=residual, scales=scales, parts=parts, zeros=zeros, codes=codes,
            activation=activation, factor=factor,
        )  # fmt: skip
    width = features[0] if gate else sum(features)
    shape = (*x.shape[:-1], width)
    out = x.new_empty(shape) if parts == 1 else x.new_empty(parts, *shape, dtype=torch.float32)
    if not out.numel():
        return out
    flat, added = as_rows(x), as_rows(x if residual is None else residual)
    rows = flat.shape[0]
    group = quantised.group_size(weights[0], scales and scales[0])
    bits = 0 if scales is None else 4 if group else 8
    if weights[0].dtype == torch.float8_e4m3fn:
        weights = [weight.view(torch.uint8) for weight in weights]
    strides = [flat.stride(0), *(weight.stride(0) for weight in weights)]
    vectors = all(number % VECTOR == 0 for number in (size, *strides))
    device = launch.describe(x.device)
    config = configuration(
        device, x.dtype, rows, sum(features), size, gate, vectors=vectors or bits > 0, parts=parts, bits=bits,
        group=group,
    )  # fmt: skip
    has_bias = biases is not None and any(bias is not None for bias in biases)
    unused = MOST_WEIGHTS - len(weights)
    pdl = launch.programmatic(x.device)
    stored: list[Any] = [None] * (2 * MOST_WEIGHTS)
    form = ""
    if scales is not None:
        if len({scale.dtype for scale in scales}) > 1:
            scales = [scale.float() for scale in scales]
        stored = [one for numbers in (scales, zeros or scales) for one in (*numbers, *[numbers[0]] * unused)]
        form = codes if group else "int8" if weights[0].dtype == torch.int8 else "e4m3"
    with launch.on_device(x):
        tiles = [triton.cdiv(n, config.block_n) for n in features]
        grid = (tiles[0] if gate else sum(tiles)) * parts
        _decode_linear_kernel[(grid,)](
            flat, *weights, *[weights[0]] * unused, *stored,
            *(_bias_vectors(x, weights, biases) if has_bias else [x] * len(weights)), *[x] * unused,
            added, out, None if factor == 1.0 else factor,
            rows, size, size // group if group else 1, *features, *[0] * unused,
            *strides, *[0] * unused, added.stride(0),
            COUNT=len(weights), PARTS=parts, GATE=gate, GELU=activation == "gelu_tanh", HAS_BIAS=has_bias,
            HAS_RESIDUAL=residual is not None, EVEN_K=size % config.block_k == 0, SWAP=config.swap, PDL=pdl,
            **form_constants(form, x.dtype, group, zeros is not None),
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
            **launch.options(config, pdl, options(device, config, gate)),
        )  # fmt: skip
    return out


def form_constants(form: str, dtype: torch.dtype, group: int, has_zero: bool) -> dict[str, Any]:
    """Return the kernel's constants that say how weights are stored; `form` is "" for those in the dtype of x."""
    return {"FORM": form, "GROUP": group, "ON_WEIGHTS": scales_weights(dtype, group), "HAS_ZERO": has_zero}


def options(device: launch.Device, config: Config, gate: bool) -> dict[str, Any]:
    """Return the compiler's options.

    From compute capability 10.0 on the assembler spills some registers of large tiles to fit more programs, without a
    limit that it need not undercut.
    """
    large = config.block_n == 64 and (gate or config.block_m == MOST_ROWS)
    return launch.OPTIONS | ({"maxnreg": 255} if large and device.capability >= (10, 0) else {})


def as_rows(tensor: Tensor) -> Tensor:
    """Return the tensor as a matrix of rows, copied only if its strides require it."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _bias_vectors(x: Tensor, weights: list[Tensor], biases: list[Tensor | None] | None) -> list[Tensor]:
    """Return a bias for every weight, zeros for a weight without one."""
    given = biases or [None] * len(weights)
    return [
        x.new_zeros(weight.shape[0]) if bias is None else bias.contiguous()
        for weight, bias in zip(weights, given, strict=True)
    ]
