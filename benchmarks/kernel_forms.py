"""The compiled forms of the Triton kernels that launches may ask for: what `benchmarks.inspection` compiles.

Each function of `FORMS` yields the forms of one op on one `launch.Device`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import triton

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
from medusa_kernels._triton.decode_linear import VECTOR
from medusa_kernels._triton.decode_linear_configs import MOST_PARTS, MOST_ROWS, best_parts, choices, programs
from medusa_kernels._triton.launch import Device
from medusa_kernels._triton.streaming import Config, wide
from medusa_kernels._triton.tree_attention_configs import LONG

TRITON_TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float8_e4m3fn: "fp8e4nv",
}
"""Names of dtypes in Triton's signatures."""


@dataclass(frozen=True)
class Specialisation:
    """One compiled form of a kernel.

    Attributes:
        name: op, kernel and what distinguishes this form: "tree_attention bf16 D128 M64".
        kernel: the `triton.jit` function.
        signature: Triton type of every argument that is not a constant: "*bf16", "i32", "fp32".
        constants: value of every `tl.constexpr` argument.
        num_warps: warps per program.
        num_stages: depth of software pipelining.
        aligned: integers that a launch always passes as multiples of 16, so that the compiler may load 16 bytes at
            once. Pointers always count as aligned.
        programs: programs per multiprocessor that a launch counts on; 0 if it does not.
        options: compiler options that only this form has.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    num_warps: int
    num_stages: int
    aligned: tuple[str, ...] = field(default=())
    programs: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)


def specialise(
    name: str,
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    config: Any,
    *,
    aligned: tuple[str, ...] = (),
    programs: int = 0,
) -> Specialisation:
    """Describe a compiled form of a kernel.

    The keys of `types` are names of arguments, separated by spaces, its values their Triton type. All other arguments
    that are not constants are "i32". `config` has `num_warps` and `num_stages`.
    """
    type_of = {argument: kind for arguments, kind in types.items() for argument in arguments.split()}
    signature = {argument: type_of.get(argument, "i32") for argument in kernel.arg_names if argument not in constants}
    return Specialisation(name, kernel, signature, constants, config.num_warps, config.num_stages, aligned, programs)


_ATTENTION: list[tuple[Any, ...]] = [
    # dtype, head size, nodes, rows, window, softcap, and the rows of the cache and the KV heads if they matter
    *(
        (torch.bfloat16, 128, nodes, rows, None, False)
        for nodes, rows in ((1, 1), (16, 16), (8, 32), (64, 64), (64, 256))
    ),
    *((torch.bfloat16, 128, 64, 64, window, cap) for window, cap in ((4096, False), (40, False), (None, True))),
    *((torch.bfloat16, 128, 1, 4, window, False) for window in (None, 4096)),
    *((torch.bfloat16, dim, 64, 64, None, False) for dim in (64, 80, 96, 256)),
    *((torch.bfloat16, dim, 1, 1, None, False) for dim in (64, 80, 256)),
    *((torch.bfloat16, 256, 64, rows, 4096, True) for rows in (128, 512)),
    (torch.bfloat16, 128, 64, 256, None, False, 1024),
    *((torch.bfloat16, 128, 64, 256, window, cap) for window, cap in ((4096, False), (None, True))),
    *((torch.bfloat16, 128, nodes, nodes, None, False, LONG, 160) for nodes in (1, 64)),
    (torch.float16, 128, 64, 64, None, False),
    *((torch.float32, dim, 64, 64, None, False) for dim in (64, 128, 256)),
    (torch.float32, 128, 64, 256, 40, True),
]
_MERGES = [*((torch.bfloat16, dim) for dim in (64, 80, 128, 256)), (torch.float32, 128)]


def _tree_attention(device: Device) -> Iterator[Specialisation]:
    """Yield the forms that launches with the usual head sizes ask for."""
    pdl = device.programmatic
    for form in _ATTENTION:
        yield _attend_form(device, form)
    for rows in (64, 256):
        yield _attend_form(device, (torch.bfloat16, 128, 64, rows, None, False), slots=True)
    for dtype, dim, nodes, rows in (
        *((torch.bfloat16, 128, nodes, rows) for nodes, rows in ((1, 4), (64, 64), (64, 256))),
        (torch.bfloat16, 64, 64, 256), (torch.bfloat16, 256, 64, 64), (torch.float16, 128, 64, 64),
        (torch.float32, 128, 64, 64),
    ):  # fmt: skip
        yield _attend_form(device, (dtype, dim, nodes, rows, None, False), eight_bits=True)
    for dtype, head_dim in _MERGES:
        config, kind = tree_attention.configuration(device, dtype, head_dim, 64), TRITON_TYPES[dtype]
        found = specialise(
            f"tree_attention merge {kind} D{head_dim}",
            tree_attention.merge_kernel,
            {"parts stats": "*fp32", "out": f"*{kind}", "cache_lens": "*i32", "scale": "fp32"},
            tree_attention._constants(config, head_dim, 64, None) | {"CHUNK": tree_attention.MERGE_CHUNK, "PDL": pdl},
            tree_attention.MERGE,
        )
        yield replace(found, options=tree_attention.MERGE_OPTIONS)


def _attend_form(device, form, *, slots=False, eight_bits=False):
    """Describe one compiled form of the kernel that attends."""
    dtype, head_dim, nodes, rows, window, cap, *sizes = form
    keys, kv_heads = (*sizes, *(LONG, 1)[len(sizes) :])
    config = tree_attention.configuration(
        device, dtype, head_dim, rows, keys=keys, kv_heads=kv_heads, eight_bits=eight_bits
    )
    kind, names = TRITON_TYPES[dtype], tree_attention.attend_kernel.arg_names
    words = (
        f"tree_attention attend {kind} D{head_dim} N{nodes} M{rows}", "short" * (keys < LONG),
        "crowded" * (kv_heads > 1), "window" * bool(window), "softcap" * cap,
        "deep" * tree_attention._deep(nodes, window), "slots" * slots, "int8" * eight_bits,
    )  # fmt: skip
    types = {
        "q out": f"*{kind}",
        "k_cache v_cache": "*i8" if eight_bits else f"*{kind}",
        "parts stats": "*fp32",
        "cache_lens slots": "*i32",
        "ancestors": "*i64",
        "scale softcap": "fp32",
    }
    found = specialise(
        " ".join(word for word in words if word),
        tree_attention.attend_kernel,
        types,
        {f"stride_{tensor}_d": 1 for tensor in ("q", "k", "v")}
        | tree_attention._attend_constants(
            config, head_dim, nodes, window, capped=cap, negative=False, eight_bits=eight_bits
        )
        | {"HAS_SLOTS": slots, "PDL": device.programmatic},
        config,
        aligned=tuple(
            n
            for n in names
            if n.startswith("stride_") and n[7] in "qkv" and n[-1] != "d" and n[7:] not in ("k_s", "v_s") * eight_bits
        ),
        programs=config.programs,
    )
    return replace(found, options=tree_attention._options(config))


def _rope_append(device: Device) -> Iterator[Specialisation]:
    """Yield the usual head sizes in every dtype, and one form of each other kind."""
    dims = (64, 80, 96, 128, 256)
    cases: list[tuple[Any, ...]] = [
        (dtype, dim, 1, 1, False) for dtype in (torch.bfloat16, torch.float16, torch.float32) for dim in dims
    ]
    cases += [(torch.bfloat16, 128, 1, parts, norm) for parts, norm in ((1, True), (2, False), (4, True))]
    cases += [(torch.float32, 128, 1, 1, True), (torch.bfloat16, 128, 2, 1, False)]
    cases += [(torch.bfloat16, 128, 1, 1, False, True)]
    cases += [(torch.bfloat16, 128, 1, parts, False, True, True) for parts in (1, 2)]
    # Phi-4-mini rotates three quarters of a head; Gemma 3 has norms with an offset.
    cases += [(torch.bfloat16, 128, 1, parts, False, False, int8, 96) for parts, int8 in ((1, False), (2, True))]
    cases += [(torch.float32, 128, 1, 1, False, False, False, 96)]
    cases += [(dtype, 256, 1, 1, True, False, False, 256, 1.0) for dtype in (torch.bfloat16, torch.float32)]
    names = rope_append._rope_append_kernel.arg_names
    for dtype, dim, last, parts, norm, *more in cases:
        slots, eight_bits, rotated, offset = (*more, *(False, False, dim, None)[len(more) :])
        config, kind = rope_append.configuration(dtype, dim), TRITON_TYPES[dtype]
        yield specialise(
            f"rope_append {kind} D{dim}" + f" {parts} parts" * (parts > 1) + " norms" * norm + " strided" * (last != 1)
            + " slots" * slots + " int8" * eight_bits + f" R{rotated}" * (rotated < dim)
            + ("" if offset is None else f" offset {offset}"),
            rope_append._rope_append_kernel,
            {"q k v": f"*{kind if parts == 1 else 'fp32'}", "cos sin q_norm k_norm out": f"*{kind}",
             "k_cache v_cache": "*i8" if eight_bits else f"*{kind}",
             "cache_lens depths slots": "*i32", "eps": "fp32"},
            dict.fromkeys((name for name in names if name.startswith("STRIDE_")), last)
            | {"D": dim, "R": rotated, "OFFSET": offset, "HALF": triton.next_power_of_2(dim // 2), "ROWS": config.rows}
            | {"PARTS": parts, "HAS_NORM": norm, "HAS_SLOTS": slots, "PDL": device.programmatic}
            | {"EIGHT_BITS": eight_bits},
            config,
            aligned=tuple(
                n for n in names
                if n.startswith("stride_") and n not in rope_append._UNSPECIALISED and not (
                    eight_bits and n.endswith("cache_s")
                )
            ),
        )  # fmt: skip


def _heads_topk(device: Device) -> Iterator[Specialisation]:
    """Yield each tile of rows in bf16, and one form of each other kind."""
    fp16, bf16, fp32, int8, fp8 = torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.float8_e4m3fn
    for dtype, rows, elements, bias in (
        (bf16, 1, 16, True), (bf16, 32, 16, True), (bf16, 64, 16, True), (bf16, 1, 8, True), (bf16, 1, 1, True),
        (fp16, 1, 16, True), (fp32, 1, 16, True), (bf16, 1, 16, False), (bf16, 32, 16, False), (bf16, 64, 16, False),
    ):  # fmt: skip
        config = heads_topk.configuration(device, dtype, dtype, rows, "residual", vectors=wide(elements, dtype))
        kind = TRITON_TYPES[dtype]
        flags = {"UNIT": elements, "EVEN": elements == 16, "HAS_BIAS": bias, "ACTIVATE": bias}
        # The states for 8-bit weights are fp16.
        for out in {kind, "fp16"} if dtype == bf16 and bias and elements == 16 else {kind}:
            yield specialise(
                f"heads_topk {'residual' if bias else 'root'} {kind} {_tile(config, elements)}"
                + f" to {out}" * (out != kind),
                heads_topk.residual_kernel,
                {"x hidden w1 b1": f"*{kind}", "states": f"*{out}"},
                config.blocks() | flags | {"PDL": device.programmatic},
                config,
                programs=config.programs,
            )
    for rows, noise in itertools.product((1, 32, 64), (False, True)):
        yield _vocabulary(device, bf16, bf16, rows, noise=noise)
    for elements in (8, 1):
        yield _vocabulary(device, bf16, bf16, 1, elements=elements)
    for dtype, stored, rows, block_v in (
        (bf16, bf16, 1, 32), (bf16, bf16, 1, 64), (bf16, bf16, 32, 32), (bf16, bf16, 64, 32),
        (fp16, int8, 1, 32), (fp16, int8, 1, 64), (fp16, fp8, 1, 32), (fp16, fp8, 1, 64),
    ):  # fmt: skip
        # Of small vocabularies; devices whose tiles are as small anyway have no more forms.
        if block_v < heads_topk.configuration(device, dtype, stored, rows, "vocabulary").block_v:
            yield _vocabulary(device, dtype, stored, rows, block_v=block_v)
    yield _vocabulary(device, bf16, bf16, 1, k=32)
    yield _vocabulary(device, bf16, bf16, 1, gather=True)
    yield _vocabulary(device, bf16, bf16, 32, softcap=30.0)
    # bf16 states with 8-bit weights are fp16, unless heads_topk.HALF_PRECISION_BYTES is off.
    for dtype, stored in itertools.product((fp16, bf16, fp32), (int8, fp8)):
        yield _vocabulary(device, dtype, stored, 1)
    yield from (_vocabulary(device, fp16, stored, rows) for rows in (32, 64) for stored in (int8, fp8))
    for rows, gather in ((1, False), (64, True)):
        yield _vocabulary(device, fp16, int8, rows, gather=gather, noise=True)
    yield _vocabulary(device, fp32, fp32, 1, noise=True)
    yield _vocabulary(device, fp16, int8, 32, gather=True)
    for rows, codes, group, zero in _PACKED:
        yield _vocabulary(device, fp16, torch.uint8, rows, codes=codes, group=group, zero=zero)
    for rows in (1, 32, 64):
        yield _vocabulary(device, fp16, torch.uint8, rows, codes="int4", group=128, zero=True, noise=True)
    yield _vocabulary(device, fp16, torch.uint8, 1, codes="int4", group=128, gather=True, block_v=32)
    yield _vocabulary(device, fp16, fp16, 1)
    yield _vocabulary(device, fp32, fp32, 1)
    for count, k in ((66, 10), (264, 10), (264, 32)):
        blocks = heads_topk.merge_blocks(count, k)
        yield specialise(
            f"heads_topk merge k{k} {blocks['BLOCK_N']}",
            heads_topk.merge_kernel,
            {"keys token_map tokens": "*i64", "peaks sums logprobs": "*fp32"},
            {"HAS_MAP": True, "K": k, "PLACES": triton.next_power_of_2(k), **blocks} | {"PDL": device.programmatic},
            heads_topk.MERGE,
        )


_PACKED = [
    # rows, 4-bit codes, group, whether there are zero points
    (1, "int4", 128, True), (1, "nf4", 64, False), (16, "fp4", 32, False), (32, "int4", 128, True),
    (64, "int4", 128, True), (64, "nf4", 64, False),
]  # fmt: skip


def _quantised(decode, dtype, stored, group, zero):
    """Return the types and the constants of a kernel that say how a weight of dtype `stored` is read."""
    types = {
        "weight w2": "*u8" if decode == "e4m3" else f"*{TRITON_TYPES[stored]}",
        "scale": "*fp16" if group and dtype.itemsize == 2 else "*fp32",
        "zero": "*u8" if zero else "*fp32",
    }
    has = {"HAS_SCALE": stored.itemsize == 1, "HAS_ZERO": zero, "GROUP": group}
    return types, {"DECODE": decode} | has


def _vocabulary(
    device, dtype, stored, rows,
    *, k=10, gather=False, noise=False, elements=16, block_v=None, codes="", group=0, zero=False, softcap=None,
):  # fmt: skip
    # With noise also a token map.
    vectors = wide(elements, dtype, stored)
    config = heads_topk.configuration(
        device, dtype, stored, rows, "vocabulary", vectors=vectors, noise=noise, group=group
    )
    config = replace(config, block_v=block_v or config.block_v)
    decode, kind, weight = heads_topk.decoding(device, dtype, stored, codes), TRITON_TYPES[dtype], TRITON_TYPES[stored]
    tile = _tile(config, elements, " gather" * gather + " noise" * noise + " capped" * bool(softcap))
    of_weight, flags = _quantised(decode, dtype, stored, group, zero)
    types = {"states": f"*{kind}", "token_map keys": "*i64"} | of_weight
    flags |= {"UNIT": elements, "EVEN": elements == 16}
    weight = f"{codes} g{group}{' zeros' * zero}" if group else weight
    return specialise(
        f"heads_topk vocabulary {kind} x {weight} k{k} {tile}",
        heads_topk.vocabulary_kernel,
        types | {"noise peaks sums": "*fp32", "inverse_temperature": "fp32"},
        config.blocks()
        | flags
        | {"GATHER": gather, "HAS_MAP": gather or noise, "HAS_NOISE": noise}
        | {"K": k, "PLACES": triton.next_power_of_2(k), "SOFTCAP": softcap}
        | {"PDL": device.programmatic},
        config,
        programs=config.programs,
    )


def _tile(config: Config, elements: int, more: str = "") -> str:
    unaligned = f" unit{elements} masked" if elements < 16 else ""
    return f"{config.block_m}x{config.block_v}x{config.block_k}{more}{unaligned}"


def _tree_verify(device: Device) -> Iterator[Specialisation]:
    """Yield each tile of nodes in bf16, and one form of each other kind."""
    fp16, bf16, fp32 = torch.float16, torch.bfloat16, torch.float32
    for rows in (1, 32, 64, 256):
        yield _projection(device, bf16, rows)
    yield _projection(device, bf16, 65, stats=False)
    for elements in (8, 1):
        yield _projection(device, bf16, 1, elements=elements)
    for rows in (1, 64):
        yield _projection(device, bf16, rows, stats=False)
        yield _projection(device, bf16, rows, scaled=True)
        yield _projection(device, bf16, rows, scaled=True, stats=False)
        yield _projection(device, fp16, rows)
    yield _projection(device, bf16, 256, scaled=True)
    yield _projection(device, bf16, 64, stats=False, softcap=30.0)
    yield _projection(device, bf16, 1, scaled=True, divisor=16.0, softcap=30.0)
    yield _projection(device, fp32, 1)
    yield _projection(device, fp32, 64, scaled=True, elements=1)
    for rows, codes, group, zero in _PACKED:
        yield _projection(device, bf16, rows, stored=torch.uint8, codes=codes, group=group, zero=zero, stats=rows > 1)
    for rows in (1, 64):
        yield _projection(device, bf16, rows, stored=torch.uint8, codes="int4", group=128, zero=True, scaled=True)
    yield _projection(device, fp16, 1, stored=torch.uint8, codes="int4", group=128, zero=True)
    yield _projection(device, fp32, 1, stored=torch.uint8, codes="nf4", group=64)
    for stored in (torch.int8, torch.float8_e4m3fn):
        yield from (_projection(device, bf16, rows, stored=stored, stats=rows > 1) for rows in (1, 64))
    for dtype, rows, scaled, stats, chain, *packed in (
        (bf16, 1, False, True, False), (bf16, 1, False, False, False), (bf16, 2048, True, True, False),
        (fp32, 1, False, True, True), (bf16, 1, False, True, False, "int4", 128, True),
        (bf16, 2048, False, True, False, "nf4", 64, False), (bf16, 1, True, True, False, "", 0, False, 30.0),
    ):  # fmt: skip
        kind, blocks = TRITON_TYPES[dtype], tree_verify.merge_blocks(rows, 264)
        codes, group, zero, softcap = (*packed, *("", 0, False, None)[len(packed) :])
        types, flags = _quantised(codes, dtype, torch.uint8 if group else dtype, group, zero)
        flags |= {"DIVISOR": 1.0, "SOFTCAP": softcap}
        yield specialise(
            f"tree_verify merge {kind} {blocks['BLOCK_R']}x{blocks['BLOCK_P']}"
            + " scaled" * scaled + " stats" * stats + " chain" * chain + f" {codes}" * bool(group)
            + " capped" * (softcap is not None),
            tree_verify.merge_kernel,
            types | {
                "hidden": f"*{kind}",
                "peaks sums moments logsumexp entropy child_logprobs": "*fp32",
                "keys candidates next_tokens": "*i64",
                "parents": "*i64" if chain else "*i32",
                "temperature": "fp32",
            },
            {"UNIT": 16, "SCALED": scaled, "STATS": stats, "CHAIN": chain, **blocks, **flags}
            | {"PDL": device.programmatic},
            tree_verify.MERGE,
        )  # fmt: skip


def _projection(
    device, dtype, rows, *, scaled=False, stats=True, elements=16, stored=None, codes="", group=0, zero=False,
    divisor=1.0, softcap=None,
):  # fmt: skip
    stored = stored or dtype
    config = tree_verify.configuration(
        device, dtype, rows, scaled=scaled, vectors=wide(elements, dtype, stored), stored=stored, group=group
    )
    kind, blocks, decode = TRITON_TYPES[dtype], config.blocks(), tree_verify.decoding(device, dtype, stored, codes)
    types, flags = _quantised(decode, dtype, stored, group, zero)
    flags |= {"UNIT": elements, "EVEN": elements == 16, "SCALED": scaled, "STATS": stats}
    flags |= {"DIVISOR": divisor, "SOFTCAP": softcap}
    weight = f" x {codes} g{group}{' zeros' * zero}" if group else f" x {TRITON_TYPES[stored]}" * (stored != dtype)
    return specialise(
        f"tree_verify project {kind}{weight} {'x'.join(map(str, blocks.values()))}"
        + " scaled" * scaled + " stats" * stats + " divided" * (divisor != 1.0) + " capped" * (softcap is not None)
        + (f" unit{elements} masked" if elements < 16 else ""),
        tree_verify.project_kernel,
        types | {
            "hidden": f"*{kind}",
            "noise peaks sums moments": "*fp32",
            "noise_rows": "*i32" if scaled else "*i64",
            "keys": "*i64",
            "temperature": "fp32",
        },
        blocks | flags | {"VECTOR": 4 if scaled and elements > 1 else 1}
        | {"PDL": device.programmatic},
        config,
        programs=config.programs,
    )  # fmt: skip


def _decode_linear(device: Device) -> Iterator[Specialisation]:
    """Yield the projections of Llama, Qwen, Gemma and Granite in bf16, and one form of each other kind."""
    fp16, bf16, fp32 = torch.float16, torch.bfloat16, torch.float32
    for rows in (1, 32, 64):
        yield _linear_form(device, bf16, rows, (4096, 4096, 4096))
        yield _linear_form(device, bf16, rows, (4096,), residual=True)
        yield _linear_form(device, bf16, rows, (11008, 11008), gate=True)
    yield _linear_form(device, bf16, 64, (4096, 1024, 1024), bias=True)
    yield _linear_form(device, bf16, 64, (28672,))
    yield _linear_form(device, bf16, 1, (4096, 1024, 1024), bias=True)
    yield _linear_form(device, bf16, 1, (11008, 11008), gate=True, bias=True)
    yield _linear_form(device, fp16, 1, (4096, 4096, 4096))
    yield _linear_form(device, fp16, 64, (11008, 11008), gate=True)
    for size, elements in ((11024, 16), (4095, 1)):
        yield _linear_form(device, bf16, 1, (4096,), size=size, elements=elements)
        yield _linear_form(device, bf16, 64, (11008, 11008), gate=True, size=size, elements=elements)
    for rows in (1, 64):
        yield _linear_form(device, fp32, rows, (4096,), residual=True)
        yield _linear_form(device, fp32, rows, (11008, 11008), gate=True)
    for rows, features in itertools.product((1, 32, 64), ((4096,), (4096, 1024, 1024))):
        parts = max(2, best_parts(device, bf16, rows, sum(features), 4096))
        yield _linear_form(device, bf16, rows, features, parts=parts, bias=len(features) > 1)
    yield _linear_form(device, fp16, 64, (4096,), size=11024, parts=3)
    yield _linear_form(device, fp32, 64, (4096,), parts=2)
    # Gemma-2-9B's gate, and Granite-3-8B's products, which are multiplied.
    for rows in (1, 64):
        yield _linear_form(device, bf16, rows, (14336, 14336), gate=True, size=3584, gelu=True)
        yield _linear_form(device, bf16, rows, (4096,), residual=True, factor=True)
        yield _linear_form(device, bf16, rows, (4096,), size=12800, parts=3, factor=True)
    yield _linear_form(device, bf16, 64, (14336, 14336), gate=True, size=3584, gelu=True, stored=("int4", 128))
    yield _linear_form(device, fp32, 64, (14336, 14336), gate=True, size=3584, gelu=True)
    # Llama-3-8B's in 4 bits, and one form of each other kind of weight.
    for rows, features, size in itertools.product((16, 32, 64), ((4096, 1024, 1024), (4096,)), (4096, 14336)):
        if len(features) == 1 or size == 4096:
            parts = best_parts(device, bf16, rows, sum(features), size, 4, 128)
            yield _linear_form(device, bf16, rows, features, size=size, parts=parts, stored=("int4", 128))
    for rows in (16, 32, 64):
        yield _linear_form(device, bf16, rows, (14336, 14336), gate=True, stored=("int4", 128))
    for dtype, gate in itertools.product((bf16, fp16), (False, True)):
        for kind in (("int4", 32, True), ("nf4", 64), ("int4", 4096), ("int8", 0), ("e4m3", 0)):
            if dtype == bf16 or kind[0] == "nf4":
                features = (14336, 14336) if gate else (28672,)
                yield _linear_form(device, dtype, 64, features, gate=gate, stored=kind)
    yield _linear_form(device, bf16, 16, (4096,), stored=("int4", 16, True))
    yield _linear_form(device, fp32, 64, (4096,), stored=("fp4", 64))
    if not device.hopper:
        # Which tile is chosen depends on the number of multiprocessors.
        for rows, gate in itertools.product((16, 32, MOST_ROWS), (False, True)):
            for config in choices(device, bf16, rows, gate):
                yield _linear_form(device, bf16, rows, (256, 256) if gate else (256,), gate=gate, config=config)


def _linear_form(
    device, dtype, rows, features,
    *, gate=False, bias=False, residual=False, size=4096, elements=VECTOR, config=None, parts=1, stored=(), gelu=False,
    factor=False,
):  # fmt: skip
    """Describe one compiled form whose strides are multiples of `elements`; the configuration may be given.

    `stored`: of weights in 4 and 8 bits the form, the columns of a group, and whether there are zero points.
    """
    form, group, *zeros = stored or ("", 0)
    bits = 4 if group else 8 if stored else 0
    config = config or decode_linear.configuration(
        device, dtype, rows, sum(features), size, gate, vectors=elements == VECTOR, parts=parts, bits=bits, group=group
    )
    kind, pdl, even = TRITON_TYPES[dtype], device.programmatic, size % config.block_k == 0
    chosen = config in choices(device, dtype, config.block_m, gate) or (stored and dtype != torch.float32)
    words = (
        "decode_linear", kind, f"x {form}" + f" g{group}" * (group > 0) + " zeros" * bool(zeros) if stored else "",
        "gated" if gate else f"{len(features)} of {sum(features)}",
        f"{'swapped ' if config.swap else ''}{config.block_m}x{config.block_n}x{config.block_k}",
        f"{parts} parts" * (parts > 1), "bias" * bias, "residual" * residual, "gelu" * gelu,
        "factor" * factor, "pdl" * pdl, "" if even else "masked",
        "" if elements == VECTOR else f"unit{elements}",
    )  # fmt: skip
    kernel = decode_linear._decode_linear_kernel
    integers = [n for n in kernel.arg_names if n.startswith(("size", "features", "stride"))]
    held = programs(config, device, dtype, gate, bits)
    types = {
        "x w0 w1 w2 b0 b1 b2 residual": f"*{kind}", "out": f"*{kind if parts == 1 else 'fp32'}", "factor": "fp32"
    }  # fmt: skip
    constants = decode_linear.form_constants(form, dtype, group, bool(zeros)) | ({} if group else {"groups": 1})
    if not factor:
        constants["factor"] = None
    if stored:
        types |= {"w0 w1 w2": "*i8" if form == "int8" else "*u8", "s0 s1 s2": "*fp32"}
        types["z0 z1 z2"] = "*u8" if zeros else "*fp32"
    else:
        constants |= dict.fromkeys(("s0", "s1", "s2", "z0", "z1", "z2"))
    found = specialise(
        " ".join(word for word in words if word),
        kernel,
        types,
        {"COUNT": len(features), "PARTS": parts, "GATE": gate, "GELU": gelu, "HAS_BIAS": bias,
         "HAS_RESIDUAL": residual, "EVEN_K": even, "SWAP": config.swap, "PDL": pdl,
         "BLOCK_M": config.block_m, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k, **constants},
        config,
        aligned=tuple(integers) if elements == VECTOR else (),
        programs=held if chosen else 0,
    )  # fmt: skip
    return replace(found, options=decode_linear.options(device, config, gate))


def _add_rms_norm(device: Device) -> Iterator[Specialisation]:
    """Yield the usual row lengths in bf16, with a sum and without, and one form of each other kind."""
    bf16, llama = torch.bfloat16, (None, True, False)
    forms: list[tuple[Any, ...]] = [(bf16, size, n, *llama) for size in (2048, 4096, 5120, 8192) for n in (0, 1, 2)]
    forms += [(bf16, 8192, MOST_PARTS, *llama), (bf16, 4095, 1, *llama)]
    forms += [(dtype, size, 1, *llama) for dtype in (torch.float16, torch.float32) for size in (4096, 8192)]
    # OLMo norms delta alone, Gemma delta and the sum.
    forms += [(bf16, 4096, parts, 0.0, parts == 0, parts > 0) for parts in (0, 1, 2)]
    forms += [(bf16, 3584, parts, 1.0, True, parts > 0) for parts in (0, 1, 2)]
    forms += [(dtype, 5376, 2, 1.0, True, True) for dtype in (bf16, torch.float32)]
    for dtype, size, parts, offset, normed, delta_normed in forms:
        kind, pdl, aligned = TRITON_TYPES[dtype], device.programmatic, size % 16 == 0
        absent = [name for name, has in (("weight", normed), ("delta_norm", delta_normed)) if not has]
        found = specialise(
            f"add_rms_norm {kind} H{size}" + (" sum" if parts == 1 else f" {parts} parts" * (parts > 0)) + " pdl" * pdl
            + (" unit1" if not aligned else "") + " normed delta" * delta_normed
            + ("" if offset is None else f" offset {offset}"),
            add_rms_norm._add_rms_norm_kernel,
            {"x weight delta_norm total normed": f"*{kind}", "delta": f"*{kind if parts < 2 else 'fp32'}",
             "eps": "fp32"},
            {"PARTS": parts, "PDL": pdl, "BLOCK_H": triton.next_power_of_2(size), "OFFSET": offset}
            | dict.fromkeys(absent),
            add_rms_norm.configuration(size),
            aligned=("size", "stride_x_m", "stride_delta_m") if aligned else (),
        )  # fmt: skip
        yield replace(found, options=add_rms_norm.options(delta_normed))


def _tree_accept(device: Device) -> Iterator[Specialisation]:
    """Yield plain decoding, the usual trees, the largest, and one form of each other kind."""
    bf16, fp32 = torch.bfloat16, torch.float32
    for dtype, nodes, path_len, size in (
        (bf16, 1, 1, 4096), (bf16, 64, 5, 4096), (bf16, 128, 6, 4096), (bf16, 256, 9, 4096), (bf16, 256, 256, 4096),
        (bf16, 64, 5, 8192), (bf16, 64, 5, 4095), (fp32, 64, 5, 4096),
    ):  # fmt: skip
        constants, kind, aligned = tree_accept.blocks(nodes, path_len, size), TRITON_TYPES[dtype], size % 16 == 0
        yield specialise(
            f"tree_accept {kind} N{constants['BLOCK_N']} P{constants['BLOCK_P']} H{size}"
            + (" unit1" if not aligned else ""),
            tree_accept._tree_accept_kernel,
            {
                "hidden state_hidden": f"*{kind}",
                "tokens next_tokens paths eos step root output": "*i64",
                "depths max_new lengths count log path accept_lens old_lengths": "*i32",
                "check report": "*i32",
                "finished": "*i8",
            },
            constants | {"HAS_REPORT": True} | {"PDL": device.programmatic},
            tree_accept.WARPS,
            aligned=("size",) if aligned else (),
        )


def _tree_select(device: Device) -> Iterator[Specialisation]:
    """Yield every block of candidates, with the fewest and the most nodes that ask for it.

    The block of nodes follows from the nodes alone and changes little: sizes in between are left out.
    """
    for candidates, nodes in (
        (32, 8), (64, 64), (116, 16), (128, 128), (158, 16), (256, 256), (347, 32), (512, 256), (872, 64), (1024, 256),
        (1703, 64), (2048, 256), (3390, 256), (4096, 16), (8192, 16), (8192, 256),
    ):  # fmt: skip
        constants, warps = tree_select.configuration(candidates, nodes)
        yield specialise(
            f"tree_select M{constants['BLOCK_M']} N{constants['BLOCK_N']}",
            tree_select._tree_select_kernel,
            {
                "logprobs": "*fp32",
                "tokens paths out_tokens out_ancestors out_paths": "*i64",
                "depths numbers chosen out_parents out_depths": "*i32",
            },
            constants | {"PDL": device.programmatic},
            warps,
        )


def _gumbel_noise(device: Device) -> Iterator[Specialisation]:
    """Yield both types of places, and a vocabulary that is no multiple of 16."""
    for first, aligned in (("i32", ("vocabulary",)), ("i32", ()), ("i64", ("vocabulary",))):
        yield specialise(
            f"gumbel_noise {first}" + ("" if aligned else " unit1"),
            gumbel_noise._gumbel_noise_kernel,
            {"seeds": "*i64", "first": f"*{first}", "out": "*fp32"},
            {"COUNTERS": gumbel_noise.COUNTERS} | {"PDL": device.programmatic},
            gumbel_noise.WARPS,
            aligned=aligned,
        )


_DRAWS = [
    # dtype, whether the vocabulary is a multiple of 16, and which of top-k, top-p and min-p are on
    *((dtype, True, (True, True, False)) for dtype in (torch.bfloat16, torch.float16, torch.float32)),
    *((torch.bfloat16, True, on) for on in ((False,) * 3, (True, False, False), (False, True, False), (True,) * 3)),
    (torch.bfloat16, False, (False, True, True)),
]


def _draw_tokens(device: Device) -> Iterator[Specialisation]:
    """Yield the forms of the usual settings."""
    for dtype, aligned, (top_k, top_p, min_p) in _DRAWS:
        kind = TRITON_TYPES[dtype]
        words = ("top-k" * top_k, "top-p" * top_p, "min-p" * min_p, "" if aligned else "unit1")
        yield specialise(
            " ".join(word for word in ("draw_tokens", kind, *words) if word),
            draw_tokens._draw_tokens_kernel,
            {
                "logits": f"*{kind}",
                "noise best": "*fp32",
                "noise_rows": "*i32",
                "tokens": "*i64",
                "temperature factor tail min_p": "fp32",
            },
            {"TOP_K": top_k, "TOP_P": top_p, "MIN_P": min_p, **draw_tokens.configuration(aligned)},
            draw_tokens.WARPS,
            aligned=("vocabulary", "stride_logits_b", "stride_logits_n") if aligned else (),
        )


FORMS: dict[str, Callable[[Device], Iterator[Specialisation]]] = {
    "tree_attention": _tree_attention,
    "rope_append": _rope_append,
    "heads_topk": _heads_topk,
    "tree_verify": _tree_verify,
    "decode_linear": _decode_linear,
    "add_rms_norm": _add_rms_norm,
    "tree_accept": _tree_accept,
    "tree_select": _tree_select,
    "gumbel_noise": _gumbel_noise,
    "draw_tokens": _draw_tokens,
}
