"""`add_rms_norm` as one Triton launch: a program holds one row, reads it once and writes what is asked for."""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from medusa_kernels._triton import launch
from medusa_kernels._triton.decode_linear import as_rows
from medusa_kernels._triton.programmatic import has_programmatic, launch_options, programmatic

SIZES = (2048, 4096, 5120, 8192)
"""Row lengths that are compiled ahead for inspection; any length runs."""


@dataclass(frozen=True)
class Config:
    """How a row is held: in how many warps."""

    num_warps: int
    num_stages: int = 1


def configuration(device: launch.Device, dtype: torch.dtype, size: int) -> Config:
    """Return the launch configuration: 16 elements a thread (of 16 bits, two 16-byte loads), in at most 16 warps."""
    return Config(num_warps=min(16, max(1, triton.next_power_of_2(size) // 512)))


def candidates(device: launch.Device, dtype: torch.dtype, size: int) -> list[Config]:
    """List configurations worth timing, the chosen one first."""
    chosen = configuration(device, dtype, size)
    return [chosen, *(config for config in map(Config, (4, 8, 16, 32)) if config != chosen)]


@triton.jit
def _add_rms_norm_kernel(
    x, delta, weight, total, normed,
    size, stride_x_m, stride_d_m, eps,
    HAS_DELTA: tl.constexpr, PDL: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    i_m = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, BLOCK_H)
    m_h = o_h < size
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    b_weight = tl.load(weight + o_h, mask=m_h, other=0.0)
    b_x = tl.load(x + i_m * stride_x_m + o_h, mask=m_h, other=0.0)
    if HAS_DELTA:
        b_delta = tl.load(delta + i_m * stride_d_m + o_h, mask=m_h, other=0.0)
        b_x = (b_x.to(tl.float32) + b_delta.to(tl.float32)).to(b_x.dtype)
        tl.store(total + i_m * size + o_h, b_x, mask=m_h)
    b_wide = b_x.to(tl.float32)
    square = tl.sum(b_wide * b_wide, 0)
    if b_x.dtype == tl.float32:
        # Quotients and roots are approximate unless asked to be correctly rounded; in 16 bits it would not show.
        b_normed = tl.div_rn(b_wide, tl.sqrt_rn(tl.div_rn(square, size * 1.0) + eps))
    else:
        b_normed = (b_wide * tl.rsqrt(square / size + eps)).to(b_x.dtype)
    b_out = (b_normed.to(tl.float32) * b_weight.to(tl.float32)).to(b_x.dtype)
    tl.store(normed + i_m * size + o_h, b_out, mask=m_h)


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Launch the kernel, a program a row; see the public `add_rms_norm`. Without delta the sum is empty."""
    size = x.shape[-1]
    normed = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = normed.new_empty(0 if delta is None else x.shape)
    if not normed.numel():
        return total, normed
    rows = as_rows(x)
    added = rows if delta is None else as_rows(delta)
    config = configuration(launch.describe(x.device), x.dtype, size)
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


def specialisations(device: launch.Device) -> Iterator[launch.Specialisation]:
    """Yield every row length in bf16 with a sum and without, and what else changes the code at one of them."""
    for size in SIZES:
        yield _form(device, torch.bfloat16, size)
        yield _form(device, torch.bfloat16, size, delta=False)
    for dtype in (torch.float16, torch.float32):
        yield _form(device, dtype, 4096)
        yield _form(device, dtype, 8192)
    yield _form(device, torch.bfloat16, 4095, aligned=False)


def _form(
    device: launch.Device,
    dtype: torch.dtype,
    size: int,
    *,
    delta: bool = True,
    aligned: bool = True,
) -> launch.Specialisation:
    config = configuration(device, dtype, size)
    kind, pdl = launch.TRITON_TYPES[dtype], has_programmatic(device)
    integers = ("size", "stride_x_m", "stride_d_m")
    return launch.Specialisation(
        name=f"add_rms_norm {kind} H{size}" + " sum" * delta + " pdl" * pdl + (" unit1" if not aligned else ""),
        kernel=_add_rms_norm_kernel,
        signature=dict.fromkeys(("x", "delta", "weight", "total", "normed"), f"*{kind}")
        | dict.fromkeys(integers, "i32")
        | {"eps": "fp32"},
        constants={"HAS_DELTA": delta, "PDL": pdl, "BLOCK_H": triton.next_power_of_2(size)},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        aligned=integers if aligned else (),
    )
