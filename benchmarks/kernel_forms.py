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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
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


Case = functools.partial
"""A call of a function below, which calls an op with tensors on the meta device; its arguments name the form."""
ODD = (4095, 32001)
"""Sizes that align nothing."""


def forms(op: str, device: Device) -> list[Specialisation]:
    """Return the forms that an op's cases launch on a device, each once."""
    module = importlib.import_module(f"medusa_kernels._triton.{op}")
    own, configs, found = getattr(module, "configuration", None), [], {}  # type: ignore[var-annotated]
    forced = None

    def configuration(*args, **options):
        configs.append(forced or own(*args, **options))
        return configs[-1]

    with mock.patch.object(module, "configuration", configuration, create=True), recorded(device, {}) as launches:
        for case in CASES[op](device):
            launches.clear()
            configs.clear()
            given = dict(case.keywords)
            forced = given.pop("config", None)
            case.func(*case.args, **given)
            # A configuration is chosen right before each launch; of the launches the last, which merge, need none.
            for launch, config in itertools.zip_longest(launches, configs[: len(launches)]):
                spec = replace(specialisation(launch), programs=_held(launch, config, device))
                sizes = [spec.constants.get(f"BLOCK_{axis}") for axis in "MNVK"]
                name = launch.name.strip("_").removesuffix("_kernel")
                words = [op, *[name] * (name != op), *_words(case.args, given)]
                words += ["x".join(str(size) for size in sizes if size)] * bool(sizes[0])
                unit = launch.arguments.get("UNIT", 1 if set(ODD) & {*case.args, *given.values()} else 16)
                words += [f"unit{unit}"] * (unit < 16)
                found.setdefault((spec.kernel, repr(spec)), replace(spec, name=" ".join(words)))
    return list(found.values())


def _words(args: Sequence[Any], options: Mapping[str, Any]) -> Iterator[str]:
    """Yield words for a case: values of arguments, and names of what is on."""
    for value in args if any(isinstance(one, torch.dtype) for one in args) else (BF16, *args):
        values = value if isinstance(value, tuple) else (value,)
        yield "-".join(TRITON_TYPES.get(one, str(one)) for one in values)
    for name, value in options.items():
        if value is not False and value is not None:
            shown = "-".join(map(str, value)) if isinstance(value, tuple) else value
            yield name if value is True else f"{name} {shown}"


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


