"""Weights in 4 and 8 bits: how their numbers are stored, for the ops that read them as they are.

A weight `[N, K]` is stored as one of

* int8 or float8_e4m3fn `[N, K]` with a scale per row, fp32 `[N]`: an element is the number times the scale;
* uint8 `[N, K / 2]` of two 4-bit codes each, with a scale per group of g columns, fp32, fp16 or bf16 `[N, K / g]`:
  an element is the code's value times the scale. g is a multiple of 16 that divides K.

What a code stands for is named:

* `"int4"`: the code less a zero point, which is 8, or uint8 `[N, K / g]` of 0 to 16. Column 2j is in the lower half of
  byte j, as compressed-tensors packs it.
* `"nf4"`, `"fp4"`: its place in a table (QLoRA, arXiv:2305.14314, appendix E, and bitsandbytes). Column 2j is in the
  upper half of byte j, as bitsandbytes packs it.

In the place of such a name, `"dynamic"` says that a weight is int8, or int4 without zero points and g a multiple of 32,
and that activations are rounded to 8 bits before they are multiplied with it (`rounded`), as torchao and
compressed-tensors do dynamically. That is read on a CPU. Such an int4 weight has in the place of zero points the sum of
each row's elements (`row_sums`): the 256 codes of an activation do not begin at the same number for all.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from medusa_kernels import _checks

CODES = ("int4", "nf4", "fp4")
"""What codes of 4 bits may stand for."""
KINDS = (*CODES, "dynamic")
"""What the `codes` of an op may be."""
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
FP4 = tuple(sign * value / 12 for sign in (1, -1) for value in (0, 0.0625, 8, 12, 4, 6, 2, 3))
TABLES = {"nf4": NF4, "fp4": FP4}
MIDDLE = 8
"""The zero point of int4 codes without zero points."""
GROUP_MULTIPLE = 16
DYNAMIC_GROUP_MULTIPLE = 32
MOST_DYNAMIC = 131_071
"""Products of two numbers from -128 to 127 whose sum is an int32 in any case."""

BYTES = (torch.int8, torch.float8_e4m3fn)
"""The dtypes of weights with a scale per row."""


def columns(weight: Tensor) -> int:
    """Return K, the columns of a weight `[N, K]`, or of the one that 4-bit codes `[N, K / 2]` stand for."""
    return weight.shape[-1] * (2 if weight.dtype == torch.uint8 else 1)


def group_size(weight: Tensor, scale: Tensor | None) -> int:
    """Return g, the columns of a group of 4-bit codes; 0 for other weights."""
    return columns(weight) // scale.shape[-1] if scale is not None and weight.dtype == torch.uint8 else 0


def check(
    names: tuple[str, str, str], weight: Tensor, scale: Tensor | None, zero: Tensor | None, codes: str,
    shape: _checks.Shape, like: str, other: Tensor,
) -> None:  # fmt: skip
    """Check a weight that stands for `shape`, `[..., N, K]`, beside activations `other`, named `like`.

    Raises:
        ValueError: a wrong shape, dtype, device or layout, or unknown codes. The message has the one of `names` for the
            weight, its scale or its zero points.
    """
    *outer, size = shape
    name, of_scale, of_zero = names
    _checks.require(codes in KINDS, "codes", " or ".join(KINDS), codes)
    if codes == "dynamic":
        integers = weight.dtype in (torch.int8, torch.uint8) and scale is not None
        expected = "dynamic only for int8 or int4 weights with scales"
        _checks.require(integers, "codes", expected, f"it for {weight.dtype}")
        _checks.require(other.device.type == "cpu", "codes", "dynamic only on a CPU", f"it on {other.device}")
    if scale is None:
        _checks.require(zero is None, of_zero, "None without a scale", "zero points")
        _checks.match(name, weight, shape, like, other)
        return
    _checks.dtype(name, weight, *BYTES, torch.uint8)
    _checks.same_device(name, weight, like, other)
    _checks.same_device(of_scale, scale, like, other)
    _checks.contiguous(of_scale, scale)
    if weight.dtype != torch.uint8:
        _checks.shape(name, weight, shape)
        _checks.typed(of_scale, scale, weight.shape[:-1], torch.float32, like, other)
        _checks.require(zero is None, of_zero, "None with a scale per row", "zero points")
        fits = codes != "dynamic" or weight.shape[-1] <= MOST_DYNAMIC
        _checks.require(fits, name, f"at most {MOST_DYNAMIC} columns beside rounded activations", weight.shape[-1])
        return
    assert isinstance(size, int)
    _checks.shape(name, weight, (*outer, size // 2))
    _checks.shape(of_scale, scale, (*weight.shape[:-1], "K / g"))
    _checks.dtype(of_scale, scale, *_checks.FLOATS)
    groups = scale.shape[-1]
    multiple = DYNAMIC_GROUP_MULTIPLE if codes == "dynamic" else GROUP_MULTIPLE
    fits = groups >= 1 and size % groups == 0 and size // max(groups, 1) % multiple == 0
    expected = f"groups of a multiple of {multiple} of the {size} columns"
    _checks.require(fits, of_scale, expected, f"{groups} groups")
    if codes == "dynamic":
        _checks.require(zero is not None, of_zero, "the sums of the rows (quantised.row_sums)", None)
        assert zero is not None
        _checks.typed(of_zero, zero, (*scale.shape[:-1], 1), torch.float32, like, other)
        _checks.contiguous(of_zero, zero)
    elif zero is not None:
        _checks.require(codes == "int4", of_zero, f"None with {codes}", "zero points")
        _checks.typed(of_zero, zero, scale.shape, torch.uint8, like, other)
        _checks.contiguous(of_zero, zero)


def values(weight: Tensor, codes: str) -> Tensor:
    """Return what 4-bit codes `[..., K / 2]` stand for before zero points and scales: fp32 `[..., K]`."""
    low, high = weight & 15, weight >> 4
    if codes not in TABLES:
        return torch.stack((low, high), -1).flatten(-2).float()
    return _table(codes, weight.device)[torch.stack((high, low), -1).flatten(-2).int()]


@functools.cache
def _table(codes: str, device: torch.device) -> Tensor:
    # Copied to a device once: a copy cannot be captured in a CUDA graph.
    with torch.inference_mode(False):
        return torch.tensor(TABLES[codes], device=device)


def dequantised(
    weight: Tensor, scale: Tensor | None, zero: Tensor | None = None, codes: str = "int4", *,
    wide: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """Return the numbers `[..., N, K]` that a weight stands for, in dtype `wide`; the weight itself without a scale."""
    if scale is None:
        return weight
    scale = scale.to(wide)[..., None]
    if weight.dtype != torch.uint8:
        return weight.to(wide) * scale
    numbers = values(weight, codes).to(wide).unflatten(-1, (scale.shape[-2], -1))
    if codes not in TABLES:
        numbers = numbers - (MIDDLE if zero is None or codes == "dynamic" else zero.to(wide)[..., None])
    return (numbers * scale).flatten(-2)


def row_sums(weight: Tensor, scale: Tensor) -> Tensor:
    """Return the sum of the elements of each row of an int4 weight without zero points: fp32 `[.., N, 1]`."""
    codes = ((weight & 15) + (weight >> 4)).unflatten(-1, (scale.shape[-1], -1)).sum(-1)
    return ((codes - MIDDLE * group_size(weight, scale)) * scale.double()).sum(-1, keepdim=True).float()


def rounded(x: Tensor, codes: str, weight: Tensor) -> Tensor:
    """Return x `[..., K]` as a weight with these codes sees it: for "dynamic" rounded to 8 bits with a scale per row.

    Beside int8 the scale is the row's largest size over 127.5, at least 2^-23, as in torchao's layers;
    compressed-tensors' have no such bound. Beside int4 it is (most - least) / 255, at least 2^-126, with `least` the
    row's smallest number or 0 and `most` its largest or 0, and the 256 codes begin at round(least / scale), as in
    torchao's layers in fp32.
    """
    if codes != "dynamic" or x.numel() == 0:
        return x
    wide = x if x.dtype == torch.float64 else x.float()
    if weight.dtype == torch.uint8:
        least, most = wide.amin(-1, keepdim=True).clamp(max=0), wide.amax(-1, keepdim=True).clamp(min=0)
        scale = ((most - least) / 255).clamp(min=2**-126)
        low = (least / scale).round()
    else:
        scale = (wide.abs().amax(-1, keepdim=True) / 127.5).clamp(min=2**-23)
        low = torch.full_like(scale, -128)
    return ((wide * (1 / scale)).round().clamp(low, low + 255) * scale).to(x.dtype)


def pack(numbers: Tensor, codes: str = "int4") -> Tensor:
    """Return 4-bit codes `[..., K]`, integers of 0 to 15, as uint8 `[..., K / 2]`."""
    even, odd = numbers.to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return even << 4 | odd if codes in TABLES else even | odd << 4
