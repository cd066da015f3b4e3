"""Random weights in 4 and 8 bits, in every way in which the ops read them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from medusa_kernels import quantised

KINDS = ("int4", "zeros", "nf4", "fp4", "fp8", "int8")
"""What codes stand for, "zeros" for int4 codes with zero points, or what numbers of 8 bits are."""


class Stored(NamedTuple):
    """A weight `[..., N, K]`, its scales and zero points, and what 4-bit codes stand for."""

    weight: Tensor
    scale: Tensor
    zero: Tensor | None
    codes: str

    def dequantised(self) -> Tensor:
        """Return its numbers in fp64."""
        return quantised.dequantised(self.weight, self.scale, self.zero, self.codes, wide=torch.float64)

    def on(self, device: str | torch.device, scale: torch.dtype = torch.float32, factor: float = 1.0) -> Stored:
        """Return the same on a device, with scales of a dtype, times a factor."""
        zero = None if self.zero is None else self.zero.to(device)
        return Stored(self.weight.to(device), (self.scale * factor).to(device, scale), zero, self.codes)


def make(kind: str, shape: tuple[int, ...], group: int) -> Stored:
    """Numbers of about K^-0.5. Every code occurs, and many subnormal numbers of fp8.

    `group` is that of 4-bit codes, 0 for K.
    """
    *outer, size = shape
    if kind in ("fp8", "int8"):
        numbers = torch.randint(-127, 128, shape)
        weight = numbers.to(torch.int8) if kind == "int8" else (numbers / 2048).to(torch.float8_e4m3fn)
        return Stored(weight, (torch.rand(outer) + 0.5) / size**0.5 * (1 / 64 if kind == "int8" else 32), None, "int4")
    groups = (*outer, size // (group or size))
    scale = (torch.rand(groups) + 0.5) / size**0.5 * (1 / 6 if kind in ("int4", "zeros") else 2)
    zero = torch.randint(0, 17, groups, dtype=torch.uint8) if kind == "zeros" else None
    codes = "int4" if kind == "zeros" else kind
    return Stored(quantised.pack(torch.randint(0, 16, shape), codes), scale, zero, codes)
