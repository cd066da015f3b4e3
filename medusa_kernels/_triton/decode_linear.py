"""`decode_linear` as one Triton launch: every program streams its own rows of one weight past all rows of x.

All rows of x lie in one tile. The programs of the first weight come first, then those of the second and the third;
gated, a program streams the same rows of both weights into two accumulators. With more than 64 rows PyTorch's matrix
products take over.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from medusa_kernels._triton import launch
from medusa_kernels._triton.programmatic import has_programmatic, launch_options, programmatic
from medusa_kernels._triton.streaming import dot_accumulate
from medusa_kernels.decode_linear import MOST_ROWS, MOST_WEIGHTS, with_linear

VECTOR = 16
"""What strides and sizes must be multiples of for Triton to load 16 bytes at once."""


@dataclass(frozen=True)
class Config:
    """How weights are streamed.

    Attributes:
        swap: whether the weight is the left factor, whose rows fill the 64 rows of a Hopper matrix instruction.
        block_m: rows of x, at least as many as there are.
        block_n: rows of each weight that a program streams.
        block_k: columns a step.
        num_warps: warps a program.
        num_stages: depth of software pipelining.
    """

    swap: bool
    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int

    def stage_bytes(self, dtype: torch.dtype, gate: bool) -> int:
        """Return the bytes of shared memory that one step takes."""
        return (self.block_m + self.block_n * (2 if gate else 1)) * self.block_k * dtype.itemsize


def configuration(
    device: launch.Device,
    dtype: torch.dtype,
    rows: int,
    out_features: int,
    in_features: int,
    gate: bool,
    *,
    vectors: bool = True,
) -> Config:
    """Choose how weights are streamed.

    Args:
        device: where it runs.
        dtype: of everything.
        rows: of x, 1 to 64.
        out_features: rows of all weights together.
        in_features: columns.
        gate: whether programs have two accumulators.
        vectors: whether 16 bytes can be loaded at once.
    """
    m = min(MOST_ROWS, max(16, triton.next_power_of_2(rows)))
    if dtype == torch.float32:
        # A step is also how long a chain of additions gets. Two accumulators of 64 rows spill in 4 warps.
        return Config(False, m, 32, 16, 8 if gate and m == MOST_ROWS else 4, 2)
    if not vectors:
        return Config(False, m, 32, 32, 4, 2)
    if device.hopper:
        config = _on_hopper(device, m, out_features, gate)
    else:
        # Of equal times the one that leaves the most room on a multiprocessor.
        config = min(
            _choices(device, dtype, m, gate),
            key=lambda c: (
                _time(c, device, dtype, out_features, in_features, gate),
                -_programs(c, device, dtype, gate),
            ),
        )
    return _fitting(config, device, dtype, gate)


def _on_hopper(device: launch.Device, m: int, out_features: int, gate: bool) -> Config:
    """Return what measured best on an H200 at the projections of Llama-2-7B and Llama-3-8B, M = 1 and 64."""
    if gate:
        if out_features > 24576 or m == 32:
            return Config(True, m, 64, 64, 4, 4)
        return Config(False, m, 32, 128, 4, 3) if m < 64 else Config(False, m, 64, 64, 4, 4)
    if m < 64:
        return Config(True, m, 64, 128, 4, 6 if out_features <= 8192 else 4)
    if out_features <= device.multiprocessors * 32:  # a multiprocessor holds one program of six stages: a single wave
        return Config(False, m, 32, 128, 4, 6)
    if out_features <= 8192:
        return Config(True, m, 64, 128, 4, 6)
    return Config(False, m, 128, 64, 4, 5)


IN_FLIGHT = 16 * 1024
"""Bytes of weights that must be on their way to each multiprocessor to keep the memory busy, and so what it delivers
within its latency. An A100 needs 11 KiB (2 TB/s for 0.6 us)."""

PULL = 2
"""How many times its even share of the memory's bandwidth a multiprocessor can take in, activations included."""


