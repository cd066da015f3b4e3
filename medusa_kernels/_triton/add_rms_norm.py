"""`add_rms_norm` as one Triton launch: a program holds one row, reads it once and writes its results."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import torch
import triton
import triton.language as tl

from medusa_kernels._triton import launch
from medusa_kernels._triton.decode_linear import as_rows
from medusa_kernels._triton.programmatic import launch_options, programmatic


def configuration(size: int) -> launch.Warps:
    """Return 16 elements per thread (of 16 bits: two 16-byte loads), in at most 16 warps."""
    return launch.Warps(num_warps=min(16, max(1, triton.next_power_of_2(size) // 512)), num_stages=1)


@triton.jit
def _add_rms_norm_kernel(
    x, delta, weight, total, normed,
    size, stride_x_m, stride_delta_m, eps,
    HAS_DELTA: tl.constexpr, PDL: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Compute s = x + delta and weight * (s / sqrt(mean(s^2) + eps)) for one row.

    x, delta [M, H] and weight [H] give total (s, if there is a delta) and normed [M, H], which are contiguous. The sum,
    the quotient and its product with the weight are each computed in fp32 and rounded to the dtype of x.
    """
    i_m = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, BLOCK_H)
    m_h = o_h < size
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    # [BLOCK_H]
    b_weight = tl.load(weight + o_h, mask=m_h, other=0.0)
    # [BLOCK_H]
    b_x = tl.load(x + i_m * stride_x_m + o_h, mask=m_h, other=0.0)
    if HAS_DELTA:
        # [BLOCK_H]
        b_delta = tl.load(delta + i_m * stride_delta_m + o_h, mask=m_h, other=0.0)
        b_x = (b_x.to(tl.float32) + b_delta.to(tl.float32)).to(b_x.dtype)
        tl.store(total + i_m * size + o_h, b_x, mask=m_h)
    b_wide = b_x.to(tl.float32)
    square = tl.sum(b_wide * b_wide, 0)
    if b_x.dtype == tl.float32:
        # Quotients and roots are approximate by default; the rounding to 16 bits hides that, fp32 does not.
        b_normed = tl.div_rn(b_wide, tl.sqrt_rn(tl.div_rn(square, size * 1.0) + eps))
    else:
        b_normed = (b_wide * tl.rsqrt(square / size + eps)).to(b_x.dtype)
    b_out = (b_normed.to(tl.float32) * b_weight.to(tl.float32)).to(b_x.dtype)
    tl.store(normed + i_m * size + o_h, b_out, mask=m_h)


def add_rms_norm(x, delta, weight, eps):
    """Launch the kernel, one program per row; see the public `add_rms_norm`. Without delta the sum is empty."""
    size = x.shape[-1]
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = normed.new_empty(0 if delta is None else x.shape)
    if not normed.numel():
        return total, normed
    rows = as_rows(x)
    added = rows if delta is None else as_rows(delta)
    config = configuration(size)
    pdl = programmatic(x.device)
    with launch.on_device(x):
        _add_rms_norm_kernel[(rows.shape[0],)](
            rows, added, weight.contiguous(), total, normed,
            size, rows.stride(0), added.stride(0), eps,
            HAS_DELTA=delta is not None, PDL=pdl, BLOCK_H=triton.next_power_of_2(size),
            num_warps=config.num_warps, num_stages=config.num_stages, **launch.OPTIONS,
            **launch_options(pdl),
        )  # fmt: skip
    return total, normed
