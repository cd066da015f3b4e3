"""The compiled forms of the Triton kernels that launches may ask for: what `benchmarks.inspection` compiles.

Each function of `CASES` yields calls of one op on the meta device, and words for what distinguishes them. The forms are
those of the launches that the calls make on a `launch.Device` (`benchmarks.launches`). A new form of a kernel needs a
call that launches it.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import functools
import importlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.launches import META, OPS, TRITON_TYPES, Launch, Specialisation, recorded, specialisation
from medusa_kernels._triton import (
    add_rms_norm,
    decode_linear,
    draw_tokens,
    gumbel_noise,
    heads_topk,
    rope_append,
    tree_accept,
    tree_attention,
    tree_select,
    tree_verify,
)
from medusa_kernels._triton.decode_linear_configs import MOST_PARTS, MOST_ROWS, best_parts, choices, programs
from medusa_kernels._triton.launch import Device
from medusa_kernels._triton.tree_attention_configs import LONG
from medusa_kernels.cache_rows import row_width

BF16, FP16, FP32, INT8, FP8, UINT8 = (
    torch.bfloat16, torch.float16, torch.float32, torch.int8, torch.float8_e4m3fn, torch.uint8,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A call of an op.

    Attributes:
        words: dtype and what else distinguishes it: "bf16 H4096 sum".
        call: what makes it.
        config: what the kernel's `configuration` returns instead of its own choice, if anything.
    """

    words: str
    call: Callable[[], object]
    config: Any = None


def forms(op: str, device: Device) -> list[Specialisation]:
    """Return the forms that an op's cases launch on a device, each once."""
    module = importlib.import_module(f"medusa_kernels._triton.{op}")
    own, configs, found = getattr(module, "configuration", None), [], {}  # type: ignore[var-annotated]
    case = Case("", lambda: None)

    def configuration(*args, **options):
        configs.append(case.config or own(*args, **options))
        return configs[-1]

    with mock.patch.object(module, "configuration", configuration, create=True), recorded(device, {}) as launches:
        for case in CASES[op](device):
            launches.clear()
            configs.clear()
            case.call()
            # A configuration is chosen right before each launch; of the launches the last, which merge, need none.
            for launch, config in itertools.zip_longest(launches, configs[: len(launches)]):
                spec = replace(specialisation(launch), programs=_held(launch, config, device))
                name = launch.name.strip("_").removesuffix("_kernel")
                unit = launch.arguments.get("UNIT", 16)
                sizes = [spec.constants.get(f"BLOCK_{axis}") for axis in "MNVK"]
                tile = "x".join(str(size) for size in sizes if size) if sizes[0] else ""
                words = [op, name if name != op else "", case.words, tile, f"unit{unit}" if unit < 16 else ""]
                key = (
                    spec.kernel,
                    repr((spec.signature, spec.constants, spec.aligned, spec.num_warps, spec.num_stages, spec.options)),
                )
                found.setdefault(key, replace(spec, name=" ".join(word for word in words if word)))
    return list(found.values())


def _held(launch: Launch, config: Any, device: Device) -> int:
    """Return the programs per multiprocessor that a launch counts on; 0 if it does not."""
    if launch.name != "_decode_linear_kernel":
        return getattr(config, "programs", 0)
    a, dtype = launch.arguments, launch.arguments["x"].dtype
    if config not in choices(device, dtype, config.block_m, a["GATE"]) and (not a["FORM"] or dtype == FP32):
        return 0
    bits = 4 if a["GROUP"] else 8 if a["FORM"] else 0
    return programs(config, device, dtype, a["GATE"], bits)