def _choices(device: launch.Device, dtype: torch.dtype, m: int, gate: bool) -> list[Config]:
    """Return the tiles to choose from where nothing was measured, each with as many stages as fit.

    With steps of 128 columns 64 rows of x spill, and so do two accumulators, unless the tile is the smallest.
    """
    tiles = ((32, 128, 5), (32, 64, 5), (64, 128, 4), (64, 64, 4))
    return [
        _fitting(Config(False, m, n, k, 4, stages), device, dtype, gate)
        for n, k, stages in tiles
        if k < 128 or (m < MOST_ROWS and not gate) or (m, n) == (16, 32)
    ]


def _programs(config: Config, device: launch.Device, dtype: torch.dtype, gate: bool) -> int:
    """Return how many programs share a multiprocessor, by its shared memory.

    It holds all stages where tensor cores read both factors there (10.0, from 64 rows on), else all but one.
    """
    stages = config.num_stages - (device.capability[0] != 10 or config.block_m < 64)
    return max(1, device.blocks(stages * config.stage_bytes(dtype, gate)))


def _time(
    config: Config, device: launch.Device, dtype: torch.dtype, out_features: int, in_features: int, gate: bool
) -> float:
    """Estimate how long a launch takes, in rows of weights that the memory could deliver meanwhile.

    Programs run in waves of as many as the device holds at once. A wave takes as long as the memory needs for its
    weights, or as the busiest multiprocessor needs for its programs' weights and activations, or as a wave too small to
    keep the memory busy: whichever is longest. Before each wave the memory's latency passes.
    """
    weights, count = config.block_n * (1 + gate), device.multiprocessors
    in_flight = (config.num_stages - 1) * weights * config.block_k * dtype.itemsize
    latency = count * IN_FLIGHT / (in_features * dtype.itemsize)

    def wave(programs: int) -> float:
        busiest = -(-programs // count) * (weights + config.block_m)
        return latency + max(programs * weights, busiest * count / PULL, count * IN_FLIGHT / in_flight * weights)

    waves, rest = divmod(-(-out_features // weights), count * _programs(config, device, dtype, gate))
    return waves * wave(count * _programs(config, device, dtype, gate)) + (wave(rest) if rest else 0.0)


def _fitting(config: Config, device: launch.Device, dtype: torch.dtype, gate: bool) -> Config:
    """Return the configuration with no more stages than fit the shared memory."""
    stages = max(2, device.shared_memory // config.stage_bytes(dtype, gate))
    return replace(config, num_stages=min(config.num_stages, stages))


def candidates(
    device: launch.Device,
    dtype: torch.dtype,
    rows: int,
    out_features: int,
    in_features: int,
    gate: bool,
    *,
    vectors: bool = True,
) -> list[Config]:
    """List configurations worth timing, the chosen one first."""
    chosen = configuration(device, dtype, rows, out_features, in_features, gate, vectors=vectors)
    if dtype == torch.float32 or not vectors or not device.hopper:
        return [chosen]
    # swap, block_n, block_k, stages; block_n of both weights together
    shapes = [
        (False, 32, 128, 4), (False, 32, 128, 5), (False, 32, 128, 6), (False, 32, 256, 3), (False, 64, 128, 3),
        (False, 64, 128, 4), (False, 64, 64, 6), (False, 128, 64, 4), (True, 64, 128, 3), (True, 64, 128, 4),
        (True, 64, 128, 6), (True, 64, 64, 6), (True, 128, 64, 4), (True, 128, 64, 5), (True, 128, 128, 3),
    ]  # fmt: skip
    if gate:
        # The left factor of a Hopper matrix instruction has 64 rows of one weight.
        shapes = [(swap, n // 2, k, stages) for swap, n, k, stages in shapes if n >= (128 if swap else 64)]
        shapes += [(False, 32, 64, 6), (False, 16, 256, 4), (False, 64, 128, 3), (True, 64, 64, 6)]
    configs = [Config(swap, chosen.block_m, n, k, 4, stages) for swap, n, k, stages in shapes]
    fitting = [c for c in configs if c.num_stages * c.stage_bytes(dtype, gate) <= device.shared_memory]
    return [chosen, *(config for config in fitting if config != chosen)]


@triton.jit
def _accumulate(acc, comp, b_x, b_w, SWAP: tl.constexpr):
    # [BLOCK_N, BLOCK_M] if SWAP, else [BLOCK_M, BLOCK_N]; only fp32 is compensated.
    if SWAP:
        b_a, b_b = b_w, tl.trans(b_x)
    else:
        b_a, b_b = b_x, tl.trans(b_w)
    if b_x.dtype == tl.float32:
        acc, comp = dot_accumulate(b_a, b_b, acc, comp)
    else:
        acc = tl.dot(b_a, b_b, acc, input_precision="ieee")
    return acc, comp


@triton.jit
def _add_bias(acc, bias, o_n, m_n, SWAP: tl.constexpr):
    b_bias = tl.load(bias + o_n, mask=m_n, other=0.0).to(tl.float32)
    return acc + (b_bias[:, None] if SWAP else b_bias[None, :])


@triton.jit(do_not_specialize=["rows"])
def _decode_linear_kernel(
    x, w0, w1, w2, b0, b1, b2, residual, out,
    rows, size, features_0, features_1, features_2,
    stride_x_m, stride_w0_n, stride_w1_n, stride_w2_n, stride_r_m,
    COUNT: tl.constexpr, GATE: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    EVEN_K: tl.constexpr, SWAP: tl.constexpr, PDL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    i_p = tl.program_id(0)
    # The program's weight, its bias, where its columns of the result start, and the program's tile of it.
    w, bias, features, stride_w_n, first, i_t = w0, b0, features_0, stride_w0_n, 0, i_p
    width = features_0
    if COUNT > 1 and not GATE:
        tiles_0, tiles_1 = tl.cdiv(features_0, BLOCK_N), tl.cdiv(features_1, BLOCK_N)
        is_0, is_1 = i_p < tiles_0, i_p < tiles_0 + tiles_1
        w = tl.where(is_0, w0, tl.where(is_1, w1, w2))
        bias = tl.where(is_0, b0, tl.where(is_1, b1, b2))
        features = tl.where(is_0, features_0, tl.where(is_1, features_1, features_2))
        stride_w_n = tl.where(is_0, stride_w0_n, tl.where(is_1, stride_w1_n, stride_w2_n))
        first = tl.where(is_0, 0, tl.where(is_1, features_0, features_0 + features_1))
        i_t = i_p - tl.where(is_0, 0, tl.where(is_1, tiles_0, tiles_0 + tiles_1))
        width = features_0 + features_1 + features_2

    o_m, o_k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    o_n = i_t * BLOCK_N + tl.arange(0, BLOCK_N)
    m_m, m_n = o_m < rows, o_n < features
    # Beyond the last row of a weight its last row is read again: the loop then needs no mask for it.
    o_row = tl.minimum(o_n, features - 1).to(tl.int64)
    p_x = x + o_m.to(tl.int64)[:, None] * stride_x_m + o_k[None, :]
    p_w = w + o_row[:, None] * stride_w_n + o_k[None, :]
    p_u = w1 + o_row[:, None] * stride_w1_n + o_k[None, :]
    if PDL:
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros((BLOCK_N, BLOCK_M) if SWAP else (BLOCK_M, BLOCK_N), tl.float32)
    acc_u, comp, comp_u = acc, acc, acc
    for k in range(0, size, BLOCK_K):
        # [BLOCK_M, BLOCK_K], [BLOCK_N, BLOCK_K]
        if EVEN_K:
            b_x = tl.load(p_x + k, mask=m_m[:, None], other=0.0)
            b_w = tl.load(p_w + k)
        else:
            m_k = (k + o_k < size)[None, :]
            b_x = tl.load(p_x + k, mask=m_m[:, None] & m_k, other=0.0)
            b_w = tl.load(p_w + k, mask=m_k, other=0.0)
        acc, comp = _accumulate(acc, comp, b_x, b_w, SWAP)
        if GATE:
            b_u = tl.load(p_u + k) if EVEN_K else tl.load(p_u + k, mask=m_k, other=0.0)
            acc_u, comp_u = _accumulate(acc_u, comp_u, b_x, b_u, SWAP)
    if PDL:
        # Not before: programs of the next kernel would take room from this one's that have yet to begin.
        tl.extra.cuda.gdc_launch_dependents()

    if HAS_BIAS:
        acc = _add_bias(acc, bias, o_n, m_n, SWAP)
        if GATE:
            acc_u = _add_bias(acc_u, b1, o_n, m_n, SWAP)
    if GATE:
        acc = acc * tl.sigmoid(acc) * acc_u
    if SWAP:
        o_r, o_c, m_out = o_m[None, :], o_n[:, None], m_m[None, :] & m_n[:, None]
    else:
        o_r, o_c, m_out = o_m[:, None], o_n[None, :], m_m[:, None] & m_n[None, :]
    if HAS_RESIDUAL:
        acc += tl.load(residual + o_r.to(tl.int64) * stride_r_m + o_c, mask=m_out, other=0.0).to(tl.float32)
    tl.store(out + o_r.to(tl.int64) * width + first + o_c, acc.to(out.dtype.element_ty), mask=m_out)


def decode_linear(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None] | None = None,
    *,
    gate: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """Launch the kernel, or PyTorch's matrix products for many rows; see the public `decode_linear`."""
    size, features = x.shape[-1], [weight.shape[0] for weight in weights]
    if x.numel() > MOST_ROWS * size:
        return with_linear(x, weights, biases, gate=gate, residual=residual)
    width = features[0] if gate else sum(features)
    out = torch.empty(*x.shape[:-1], width, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    flat, added = as_rows(x), as_rows(out if residual is None else residual)
    rows = flat.shape[0]
    strides = [flat.stride(0), *(weight.stride(0) for weight in weights)]
    vectors = all(number % VECTOR == 0 for number in (size, *strides))
    config = configuration(launch.describe(x.device), x.dtype, rows, sum(features), size, gate, vectors=vectors)
    has_bias = biases is not None and any(bias is not None for bias in biases)
    unused = MOST_WEIGHTS - len(weights)
    pdl = programmatic(x.device)
    with launch.on_device(x):
        tiles = [triton.cdiv(n, config.block_n) for n in features]
        _decode_linear_kernel[(tiles[0] if gate else sum(tiles),)](
            flat, *weights, *[weights[0]] * unused,
            *(_bias_vectors(weights, biases) if has_bias else [x] * len(weights)), *[x] * unused,
            added, out,
            rows, size, *features, *[0] * unused,
            *strides, *[0] * unused, added.stride(0),
            COUNT=len(weights), GATE=gate, HAS_BIAS=has_bias, HAS_RESIDUAL=residual is not None,
            EVEN_K=size % config.block_k == 0, SWAP=config.swap, PDL=pdl,
            BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
            num_warps=config.num_warps, num_stages=config.num_stages, **launch.OPTIONS,
            **launch_options(pdl),
        )  # fmt: skip
    return out


def as_rows(tensor: Tensor) -> Tensor:
    """Return the tensor as a matrix of its rows, copied only if its strides require it."""
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _bias_vectors(weights: list[Tensor], biases: list[Tensor | None] | None) -> list[Tensor]:
    """Return a bias for every weight, zeros where others have one and it has none."""
    given = biases or [None] * len(weights)
    return [
        weight.new_zeros(weight.shape[0]) if bias is None else bias.contiguous()
        for weight, bias in zip(weights, given, strict=True)
    ]


def specialisations(device: launch.Device) -> Iterator[launch.Specialisation]:
    """Yield the forms of Llama's and Qwen's projections in bf16, and what else changes the code at some of them."""
    fp16, bf16, fp32 = torch.float16, torch.bfloat16, torch.float32
    for rows in (1, 32, 64):
        yield _form(device, bf16, rows, (4096, 4096, 4096))
        yield _form(device, bf16, rows, (4096,), residual=True)
        yield _form(device, bf16, rows, (11008, 11008), gate=True)
    yield _form(device, bf16, 64, (4096, 1024, 1024), bias=True)
    yield _form(device, bf16, 64, (28672,))
    yield _form(device, bf16, 1, (4096, 1024, 1024), bias=True)
    yield _form(device, bf16, 1, (11008, 11008), gate=True, bias=True)
    yield _form(device, fp16, 1, (4096, 4096, 4096))
    yield _form(device, fp16, 64, (11008, 11008), gate=True)
    for size, elements in ((11024, 16), (4095, 1)):
        yield _form(device, bf16, 1, (4096,), size=size, elements=elements)
        yield _form(device, bf16, 64, (11008, 11008), gate=True, size=size, elements=elements)
    for rows in (1, 64):
        yield _form(device, fp32, rows, (4096,), residual=True)
        yield _form(device, fp32, rows, (11008, 11008), gate=True)
    if not device.hopper:
        # Which tile is chosen depends on how many multiprocessors there are.
        for rows, gate in itertools.product((16, 32, MOST_ROWS), (False, True)):
            for config in _choices(device, bf16, rows, gate):
                yield _form(device, bf16, rows, (256, 256) if gate else (256,), gate=gate, config=config)


def _form(
    device: launch.Device,
    dtype: torch.dtype,
    rows: int,
    features: tuple[int, ...],
    *,
    gate: bool = False,
    bias: bool = False,
    residual: bool = False,
    size: int = 4096,
    elements: int = VECTOR,
    config: Config | None = None,
) -> launch.Specialisation:
    """Describe one compiled form; `elements` is what all strides are multiples of. The configuration may be given."""
    config = config or configuration(device, dtype, rows, sum(features), size, gate, vectors=elements == VECTOR)
    kind, pdl = launch.TRITON_TYPES[dtype], has_programmatic(device)
    chosen = not device.hopper and config in _choices(device, dtype, config.block_m, gate)
    names = _decode_linear_kernel.arg_names
    integers = tuple(n for n in names if n.islower() and n.startswith(("rows", "size", "features", "stride")))
    even = size % config.block_k == 0
    words = (
        "decode_linear", kind, "gated" if gate else f"{len(features)} of {sum(features)}",
        f"{'swapped ' if config.swap else ''}{config.block_m}x{config.block_n}x{config.block_k}",
        "bias" * bias, "residual" * residual, "pdl" * pdl, "" if even else "masked",
        "" if elements == VECTOR else f"unit{elements}",
    )  # fmt: skip
    return launch.Specialisation(
        name=" ".join(word for word in words if word),
        kernel=_decode_linear_kernel,
        signature={n: f"*{kind}" for n in names if n.islower() and n not in integers} | dict.fromkeys(integers, "i32"),
        constants={"COUNT": len(features), "GATE": gate, "HAS_BIAS": bias, "HAS_RESIDUAL": residual, "EVEN_K": even,
                   "SWAP": config.swap, "PDL": pdl, "BLOCK_M": config.block_m, "BLOCK_N": config.block_n,
                   "BLOCK_K": config.block_k},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        aligned=tuple(n for n in integers if n != "rows") if elements == VECTOR else (),
        programs=_programs(config, device, dtype, gate) if chosen else 0,
    )  # fmt: skip