def _attend(dtype, dim, nodes, rows, *, window=None, softcap=None, keys=LONG, kv_heads=1, slots=False, int8=False):
    """Attend with `rows` rows per KV head."""
    stored = INT8 if int8 else dtype
    cache = _new(2, 1, kv_heads, keys, row_width(dim, stored), dtype=stored)
    given = _new(1, nodes, kv_heads * rows // nodes, dim, dtype=dtype), *cache, _int32(1), _int64(nodes, 1)
    options = {"window": window, "softcap": softcap, "slots": _int32(1) if slots else None}
    tree_attention.tree_attention(*given, **options)


def _tree_attention(device: Device) -> Iterator[Case]:
    """Yield calls with the usual head sizes."""
    case = functools.partial(Case, _attend)
    for nodes, rows in ((1, 1), (16, 16), (8, 32), (64, 64), (64, 256)):
        yield case(BF16, 128, nodes, rows)
    for rows, (window, cap) in itertools.product((64, 256), ((4096, None), (40, None), (None, 30.0))):
        yield case(BF16, 128, 64, rows, window=window, softcap=cap)
    yield from (case(BF16, 128, 1, 4, window=window) for window in (None, 4096))
    yield from (case(BF16, dim, nodes, nodes) for dim in (64, 80, 96, 256) for nodes in (64, 1))
    yield from (case(BF16, 256, 64, rows, window=4096, softcap=30.0) for rows in (128, 512))
    yield case(BF16, 128, 64, 256, keys=1024)
    yield from (case(BF16, 128, nodes, nodes, kv_heads=160) for nodes in (1, 64))
    yield case(FP16, 128, 64, 64)
    yield from (case(FP32, dim, 64, 64) for dim in (64, 128, 256))
    yield case(FP32, 128, 64, 256, window=40, softcap=30.0)
    yield from (case(BF16, 128, 64, rows, slots=True) for rows in (64, 256))
    for nodes, rows in ((1, 4), (64, 64), (64, 256)):
        yield case(BF16, 128, nodes, rows, int8=True)
    for dtype, dim, rows in ((BF16, 64, 256), (BF16, 256, 64), (FP16, 128, 64), (FP32, 128, 64)):
        yield case(dtype, dim, 64, rows, int8=True)


def _rotate(dtype, dim, *, strided=False, parts=1, norms=False, slots=False, int8=False, rotated=None, offset=None):
    """Rotate and append 64 nodes."""

    def rows(*shape, dtype=dtype):
        return _new(*shape, 1 + strided, dtype=dtype)[..., 0]

    of_parts, stored = ((), dtype) if parts == 1 else ((parts,), FP32), INT8 if int8 else dtype
    q, k, v = (rows(*of_parts[0], 1, 64, heads, dim, dtype=of_parts[1]) for heads in (32, 8, 8))
    tables = (rows(2048, rotated or dim) for _ in range(2))
    caches = (rows(1, 8, 1024, row_width(dim, stored), dtype=stored) for _ in range(2))
    given = q, k, v, *tables, *caches, _int32(1), _int32(64)
    options = dict.fromkeys(("q_norm", "k_norm"), _new(dim, dtype=dtype)) if norms else {}
    options |= {"slots": _int32(1) if slots else None, "norm_offset": offset}
    rope_append.rope_append(*given, **options)


def _rope_append(device: Device) -> Iterator[Case]:
    """Yield the usual head sizes in every dtype, and one call of each other kind."""
    case = functools.partial(Case, _rotate)
    for dtype, dim in itertools.product((BF16, FP16, FP32), (64, 80, 96, 128, 256)):
        yield case(dtype, dim)
    yield from (case(BF16, 128, parts=parts, norms=norms) for parts, norms in ((1, True), (2, False), (4, True)))
    yield case(FP32, 128, norms=True)
    yield case(BF16, 128, strided=True)
    yield case(BF16, 128, slots=True)
    yield from (case(BF16, 128, parts=parts, slots=True, int8=True) for parts in (1, 2))
    # Phi-4-mini rotates three quarters of a head; Gemma 3 has norms with an offset.
    for dtype, parts, int8 in ((BF16, 1, False), (BF16, 2, True), (FP32, 1, False)):
        yield case(dtype, 128, parts=parts, int8=int8, rotated=96)
    yield from (case(dtype, 256, norms=True, offset=1.0) for dtype in (BF16, FP32))


_PACKED = [
    # rows, 4-bit codes, group, whether there are zero points
    (1, "int4", 128, True), (1, "nf4", 64, False), (16, "fp4", 32, False), (32, "int4", 128, True),
    (64, "int4", 128, True), (64, "nf4", 64, False),
]  # fmt: skip


def _stored(shape, dtype, stored, group, zero):
    """Return a weight, its scales and its zero points."""
    if stored == UINT8:
        scale = _new(*shape[:-1], shape[-1] // group, dtype=FP16 if dtype.itemsize == 2 else FP32)
        return _new(*shape[:-1], shape[-1] // 2, dtype=UINT8), scale, scale.to(UINT8) if zero else None
    return _new(*shape, dtype=stored), _fp32(*shape[:-1]) if stored.itemsize == 1 else None, None


def _top(
    dtype=BF16, rows=1, stored=None, *, k=10, size=4096, vocabulary=32000, gather=False, noise=False, root=False,
    codes="int4", group=0, zero=False, softcap=None, half_precision=True,
):  # fmt: skip
    """Draft with four heads, `rows` rows of each."""
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

    with mock.patch.object(heads_topk, "HALF_PRECISION_BYTES", half_precision):
        heads_topk.heads_topk(*given, **options)


def _heads_topk(device: Device) -> Iterator[Case]:
    """Yield each tile of rows in bf16, and one call of each other kind."""
    case = functools.partial(Case, _top)
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


def _verify(
    dtype=BF16, rows=1, stored=None, *, scaled=False, stats=True, size=4096, vocabulary=32000, codes="int4",
    group=0, zero=False, chain=False, batch=1, divisor=1.0, softcap=None,
):  # fmt: skip
    """Verify `rows` nodes per sequence."""
    stored = stored or dtype
    weight, scale, weight_zero = _stored((vocabulary, size), dtype, stored, group, zero)
    given = _new(batch, rows, size, dtype=dtype), weight, _int64(batch, rows), None if chain else _int32(rows)
    options = {"weight_scale": scale, "weight_zero": weight_zero, "codes": codes, "want_stats": stats}
    options |= {"divisor": divisor, "softcap": softcap}
    options |= {"temperature": 0.7, "noise": _fp32(batch, rows, vocabulary)} if scaled else {}
    tree_verify.tree_verify(*given, **options)


def _tree_verify(device: Device) -> Iterator[Case]:
    """Yield each tile of nodes in bf16, and one call of each other kind."""
    case = functools.partial(Case, _verify)
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


def _project(
    dtype, rows, features, *, gate=False, bias=False, residual=False, size=4096, parts=1, stored=(), gelu=False,
    factor=1.0,
):  # fmt: skip
    """Multiply; `stored` is the form of weights in 4 or 8 bits, the columns of a group, and any zero points."""
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
    decode_linear.decode_linear(*given, **options)


def _decode_linear(device: Device) -> Iterator[Case]:
    """Yield the projections of Llama, Qwen, Gemma and Granite in bf16, and one call of each other kind."""
    case = functools.partial(Case, _project)
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


def _norm(dtype, size, *, parts=0, offset=None, normed=True, delta_normed=False):
    """Norm 64 rows."""
    delta = None if parts == 0 else _new(64, size, dtype=dtype) if parts == 1 else _fp32(parts, 64, size)
    weight, delta_norm = (_new(size, dtype=dtype) if has else None for has in (normed, delta_normed))
    given, options = (_new(64, size, dtype=dtype), delta, weight, 1e-5), {"delta_norm": delta_norm}
    add_rms_norm.add_rms_norm(*given, norm_offset=offset, **options)


def _add_rms_norm(device: Device) -> Iterator[Case]:
    """Yield the usual row lengths in bf16, with a sum and without, and one call of each other kind."""
    case = functools.partial(Case, _norm)
    yield from (case(BF16, size, parts=parts) for size in (2048, 4096, 5120, 8192) for parts in (0, 1, 2))
    yield case(BF16, 8192, parts=MOST_PARTS)
    yield case(BF16, 4095, parts=1)
    yield from (case(dtype, size, parts=1) for dtype in (FP16, FP32) for size in (4096, 8192))
    # OLMo norms delta alone, Gemma delta and the sum.
    for parts in (0, 1, 2):
        yield case(BF16, 4096, parts=parts, offset=0.0, normed=parts == 0, delta_normed=parts > 0)
        yield case(BF16, 3584, parts=parts, offset=1.0, delta_normed=parts > 0)
    yield from (case(dtype, 5376, parts=2, offset=1.0, delta_normed=True) for dtype in (BF16, FP32))


def _accept(dtype, nodes, path_len, size):
    """Accept a path in one row, with a report."""
    given = _new(1, nodes, size, dtype=dtype), _int32(nodes), _int64(nodes, path_len), _int64(1), _int32(1), _int64(1)
    state = {
        "lengths": _int32(1), "root": _int64(1), "state_hidden": _new(1, size, dtype=dtype),
        "output": _int64(1, 1024), "count": _int32(1), "finished": _new(1, dtype=torch.bool),
        "log": _int32(1, 1024), "check": _fp32(1), "report": _int32(1, path_len + 3),
    }  # fmt: skip
    tree_accept.tree_accept(_int64(1, nodes), _int64(1, nodes), *given, **state)


def _tree_accept(device: Device) -> Iterator[Case]:
    """Yield plain decoding, the usual trees, the largest, and one call of each other kind."""
    for nodes, path_len in ((1, 1), (64, 5), (128, 6), (256, 9), (256, 256)):
        yield Case(_accept, BF16, nodes, path_len, 4096)
    for dtype, size in ((BF16, 8192), (BF16, 4095), (FP32, 4096)):
        yield Case(_accept, dtype, 64, 5, size)


def _select(candidates, nodes):
    """Choose nodes of one row."""
    given = _int64(1, candidates), _fp32(1, candidates), _int32(candidates), _int64(candidates, 5)
    tree_select.tree_select(*given, nodes)


def _tree_select(device: Device) -> Iterator[Case]:
    """Yield every block of candidates, with the fewest and the most nodes that ask for it.

    The block of nodes follows from the nodes alone and changes little: sizes in between are left out.
    """
    for candidates, nodes in (
        (32, 8), (64, 64), (116, 16), (128, 128), (158, 16), (256, 256), (347, 32), (512, 256), (872, 64), (1024, 256),
        (1703, 64), (2048, 256), (3390, 256), (4096, 16), (8192, 16), (8192, 256),
    ):  # fmt: skip
        yield Case(_select, candidates, nodes)


def _noise(places, vocabulary):
    """Make the noise of five places, whose numbers have this dtype."""
    gumbel_noise.gumbel_noise(_int64(1), _new(1, dtype=places), 5, vocabulary)


def _gumbel_noise(device: Device) -> Iterator[Case]:
    """Yield both types of places, and a vocabulary that is no multiple of 16."""
    for places, vocabulary in ((torch.int32, 32000), (torch.int32, 32001), (torch.int64, 32000)):
        yield Case(_noise, places, vocabulary)


def _draw(dtype, vocabulary, **settings):
    """Draw tokens at 64 nodes."""
    draw_tokens.draw_tokens(_new(1, 64, vocabulary, dtype=dtype), _fp32(1, 5, vocabulary), _int32(64), **settings)


def _draw_tokens(device: Device) -> Iterator[Case]:
    """Yield the usual settings."""
    for dtype in (BF16, FP16, FP32):
        yield Case(_draw, dtype, 32000, top_k=50, top_p=0.9)
    for settings in ({}, {"top_k": 50}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.9, "min_p": 0.1}):
        yield Case(_draw, BF16, 32000, **settings)
    yield Case(_draw, BF16, 32001, top_p=0.9, min_p=0.1)


CASES: dict[str, Callable[[Device], Iterator[Case]]] = {op: globals()[f"_{op}"] for op in OPS if f"_{op}" in globals()}