def _new(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


_int32, _int64, _fp32 = (functools.partial(_new, dtype=dtype) for dtype in (torch.int32, torch.int64, FP32))


def _words(*words: str) -> str:
    return " ".join(word for word in words if word)


def _tree_attention(device: Device) -> Iterator[Case]:
    """Yield calls with the usual head sizes."""

    def case(dtype, dim, nodes, rows, window=None, softcap=None, keys=LONG, kv_heads=1, slots=False, eight_bits=False):
        stored = INT8 if eight_bits else dtype
        cache = _new(2, 1, kv_heads, keys, row_width(dim, stored), dtype=stored)
        given = _new(1, nodes, kv_heads * rows // nodes, dim, dtype=dtype), *cache, _int32(1), _int64(nodes, 1)
        options = {"window": window, "softcap": softcap, "slots": _int32(1) if slots else None}
        words = _words(
            TRITON_TYPES[dtype], f"D{dim} N{nodes} M{rows}", "short" * (keys < LONG), "crowded" * (kv_heads > 1),
            "window" * bool(window), "softcap" * bool(softcap), "slots" * slots, "int8" * eight_bits,
        )  # fmt: skip
        return Case(words, lambda: tree_attention.tree_attention(*given, **options))

    for nodes, rows in ((1, 1), (16, 16), (8, 32), (64, 64), (64, 256)):
        yield case(BF16, 128, nodes, rows)
    for rows, (window, cap) in itertools.product((64, 256), ((4096, None), (40, None), (None, 30.0))):
        yield case(BF16, 128, 64, rows, window, cap)
    yield from (case(BF16, 128, 1, 4, window) for window in (None, 4096))
    yield from (case(BF16, dim, nodes, nodes) for dim in (64, 80, 96, 256) for nodes in (64, 1))
    yield from (case(BF16, 256, 64, rows, 4096, 30.0) for rows in (128, 512))
    yield case(BF16, 128, 64, 256, keys=1024)
    yield from (case(BF16, 128, nodes, nodes, kv_heads=160) for nodes in (1, 64))
    yield case(FP16, 128, 64, 64)
    yield from (case(FP32, dim, 64, 64) for dim in (64, 128, 256))
    yield case(FP32, 128, 64, 256, 40, 30.0)
    yield from (case(BF16, 128, 64, rows, slots=True) for rows in (64, 256))
    for nodes, rows in ((1, 4), (64, 64), (64, 256)):
        yield case(BF16, 128, nodes, rows, eight_bits=True)
    for dtype, dim, rows in ((BF16, 64, 256), (BF16, 256, 64), (FP16, 128, 64), (FP32, 128, 64)):
        yield case(dtype, dim, 64, rows, eight_bits=True)


def _rope_append(device: Device) -> Iterator[Case]:
    """Yield the usual head sizes in every dtype, and one call of each other kind."""

    def case(dtype, dim, step=1, parts=1, norms=False, slots=False, eight_bits=False, rotated=None, offset=None):
        def rows(*shape, dtype=dtype):
            return _new(*shape[:-1], shape[-1] * step, dtype=dtype)[..., ::step]

        of_parts, stored = ((), dtype) if parts == 1 else ((parts,), FP32), INT8 if eight_bits else dtype
        q, k, v = (rows(*of_parts[0], 1, 64, heads, dim, dtype=of_parts[1]) for heads in (32, 8, 8))
        tables = (rows(2048, rotated or dim) for _ in range(2))
        caches = (rows(1, 8, 1024, row_width(dim, stored), dtype=stored) for _ in range(2))
        given = q, k, v, *tables, *caches, _int32(1), _int32(64)
        options = dict.fromkeys(("q_norm", "k_norm"), _new(dim, dtype=dtype)) if norms else {}
        options |= {"slots": _int32(1) if slots else None, "norm_offset": offset}
        words = _words(
            TRITON_TYPES[dtype], f"D{dim}", f"{parts} parts" * (parts > 1), "norms" * norms, "strided" * (step > 1),
            "slots" * slots, "int8" * eight_bits, f"R{rotated}" * bool(rotated), f"offset {offset}" * bool(offset),
        )  # fmt: skip
        return Case(words, lambda: rope_append.rope_append(*given, **options))

    for dtype, dim in itertools.product((BF16, FP16, FP32), (64, 80, 96, 128, 256)):
        yield case(dtype, dim)
    yield from (case(BF16, 128, parts=parts, norms=norms) for parts, norms in ((1, True), (2, False), (4, True)))
    yield case(FP32, 128, norms=True)
    yield case(BF16, 128, step=2)
    yield case(BF16, 128, slots=True)
    yield from (case(BF16, 128, parts=parts, slots=True, eight_bits=True) for parts in (1, 2))
    # Phi-4-mini rotates three quarters of a head; Gemma 3 has norms with an offset.
    for dtype, parts, eight_bits in ((BF16, 1, False), (BF16, 2, True), (FP32, 1, False)):
        yield case(dtype, 128, parts=parts, eight_bits=eight_bits, rotated=96)
    yield from (case(dtype, 256, norms=True, offset=1.0) for dtype in (BF16, FP32))


_PACKED = [
    # rows, 4-bit codes, group, whether there are zero points
    (1, "int4", 128, True), (1, "nf4", 64, False), (16, "fp4", 32, False), (32, "int4", 128, True),
    (64, "int4", 128, True), (64, "nf4", 64, False),
]  # fmt: skip


def _stored(shape, dtype, stored, group, zero):
    """Return a weight, its scales and its zero points, and a word for the form."""
    if stored == UINT8:
        scale = _new(*shape[:-1], shape[-1] // group, dtype=FP16 if dtype.itemsize == 2 else FP32)
        return _new(*shape[:-1], shape[-1] // 2, dtype=UINT8), scale, scale.to(UINT8) if zero else None
    return _new(*shape, dtype=stored), _fp32(*shape[:-1]) if stored.itemsize == 1 else None, None


def _weight(stored, codes, group, zero):
    """Return words for how a weight is stored."""
    return f"x {codes} g{group}{' zeros' * zero}" if group else f"x {TRITON_TYPES[stored]}"


def _heads_topk(device: Device) -> Iterator[Case]:
    """Yield each tile of rows in bf16, and one call of each other kind."""

    def case(
        dtype=BF16, rows=1, stored=None, *, k=10, size=4096, vocabulary=32000, gather=False, noise=False, root=False,
        codes="int4", group=0, zero=False, softcap=None, half_precision=True,
    ):  # fmt: skip
        stored = stored or dtype
        shared = 1 if gather else 4
        shape = (vocabulary, size) if gather else (4, vocabulary, size)
        w2, scale, w2_zero = _stored(shape, dtype, stored, group, zero)
        square = _new(4, size, size, dtype=dtype)
        batch = -(-rows * shared // 4)
        given = _new(batch, size, dtype=dtype), square, _new(4, size, dtype=dtype), w2, k
        options = {"w2_scale": scale, "w2_zero": w2_zero, "codes": codes, "softcap": softcap, "gather": gather}
        options |= {"token_map": _int64(vocabulary // 2 if gather else vocabulary)} if gather or noise else {}
        options |= {"noise": _fp32(batch, 4, 32000), "temperature": 0.8} if noise else {}
        options |= {"root": _new(batch, size, dtype=dtype), "w_root": square} if root else {}

        def call():
            with mock.patch.object(heads_topk, "HALF_PRECISION_BYTES", half_precision):
                heads_topk.heads_topk(*given, **options)

        words = _words(
            TRITON_TYPES[dtype], _weight(stored, codes, group, zero), f"k{k}",
            "gather" * gather, "noise" * noise, "capped" * bool(softcap),
        )  # fmt: skip
        return Case(words, call)

    for rows, noise in itertools.product((1, 32, 64), (False, True)):
        yield case(rows=rows, noise=noise, root=not noise)
    yield from (case(size=size, root=True) for size in (4104, 4095))
    # Small vocabularies have narrower tiles.
    for vocabulary in (1000, 4000):
        yield from (case(FP16, 1, stored, vocabulary=vocabulary) for stored in (INT8, FP8))
        yield from (case(rows=rows, vocabulary=vocabulary) for rows in (1, 32, 64))
    yield from (case(k=32, gather=gather) for gather in (False, True))
    yield case(gather=True)
    yield case(rows=32, softcap=30.0)
    for dtype, stored in itertools.product((FP16, BF16, FP32), (INT8, FP8)):
        yield case(dtype, 1, stored)
    yield from (case(BF16, 1, stored, half_precision=False) for stored in (INT8, FP8))
    yield from (case(dtype, rows, stored) for dtype in (FP16, BF16) for rows in (32, 64) for stored in (INT8, FP8))
    yield from (case(FP16, rows, INT8, gather=gather, noise=True) for rows, gather in ((1, False), (64, True)))
    yield case(FP32, noise=True)
    yield case(FP16, 32, INT8, gather=True)
    for rows, codes, group, zero in _PACKED:
        yield case(FP16, rows, UINT8, codes=codes, group=group, zero=zero)
    for rows in (1, 32, 64):
        yield case(FP16, rows, UINT8, group=128, zero=True, noise=True)
    yield case(FP16, 1, UINT8, group=128, gather=True, vocabulary=4000)
    yield from (case(dtype, root=dtype == FP32) for dtype in (FP16, FP32))


def _tree_verify(device: Device) -> Iterator[Case]:
    """Yield each tile of nodes in bf16, and one call of each other kind."""

    def case(
        dtype=BF16, rows=1, stored=None, *, scaled=False, stats=True, size=4096, vocabulary=32000, codes="int4",
        group=0, zero=False, chain=False, batch=1, divisor=1.0, softcap=None,
    ):  # fmt: skip
        stored = stored or dtype
        weight, scale, weight_zero = _stored((vocabulary, size), dtype, stored, group, zero)
        given = _new(batch, rows, size, dtype=dtype), weight, _int64(batch, rows), None if chain else _int32(rows)
        options = {"weight_scale": scale, "weight_zero": weight_zero, "codes": codes, "want_stats": stats}
        options |= {"divisor": divisor, "softcap": softcap}
        options |= {"temperature": 0.7, "noise": _fp32(batch, rows, vocabulary)} if scaled else {}
        weight_words = (
            f"x {codes} g{group}{' zeros' * zero}" if group else f"x {TRITON_TYPES[stored]}" * (stored != dtype)
        )
        words = _words(
            TRITON_TYPES[dtype], weight_words, "scaled" * scaled, "stats" * stats, "chain" * chain,
            "divided" * (divisor != 1.0), "capped" * (softcap is not None),
        )  # fmt: skip
        return Case(words, lambda: tree_verify.tree_verify(*given, **options))

    yield from (case(rows=rows) for rows in (1, 32, 64, 256))
    yield case(rows=65, stats=False)
    yield from (case(size=size) for size in (4104, 4095))
    for rows in (1, 64):
        yield case(rows=rows, stats=False)
        yield from (case(rows=rows, scaled=True, stats=stats) for stats in (True, False))
        yield case(FP16, rows)
    yield case(rows=256, scaled=True)
    yield case(rows=256, scaled=True, batch=8)
    yield case(rows=64, stats=False, softcap=30.0)
    yield case(scaled=True, divisor=16.0, softcap=30.0)
    yield case(FP32)
    yield case(FP32, chain=True)
    yield case(FP32, 64, scaled=True, size=4095, vocabulary=32001)
    for rows, codes, group, zero in _PACKED:
        yield case(BF16, rows, UINT8, codes=codes, group=group, zero=zero, stats=rows > 1)
    yield from (case(BF16, rows, UINT8, group=128, zero=True, scaled=True) for rows in (1, 64))
    yield case(BF16, 1, UINT8, group=128, zero=True)
    yield case(BF16, 256, UINT8, codes="nf4", group=64, batch=8)
    yield case(FP16, 1, UINT8, group=128, zero=True)
    yield case(FP32, 1, UINT8, codes="nf4", group=64)
    for stored, rows in itertools.product((INT8, FP8), (1, 64)):
        yield case(BF16, rows, stored, stats=rows > 1)


def _decode_linear(device: Device) -> Iterator[Case]:
    """Yield the projections of Llama, Qwen, Gemma and Granite in bf16, and one call of each other kind."""

    def case(
        dtype, rows, features, *, gate=False, bias=False, residual=False, size=4096, parts=1, stored=(), gelu=False,
        factor=1.0, config=None,
    ):  # fmt: skip
        form, group, *zeros = stored or ("", 0)
        kind = {"int8": INT8, "e4m3": FP8}.get(form, UINT8 if form else dtype)
        weights = [_new(n, size // 2 if group else size, dtype=kind) for n in features]
        scales = [_fp32(n, size // group) if group else _fp32(n) for n in features] if stored else None
        width = features[0] if gate else sum(features)
        options = {
            "gate": gate, "parts": parts, "scales": scales, "codes": form if group else "int4", "factor": factor,
            "zeros": [scale.to(UINT8) for scale in scales or ()] if zeros else None,
            "residual": _new(rows, width, dtype=dtype) if residual else None,
            "activation": "gelu_tanh" if gelu else "silu",
        }  # fmt: skip
        given = _new(rows, size, dtype=dtype), weights, [_new(n, dtype=dtype) for n in features] if bias else None
        words = _words(
            TRITON_TYPES[dtype], f"x {form}" + f" g{group}" * (group > 0) + " zeros" * bool(zeros) if stored else "",
            "gated" if gate else f"{len(features)} of {sum(features)}", f"{parts} parts" * (parts > 1), "bias" * bias,
            "residual" * residual, "gelu" * gelu, "factor" * (factor != 1.0), "unit1" * (size % 2),
        )  # fmt: skip
        return Case(words, lambda: decode_linear.decode_linear(*given, **options), config)

    for rows in (1, 32, 64):
        yield case(BF16, rows, (4096, 4096, 4096))
        yield case(BF16, rows, (4096,), residual=True)
        yield case(BF16, rows, (11008, 11008), gate=True)
    yield from (case(BF16, rows, (4096, 1024, 1024), bias=True) for rows in (64, 1))
    yield case(BF16, 64, (28672,))
    yield case(BF16, 1, (11008, 11008), gate=True, bias=True)
    yield case(FP16, 1, (4096, 4096, 4096))
    yield case(FP16, 64, (11008, 11008), gate=True)
    for size in (11024, 4095):
        yield case(BF16, 1, (4096,), size=size)
        yield case(BF16, 64, (11008, 11008), gate=True, size=size)
    for rows in (1, 64):
        yield case(FP32, rows, (4096,), residual=True)
        yield case(FP32, rows, (11008, 11008), gate=True)
    for rows, features in itertools.product((1, 32, 64), ((4096,), (4096, 1024, 1024))):
        parts = max(2, best_parts(device, BF16, rows, sum(features), 4096))
        yield case(BF16, rows, features, parts=parts, bias=len(features) > 1)
    yield case(FP16, 64, (4096,), size=11024, parts=3)
    yield case(FP32, 64, (4096,), parts=2)
    # Gemma-2-9B's gate, and Granite-3-8B's products, which are multiplied.
    for rows in (1, 64):
        yield case(BF16, rows, (14336, 14336), gate=True, size=3584, gelu=True)
        yield case(BF16, rows, (4096,), residual=True, factor=0.22)
        yield case(BF16, rows, (4096,), size=12800, parts=3, factor=0.22)
    yield case(BF16, 64, (14336, 14336), gate=True, size=3584, gelu=True, stored=("int4", 128))
    yield case(FP32, 64, (14336, 14336), gate=True, size=3584, gelu=True)
    # Llama-3-8B's in 4 bits, and one call of each other kind of weight.
    for rows in (16, 32, 64):
        for features, size in (((4096, 1024, 1024), 4096), ((4096,), 4096), ((4096,), 14336)):
            parts = best_parts(device, BF16, rows, sum(features), size, 4, 128)
            yield case(BF16, rows, features, size=size, parts=parts, stored=("int4", 128))
        yield case(BF16, rows, (14336, 14336), gate=True, stored=("int4", 128))
    for gate, kind in itertools.product(
        (False, True), (("int4", 32, True), ("nf4", 64), ("int4", 4096), ("int8", 0), ("e4m3", 0))
    ):
        for dtype in (BF16, FP16) if kind[0] == "nf4" else (BF16,):
            yield case(dtype, 64, (14336, 14336) if gate else (28672,), gate=gate, stored=kind)
    yield case(BF16, 16, (4096,), stored=("int4", 16, True))
    yield case(FP32, 64, (4096,), stored=("fp4", 64))
    if not device.hopper:
        # Which tile is chosen depends on the number of multiprocessors.
        for rows, gate in itertools.product((16, 32, MOST_ROWS), (False, True)):
            for config in choices(device, BF16, rows, gate):
                yield case(BF16, rows, (256, 256) if gate else (256,), gate=gate, config=config)


def _add_rms_norm(device: Device) -> Iterator[Case]:
    """Yield the usual row lengths in bf16, with a sum and without, and one call of each other kind."""

    def case(dtype, size, parts, offset=None, normed=True, delta_normed=False):
        delta = None if parts == 0 else _new(64, size, dtype=dtype) if parts == 1 else _fp32(parts, 64, size)
        weight, delta_norm = (_new(size, dtype=dtype) if has else None for has in (normed, delta_normed))
        given, options = (_new(64, size, dtype=dtype), delta, weight, 1e-5), {"delta_norm": delta_norm}
        words = _words(
            TRITON_TYPES[dtype], f"H{size}", "sum" if parts == 1 else f"{parts} parts" * (parts > 0),
            "unit1" * (size % 2), "normed delta" * delta_normed, "" if offset is None else f"offset {offset}",
        )  # fmt: skip
        return Case(words, lambda: add_rms_norm.add_rms_norm(*given, norm_offset=offset, **options))

    yield from (case(BF16, size, parts) for size in (2048, 4096, 5120, 8192) for parts in (0, 1, 2))
    yield case(BF16, 8192, MOST_PARTS)
    yield case(BF16, 4095, 1)
    yield from (case(dtype, size, 1) for dtype in (FP16, FP32) for size in (4096, 8192))
    # OLMo norms delta alone, Gemma delta and the sum.
    for parts in (0, 1, 2):
        yield case(BF16, 4096, parts, 0.0, parts == 0, parts > 0)
        yield case(BF16, 3584, parts, 1.0, True, parts > 0)
    yield from (case(dtype, 5376, 2, 1.0, True, True) for dtype in (BF16, FP32))


def _tree_accept(device: Device) -> Iterator[Case]:
    """Yield plain decoding, the usual trees, the largest, and one call of each other kind."""
    for dtype, nodes, path_len, size in (
        (BF16, 1, 1, 4096), (BF16, 64, 5, 4096), (BF16, 128, 6, 4096), (BF16, 256, 9, 4096), (BF16, 256, 256, 4096),
        (BF16, 64, 5, 8192), (BF16, 64, 5, 4095), (FP32, 64, 5, 4096),
    ):  # fmt: skip
        given = (
            _int64(1, nodes), _int64(1, nodes), _new(1, nodes, size, dtype=dtype), _int32(nodes),
            _int64(nodes, path_len), _int64(1), _int32(1), _int64(1),
        )  # fmt: skip
        state = {
            "lengths": _int32(1), "root": _int64(1), "state_hidden": _new(1, size, dtype=dtype),
            "output": _int64(1, 1024), "count": _int32(1), "finished": _new(1, dtype=torch.bool),
            "log": _int32(1, 1024), "check": _fp32(1), "report": _int32(1, path_len + 3),
        }  # fmt: skip
        words = f"{TRITON_TYPES[dtype]} N{nodes} P{path_len} H{size}" + " unit1" * (size % 2)
        yield Case(words, functools.partial(tree_accept.tree_accept, *given, **state))


def _tree_select(device: Device) -> Iterator[Case]:
    """Yield every block of candidates, with the fewest and the most nodes that ask for it.

    The block of nodes follows from the nodes alone and changes little: sizes in between are left out.
    """
    for candidates, nodes in (
        (32, 8), (64, 64), (116, 16), (128, 128), (158, 16), (256, 256), (347, 32), (512, 256), (872, 64), (1024, 256),
        (1703, 64), (2048, 256), (3390, 256), (4096, 16), (8192, 16), (8192, 256),
    ):  # fmt: skip
        given = _int64(1, candidates), _fp32(1, candidates), _int32(candidates), _int64(candidates, 5), nodes
        yield Case("", functools.partial(tree_select.tree_select, *given))


def _gumbel_noise(device: Device) -> Iterator[Case]:
    """Yield both types of places, and a vocabulary that is no multiple of 16."""
    for first, vocabulary in ((torch.int32, 32000), (torch.int32, 32001), (torch.int64, 32000)):
        given = _int64(1), _new(1, dtype=first), 5, vocabulary
        words = TRITON_TYPES[first] + " unit1" * (vocabulary % 2)
        yield Case(words, functools.partial(gumbel_noise.gumbel_noise, *given))


def _draw_tokens(device: Device) -> Iterator[Case]:
    """Yield the usual settings: dtype, vocabulary, and which of top-k, top-p and min-p are on."""
    for dtype, vocabulary, on in (
        *((dtype, 32000, (True, True, False)) for dtype in (BF16, FP16, FP32)),
        *((BF16, 32000, on) for on in ((False,) * 3, (True, False, False), (False, True, False), (True,) * 3)),
        (BF16, 32001, (False, True, True)),
    ):
        options = dict(itertools.compress((("top_k", 50), ("top_p", 0.9), ("min_p", 0.1)), on))
        given = _new(1, 64, vocabulary, dtype=dtype), _fp32(1, 5, vocabulary), _int32(64)
        words = _words(TRITON_TYPES[dtype], *(name.replace("_", "-") for name in options), "unit1" * (vocabulary % 2))
        yield Case(words, functools.partial(draw_tokens.draw_tokens, *given, **options))


CASES: dict[str, Callable[[Device], Iterator[Case]]] = {op: globals()[f"_{op}"] for op in OPS if f"_{op}" in globals()}
