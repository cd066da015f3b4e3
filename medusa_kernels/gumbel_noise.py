"""Gumbel noise that is a function of a seed, a place in the text and a token, so that a step can use it twice.

It does not know heads, trees or samplers: who adds the noise to which logits is decided elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from medusa_kernels import _checks, _cpu, reference
from medusa_kernels._registry import register, triton_or


def gumbel_noise(seeds: Tensor, first: Tensor, rows: int, vocabulary: int) -> Tensor:
    """Return standard Gumbel noise for successive places of each text, from a counter-based generator.

    The argmax of log-probabilities plus such noise is a sample from them (Maddison, Tarlow and Minka 2014,
    arXiv:1411.0030). A number depends on nothing but seed, place and token: it is the same in any batch, whatever
    `rows` and `vocabulary`, and on every device up to the rounding of two logarithms.

    The bits x are those of Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): word
    `token % 4` for the counter `(token // 4, place, 0, 0)` and the low and the high half of the seed as key. With
    `v = min(x / 2^32 + 2^-33, 1 - 2^-24)` in fp32 the noise is `-log(-log(1 - v))`. Below 1/16 the inner logarithm
    is a series in v, so that the largest numbers, which win, have the resolution of 32 bits.

    Args:
        seeds: int64 `[B]`, the key of each text.
        first: int32 or int64 `[B]`, the place of each text's row 0; from 0 on.
        rows: R, the number of places.
        vocabulary: V, the number of tokens.

    Returns:
        fp32 `[B, R, V]`, new and contiguous; row r is for the place `first + r`. Numbers are between -2.9 and 22.9.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value. Values in tensors are not read.
    """
    _checks.axes("seeds", seeds, "B")
    _checks.dtype("seeds", seeds, torch.int64)
    _checks.shape("first", first, seeds.shape)
    _checks.dtype("first", first, torch.int32, torch.int64)
    _checks.same_device("first", first, "seeds", seeds)
    _checks.require(rows >= 1, "rows", "at least 1", rows)
    _checks.require(1 <= vocabulary < 2**31, "vocabulary", "1 to 2147483647", vocabulary)
    return torch.ops.medusa_kernels.gumbel_noise.default(seeds, first, rows, vocabulary)


def _native(seeds: Tensor, first: Tensor, rows: int, vocabulary: int) -> Tensor:
    """Run the op on a CPU by the C++ library."""
    out = seeds.new_empty(len(seeds), rows, vocabulary, dtype=torch.float32)
    seeds, first = seeds.contiguous(), first.long().contiguous()  # held until the call has returned
    _cpu.call("gumbel_noise", _cpu.threads(), *out.shape, seeds, first, out)
    return out


_EAGER = triton_or("gumbel_noise", "reference", reference.gumbel_noise, "PyTorch, operation by operation")
register(
    gumbel_noise,
    lambda a: a.seeds.new_empty(len(a.seeds), a.rows, a.vocabulary, dtype=torch.float32),
    cpu=_cpu.native_or("gumbel_noise", _native, _EAGER),
    cuda=_EAGER,
)
