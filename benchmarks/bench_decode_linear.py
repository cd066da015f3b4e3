"""A model's projections alone: all layers with weights of their own in one graph, by rows of activations.

    python -m benchmarks.bench_decode_linear
    python -m benchmarks.bench_decode_linear --stored

What a decoding step cannot be faster than with these kernels, and what more rows (a tree's nodes) cost by themselves.
Beside `decode_linear`: PyTorch's linear for each weight, and for q, k, v and gate, up packed into one weight each.

`--stored`: single projections with weights in 4 and 8 bits, beside cuBLAS on 16 bits and, for the same weights,
bitsandbytes (nf4) and PyTorch's tinygemm (int4).

On a CPU one projection is timed, with copies of the weight that exceed the caches: `decode_linear` with every
instruction set that the processor has, and PyTorch's linear, in turn. `bench_quantised` times steps with stored weights
there.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from benchmarks import gpu, harness, suite
from benchmarks.stored_weights import quantised, restored
from medusa_kernels import (
    _native,
    add_rms_norm,
    decode_linear,
    linear_parts,
)


@dataclass(frozen=True)
class Shape:
    """A model's projections: hidden size, width of q, width of k and of v, intermediate size, layers."""

    name: str
    hidden: int
    q: int
    kv: int
    width: int
    layers: int


SHAPES = (
    Shape("Llama-2-7B", 4096, 4096, 4096, 11008, 32),
    Shape("Llama-3-8B", 4096, 4096, 1024, 14336, 32),
    Shape("Llama-2-13B", 5120, 5120, 5120, 13824, 40),
)
ROWS = (1, 16, 64)
Weights = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of one layer: q, k, v packed; o; gate, up packed; down."""


@dataclass(frozen=True)
class Case(suite.Case):
    """One projection with the norm after it, which adds up the parts into which its columns are divided.

    Attributes:
        projection: whose it is.
        features: rows of each weight.
        size: columns.
        rows: rows of activations.
        parts: into how many parts the columns are divided.
        gate: whether the first of two weights gates the other.
    """

    projection: str
    features: tuple[int, ...]
    size: int
    rows: int
    parts: int = 1
    gate: bool = False

    def bytes(self, element: int) -> int:
        """Count the bytes of the weights."""
        return sum(self.features) * self.size * element


def cases() -> list[Case]:
    """Return the projections of Llama-2-7B, Llama-3-8B and Llama-2-13B, in as many parts as may pay off."""
    wide = [
        Case(f"{shape.name} gate, up", (shape.width, shape.width), shape.hidden, rows, gate=True)
        for rows in (64, 1)
        for shape in SHAPES
    ]
    narrow = [
        (f"{shape.name} {name}", (shape.hidden,), size)
        for shape in SHAPES
        for name, size in (("output", shape.q), ("down", shape.width))
    ]
    narrow += [(f"{shape.name} q, k, v", (shape.q, shape.kv, shape.kv), shape.hidden) for shape in SHAPES]
    divided = [
        Case(name, features, size, rows, parts)
        for rows in (64, 1, 16)
        for name, features, size in narrow
        for parts in (1, 2, 3, 4)
    ]
    return divided + wide


def prepare(case: Case, run: suite.Run) -> suite.Copy:
    """Draw activations, weights, hidden states and the norm's weight; the call ends with the norm of the sum."""
    width = case.features[0] if case.gate else sum(case.features)
    shapes = (case.rows, case.size), *((n, case.size) for n in case.features), (case.rows, width), (width,)
    x, *weights, hidden, norm = (
        torch.empty(shape, device=run.device, dtype=run.dtype).normal_(0, 0.02) for shape in shapes
    )

    def with_norm() -> Tensor:
        if case.parts == 1 and len(weights) == 1:
            return add_rms_norm(decode_linear(x, weights, residual=hidden), None, norm, 1e-5)[1]
        return add_rms_norm(hidden, decode_linear(x, weights, gate=case.gate, parts=case.parts), norm, 1e-5)[1]

    return suite.Copy({suite.OURS: with_norm})


