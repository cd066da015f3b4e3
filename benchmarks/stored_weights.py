"""Random weights as quantised models store them, for benchmarks of the ops that read them."""

from __future__ import annotations

import torch
from torch import Tensor

from medusa_kernels.quantised import NF4, dequantised, pack

FORMS = ("int4 g128", "nf4 g64", "int8", "fp8")
"""int4 with scales in fp16; nf4 with scales in fp32, as bitsandbytes has them; the others with a scale per row."""


def row_bytes(form: str, columns: int, element: int) -> int:
    """Return the bytes of a row of a weight; "full" has elements of `element` bytes."""
    return {
        "full": columns * element,
        "int4 g128": columns // 2 + columns // 128 * 2,
        "nf4 g64": columns // 2 + columns // 64 * 4,
    }.get(form, columns + 4)


def quantised(weight: Tensor, form: str) -> tuple[Tensor, Tensor, str]:
    """Return a weight `[..., N, K]` in a form: its numbers, its scales, and the name of its codes."""
    if form in ("int8", "fp8"):
        most = 127.0 if form == "int8" else 448.0
        scale = weight.abs().amax(-1).float() / most
        levels = weight.float() / scale[..., None]
        return (levels.round().to(torch.int8) if form == "int8" else levels.to(torch.float8_e4m3fn)), scale, "int4"
    codes, group = form.split(" g")
    grouped = weight.float().unflatten(-1, (-1, int(group)))
    most = grouped.abs().amax(-1)
    if codes == "int4":
        scale = (most / 7).half()
        numbers = (grouped / scale.float()[..., None]).round().add(8).clamp(0, 15)
    else:
        table = torch.tensor(NF4, device=weight.device)
        scale, numbers = most, torch.bucketize(grouped / most[..., None], (table[1:] + table[:-1]) / 2)
    return pack(numbers.flatten(-2), codes), scale, codes


def restored(weight: Tensor, scale: Tensor, codes: str, dtype: torch.dtype) -> Tensor:
    """Return the numbers that a stored weight stands for."""
    return dequantised(weight, scale, None, codes).to(dtype)
