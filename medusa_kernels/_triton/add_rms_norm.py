"""`add_rms_norm` as one Triton launch: a program holds one row, reads it once and writes its results."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import triton
import triton.language as tl

from medusa_kernels._triton import launch
from medusa_kernels._triton.decode_linear import as_rows


def configuration(size: int) -> launch.Warps:
    """Return 16 elements per thread (of 16 bits: two 16-byte loads), in at most 16 warps."""
    return launch.Warps(num_warps=min(16, max(1, triton.next_power_of_2(size) // 512)), num_stages=1)


def options(delta_normed: bool) -> dict[str, bool]:
    """Return the compiler options of a launch. Fused, a norm's last product and the sum would be rounded only once."""
    return launch.OPTIONS | {"enable_fp_fusion": not delta_normed}


@triton.jit
def weighted(b_normed, b_weight, OFFSET: tl.constexpr):
    """Return fp32 numbers, rounded to the weight's dtype, times the weight, or else times OFFSET + weight; rounded."""
    b_factor = b_weight.to(tl.float32)
    if OFFSET is None:
        b_normed = b_normed.to(b_weight.dtype).to(tl.float32)
    else:
        b_factor += OFFSET
    return (b_normed * b_factor).to(b_weight.dtype)


@triton.jit
def _normed(b_x, b_weight, size, eps, OFFSET: tl.constexpr):
    """Return x / sqrt(mean(x^2) + eps) times the weight, rounded as by `weighted`: [BLOCK_H]."""
    b_wide = b_x.to(tl.float32)
    square = tl.sum(b_wide * b_wide, 0)
    if b_x.dtype == tl.float32:
        # Quotients and roots are approximate by default; the rounding to 16 bits hides that, fp32 does not.
        b_normed = tl.div_rn(b_wide, tl.sqrt_rn(tl.div_rn(square, size * 1.0) + eps))
    else:
        b_normed = b_wide * tl.rsqrt(square / size + eps)
    return weighted(b_normed, b_weight, OFFSET)


@triton.jit(do_not_specialize=["rows"])
def _add_rms_norm_kernel(
    x, delta, weight, delta_norm, total, normed,
    rows, size, stride_x_m, stride_delta_m, eps,
    PARTS: tl.constexpr, OFFSET: tl.constexpr, PDL: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Compute s = x + delta and weight * (s / sqrt(mean(s^2) + eps)) for one row.

    x [M, H], delta [PARTS, M, H] and weight [H] give total (s, if there are PARTS) and normed [M, H] (if there is a
    weight), which are contiguous. Parts are added in order, then x. The sum, the quotient and its product with the
    weight are each computed in fp32 and rounded to the dtype of x; with an OFFSET the quotient is not rounded, and the
    factor is OFFSET + weight. With delta_norm [H] the parts' sum is rounded and normalised likewise before x is added.
    """
    i_m = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, BLOCK_H)
    m_h = o_h < size
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if weight is not None:
        # [BLOCK_H]
        b_weight = tl.load(weight + o_h, mask=m_h, other=0.0)
    # [BLOCK_H]
    b_x = tl.load(x + i_m * stride_x_m + o_h, mask=m_h, other=0.0)
    if PARTS > 0:
        p_delta = delta + i_m * stride_delta_m + o_h
        # [BLOCK_H]
        b_delta = tl.load(p_delta, mask=m_h, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            b_delta += tl.load(p_delta + part * rows.to(tl.int64) * stride_delta_m, mask=m_h, other=0.0)
        if delta_norm is not None:
            # [BLOCK_H]
            b_norm = tl.load(delta_norm + o_h, mask=m_h, other=0.0)
            b_delta = _normed(b_delta.to(b_x.dtype), b_norm, size, eps, OFFSET).to(tl.float32)
        b_x = (b_x.to(tl.float32) + b_delta).to(b_x.dtype)
        tl.store(total + i_m * size + o_h, b_x, mask=m_h)
    if weight is not None:
        b_out = _normed(b_x, b_weight, size, eps, OFFSET)
        tl.store(normed + i_m * size + o_h, b_out, mask=m_h)


def add_rms_norm(x, delta, weight, eps, *, delta_norm=None, norm_offset=None):
    """Launch the kernel, one program per row; see the public `add_rms_norm`. Results without their input are empty."""
    size = x.shape[-1]
    total, normed = (x.new_empty(0 if part is None else x.shape) for part in (delta, weight))
    if not x.numel():
        return total, normed
    flat = as_rows(x)
    added = flat if delta is None else as_rows(delta)
    rows = flat.shape[0]
    config = configuration(size)
    pdl = launch.programmatic(x.device)
    with launch.on_device(x):
        _add_rms_norm_kernel[(rows,)](
            flat, added, *(None if w is None else w.contiguous() for w in (weight, delta_norm)), total, normed,
            rows, size, flat.stride(0), added.stride(0), eps,
            PARTS=0 if delta is None else added.shape[0] // rows, OFFSET=norm_offset, PDL=pdl,
            BLOCK_H=triton.next_power_of_2(size),
            **launch.options(config, pdl, options(delta_norm is not None)),
        )  # fmt: skip
    return total, normed