def layer_weights(shape: Shape, device: torch.device, dtype: torch.dtype) -> Weights:
    def random(rows: int, columns: int) -> Tensor:
        return torch.empty(rows, columns, device=device, dtype=dtype).normal_(0, 0.02)

    qkv, gate_up = random(shape.q + 2 * shape.kv, shape.hidden), random(2 * shape.width, shape.hidden)
    return qkv, random(shape.hidden, shape.q), gate_up, random(shape.hidden, shape.width)


def ours(shape: Shape, x: Tensor, weights: Weights) -> Tensor:
    qkv, o, gate_up, down = weights
    q = decode_linear(x, list(qkv.split([shape.q, shape.kv, shape.kv])))[:, : shape.q]
    x = decode_linear(q, [o], residual=x)
    return decode_linear(decode_linear(x, list(gate_up.chunk(2)), gate=True), [down], residual=x)


def separate(shape: Shape, x: Tensor, weights: Weights) -> Tensor:
    qkv, o, gate_up, down = weights
    q, _, _ = (linear(x, weight) for weight in qkv.split([shape.q, shape.kv, shape.kv]))
    x = x + linear(q, o)
    gate, up = (linear(x, weight) for weight in gate_up.chunk(2))
    return x + linear(silu(gate) * up, down)


def joined(shape: Shape, x: Tensor, weights: Weights) -> Tensor:
    qkv, o, gate_up, down = weights
    x = x + linear(linear(x, qkv)[:, : shape.q], o)
    gate, up = linear(x, gate_up).chunk(2, dim=-1)
    return x + linear(silu(gate) * up, down)


WAYS = {suite.OURS: ours, "torch, a linear each": separate, "torch, packed": joined}
TOLERANCE = {torch.bfloat16: 1e-2, torch.float32: 1e-5}


@dataclass(frozen=True)
class Layers(suite.Case):
    """All projections of a model, each with weights of its own, for some rows of activations."""

    shape: Shape
    rows: int

    def shapes(self) -> dict[str, Any]:
        """Return the fields."""
        return dataclasses.asdict(self.shape) | {"rows": self.rows}


def measure(case: Layers, run: suite.Run) -> None:
    """Measure our kernels, then PyTorch's."""
    shape = case.shape
    layers = [layer_weights(shape, run.device, run.dtype) for _ in range(shape.layers)]
    x = torch.randn(case.rows, shape.hidden, device=run.device, dtype=run.dtype)

    def in_all_layers(way: Callable[[Shape, Tensor, Weights], Tensor]) -> Tensor:
        first, *_ = [way(shape, x, weights) for weights in layers]
        return first

    ways = {name: functools.partial(in_all_layers, way) for name, way in WAYS.items()}
    moved = sum(weight.nbytes for weights in layers for weight in weights)
    run.compare(case, [suite.Copy(ways, suite.norm_of_difference)], TOLERANCE[run.dtype], bytes=moved)


def test_projections_of_a_small_model(way_through: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU only the way through the benchmark is shown, and that the ways agree; nothing is recorded."""
    monkeypatch.setattr(harness, "write_record", lambda *_: None)
    run = suite.Run("decode_linear", torch.device("cpu"), dtype=torch.float32, seconds=0.01)
    way_through.pedantic(measure, args=(Layers(Shape("small", 64, 64, 32, 96, 2), 3), run), rounds=1)
    assert [record["implementation"] for record in run.records if "median_us" in record] == [*WAYS]


@dataclass(frozen=True)
class Stored(suite.Case):
    """One projection with weights in 4 or 8 bits: "int4" in groups of 128, "nf4" of 64, or "int8" rows."""

    kind: str
    projection: str
    features: tuple[int, ...]
    size: int
    rows: int
    gate: bool = False


LLAMA_3_8B = (
    ("gate, up", (14336, 14336), 4096), ("down", (4096,), 14336), ("q, k, v", (4096, 1024, 1024), 4096),
    ("o", (4096,), 4096),
)  # fmt: skip


def stored_cases() -> list[Stored]:
    """Return the projections of Llama-3-8B, the most telling first."""
    return [
        Stored(kind, f"Llama-3-8B {name}", features, size, rows, name == "gate, up")
        for rows, kind in itertools.product((16, 64, 1, 8, 32), ("int4", "nf4", "int8"))
        for name, features, size in LLAMA_3_8B
    ]


def prepare_stored(case: Stored, run: suite.Run) -> tuple[int, suite.Copy]:
    """Draw activations and weights; return the bytes of the weights, and the calls."""
    form = {"int4": "int4 g128", "nf4": "nf4 g64"}.get(case.kind, case.kind)
    weights, scales, dense = [], [], []
    for n in case.features:
        drawn = torch.empty(n, case.size, device=run.device).normal_(0, 0.02)
        weight, scale, codes = quantised(drawn, form)
        scale = scale.to(run.dtype).float()  # which tinygemm's 16 bits represent
        weights.append(weight)
        scales.append(scale)
        dense.append(restored(weight, scale, codes, run.dtype))
    x, whole = torch.randn(case.rows, case.size, device=run.device, dtype=run.dtype), torch.cat(dense)

    def ours_stored() -> Tensor:
        parts = 1 if case.gate else linear_parts(x, sum(case.features), weights[0], scales[0])
        out = decode_linear(x, weights, gate=case.gate, scales=scales, codes=codes, parts=parts)
        return out if parts == 1 else out.sum(0).to(x.dtype)

    others: dict[str, suite.Way] = {"torch, 16 bits": lambda: linear(x, whole)}
    if x.is_cuda and case.kind == "int4":
        # Its first column of a byte is in the upper half.
        swapped = torch.cat(weights)
        tiles = torch.ops.aten._convert_weight_to_int4pack(swapped << 4 | swapped >> 4, 8)
        both = torch.cat(scales).T
        pairs = torch.stack((both, torch.zeros_like(both)), -1).to(run.dtype).contiguous()
        others["torch tinygemm"] = lambda: torch.ops.aten._weight_int4pack_mm(x, tiles, 128, pairs)
    if x.is_cuda and case.kind == "nf4" and importlib.util.find_spec("bitsandbytes"):
        from bitsandbytes import matmul_4bit
        from bitsandbytes.functional import QuantState, get_4bit_type

        table = get_4bit_type("nf4", device=run.device)
        states = [
            (w.view(-1, 1).T, QuantState(s.flatten(), (len(w), case.size), table, 64, "nf4", run.dtype))
            for w, s in zip(weights, scales, strict=True)
        ]
        others["bitsandbytes"] = lambda: torch.cat([matmul_4bit(x, *state) for state in states], -1)

    def gated(product: suite.Way) -> Tensor:
        out = product()
        if not case.gate:
            return out
        first, second = out.chunk(2, -1)
        return silu(first) * second

    ways = {suite.OURS: ours_stored} | {name: functools.partial(gated, way) for name, way in others.items()}
    moved = sum(tensor.nbytes for tensor in (*weights, *scales))
    return moved, suite.Copy(ways, suite.norm_of_difference)


def measure_stored(case: Stored, run: suite.Run) -> None:
    """Measure our kernel, with the sum of parts if there are any, then the others."""
    moved, first = prepare_stored(case, run)
    copies = [first, *(prepare_stored(case, run)[1] for _ in range(gpu.sets_needed(moved, run.device) - 1))]
    run.compare(case, copies, TOLERANCE[run.dtype], bytes=moved)


def test_stored_weights_on_a_cpu(way_through: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU only the way through the benchmark is shown, and that the ways agree; nothing is recorded."""
    monkeypatch.setattr(harness, "write_record", lambda *_: None)
    monkeypatch.setattr(gpu, "sets_needed", lambda *_: 1)
    run = suite.Run("decode_linear", torch.device("cpu"), dtype=torch.float32, seconds=0.01)
    case = Stored("int4", "small", (64, 64), 128, 3, True)
    way_through.pedantic(measure_stored, args=(case, run), rounds=1)
    assert [record["implementation"] for record in run.records if "median_us" in record] == [
        suite.OURS, "torch, 16 bits",
    ]  # fmt: skip


CPU_ROWS = (1, 4, 8, 16, 32)
CPU_BYTES = 2**30
"""Copies of the weight together: several times the largest cache."""


def measure_on_cpu(
    stored: torch.dtype, rows: int, features: int = 32000, size: int = 1024, total: int = CPU_BYTES, rounds: int = 7
) -> dict[str, Any]:
    """Time one projection [features, size] of float32, bfloat16 or int8 weights (with bfloat16 activations)."""
    dtype = torch.bfloat16 if stored == torch.int8 else stored
    x, scale = torch.randn(rows, size).to(dtype), torch.rand(features) / 100
    drawn = torch.randint(-127, 128, (features, size))
    weight = drawn.to(torch.int8) if stored == torch.int8 else (drawn * scale[:, None]).to(stored)
    copies = [weight.clone() for _ in range(max(1, total // weight.nbytes))]
    scales = [scale] if stored == torch.int8 else None
    library = _native.cpu_library()
    assert library is not None, _native.why_missing("cpu")
    before = _native.instruction_set()
    sets = [name for name in _native.build_info()["cpu"]["isas"] if library.medusa_cpu_use(name.encode()) == 0]
    ways: dict[str, Callable[[], list[Tensor]]] = {
        name: lambda: [decode_linear(x, [copy], scales=scales) for copy in copies] for name in sets
    }
    if stored != torch.int8:
        ways["torch"] = lambda: [linear(x, copy) for copy in copies]
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    try:
        for _ in range(rounds):
            for name, way in ways.items():
                library.medusa_cpu_use((name if name in sets else before).encode())
                start = time.perf_counter()
                way()
                seconds[name].append((time.perf_counter() - start) / len(copies))
    finally:
        library.medusa_cpu_use(before.encode())
    medians = {name: statistics.median(taken[1:]) for name, taken in seconds.items()}
    line = ", ".join(f"{name} {median * 1e3:.2f}" for name, median in medians.items())
    print(
        f"{stored}, {rows} rows, ms: {line}; {weight.nbytes / medians[before] / 1e9:.0f} GB/s with {before}", flush=True
    )
    return {
        "op": "decode_linear", "weights": str(stored).removeprefix("torch."), "shape": [features, size], "rows": rows,
        "bytes": weight.nbytes, "ms": {name: median * 1e3 for name, median in medians.items()}, "chosen": before,
    }  # fmt: skip


def test_one_projection_on_a_cpu(way_through: Any) -> None:
    """The way through the benchmark; nothing is recorded."""
    record = way_through.pedantic(lambda: measure_on_cpu(torch.bfloat16, 3, 64, 48, total=1, rounds=2), rounds=1)
    assert {"base", "torch", record["chosen"]} <= set(record["ms"])
    assert _native.instruction_set() == record["chosen"]


def main() -> None:
    """Run from the command line."""
    options = suite.parser(__doc__, 540)
    options.add_argument("--stored", action="store_true", help="only weights in 4 and 8 bits")
    args = options.parse_args()
    if args.stored and torch.cuda.is_available():
        suite.main(__doc__, "decode_linear", stored_cases(), measure_stored, options=options)
        return
    if torch.cuda.is_available():
        layers = [Layers(shape, rows) for shape in SHAPES for rows in ROWS]
        suite.main(__doc__, "decode_linear", layers, measure, options=options)
        return
    if args.stored:
        options.error(f"--stored: {suite.NO_GPU}; bench_quantised measures such weights on a CPU")
    for stored in (torch.float32, torch.bfloat16, torch.int8):
        for rows in CPU_ROWS:
            harness.write_record("decode_linear", measure_on_cpu(stored, rows))


if __name__ == "__main__":
    main()
