"""One whole decoding step at real models' shapes with random weights: plain, Medusa, and transformers' eager step.

    python -m benchmarks.bench_step --budget 480
    python -m benchmarks.bench_step --only "Llama-3-8B 1024" --weights "int4 g128" int8

Weights are random, so hardly any draft token is accepted: the benchmark measures the cost of a step, not its acceptance
length. A step's bytes are every weight but the embedding once, and keys and values of the prefix and the tree once;
those of a Medusa step include the heads' weights. The overhead of a Medusa step is its time over that of the plain
captured step of the same run.

`--weights`: captured steps with the layers' weights in these forms and in 16 bits, in turn. Ratios are medians over the
rounds: to the plain step with the same weights, and to the step of as many nodes in 16 bits.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import functools
import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import (
    DynamicCache,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    Olmo2Config,
    PretrainedConfig,
    Qwen3Config,
    StaticCache,
)

from benchmarks import gpu, harness
from benchmarks.stored_weights import FORMS as STORED
from benchmarks.stored_weights import quantised
from medusa_decoding.checkpoints import pretrained
from medusa_decoding.checkpoints.accuracies import default_accuracies
from medusa_decoding.decode.limits import Limits
from medusa_decoding.decode.runtime.memory import Sizes
from medusa_decoding.decode.runtime.steps import Backend
from medusa_decoding.decode.selection.greedy import Greedy
from medusa_decoding.decode.verify import TokenSelector
from medusa_decoding.heads import MedusaHeads
from medusa_decoding.linears.packed import PackedLinear
from medusa_decoding.model import MedusaModel
from medusa_decoding.trees.tree import Tree
from medusa_kernels import Projection

NUM_HEADS = 4
REPLAYS = 16
Call = Callable[[], object]
LAST_CLOCKS: dict[str, int] = {}
"""Clock and power when the last steps of the latest measurement were running."""


def shape(
    cls: type[PretrainedConfig], vocab: int, width: int, layers: int, heads: int, kv: int, hidden: int, dim: int = 128,
    **more: Any,
) -> Any:  # fmt: skip
    return cls(
        vocab_size=vocab, intermediate_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, hidden_size=hidden, head_dim=dim, max_position_embeddings=1 << 17,
        tie_word_embeddings=False, **more,
    )  # fmt: skip


MODELS: dict[str, Callable[[], Any]] = {
    "Llama-2-7B": lambda: shape(LlamaConfig, 32000, 11008, 32, 32, 32, 4096),
    "Llama-3-8B": lambda: shape(LlamaConfig, 128256, 14336, 32, 32, 8, 4096),
    "Llama-2-13B": lambda: shape(LlamaConfig, 32000, 13824, 40, 40, 40, 5120),
    "Qwen3-8B": lambda: shape(Qwen3Config, 151936, 12288, 36, 32, 8, 4096),
    "Llama-127M": lambda: shape(LlamaConfig, 32000, 2048, 12, 12, 6, 768, 64),
    "Llama-254M": lambda: shape(LlamaConfig, 32000, 2816, 16, 16, 8, 1024, 64),
    "OLMo-2-254M": lambda: shape(Olmo2Config, 32000, 2816, 16, 16, 8, 1024, 64),
    "Gemma-2-254M": lambda: shape(Gemma2Config, 32000, 2816, 16, 16, 8, 1024, 64, query_pre_attn_scalar=64),
    "Granite-254M": lambda: shape(
        GraniteConfig, 32000, 2816, 16, 16, 8, 1024, 64, residual_multiplier=0.22, logits_scaling=8.0
    ),
    "tiny": lambda: shape(LlamaConfig, 64, 48, 2, 2, 1, 64),
    "small": lambda: shape(LlamaConfig, 64, 128, 2, 2, 1, 128, 64),
}
# Name, vocabulary of the heads (None: the model's own), whether the projection is lm_head.
HEADS: dict[str, tuple[int | None, bool]] = {
    "shared": (None, True),
    "trimmed 8192": (8192, False),
    "shared, trimmed 8192": (8192, True),
    "full bf16": (None, False),
}


@dataclass(frozen=True)
class Point:
    """Where a model's steps are measured.

    Attributes:
        model: key of `MODELS`.
        prefix: cached rows.
        batch: sequences.
        heads: keys of `HEADS`.
        ways: ways of making the same plain and Medusa steps, see `WAYS`.
    """

    model: str
    prefix: int
    batch: int
    heads: tuple[str, ...]
    ways: tuple[str, ...] = ("graph",)
    nodes: tuple[int, ...] = (64,)

    @property
    def label(self) -> str:
        """Model, prefix and batch."""
        return f"{self.model} {self.prefix} b{self.batch}"


@dataclass(frozen=True)
class Way:
    """A way of making the same step.

    Attributes:
        backend: how steps run.
        fused: whether layers may run fused.
        constants: module constants that are set meanwhile, by their full names.
    """

    backend: Backend
    fused: bool = True
    constants: Mapping[str, Any] = field(default_factory=dict)

    @contextlib.contextmanager
    def settings(self) -> Iterator[None]:
        """Set the constants, and set them back afterwards."""
        with contextlib.ExitStack() as stack:
            for name, value in self.constants.items():
                stack.enter_context(mock.patch(name, value))
            yield


FORMS: dict[str, dict[str, Any]] = {
    "half-precision bytes": {"medusa_kernels._triton.heads_topk.HALF_PRECISION_BYTES": False},
    "narrow tiles": {"medusa_kernels._triton.streaming.NARROW_TILES": False},
}
"""Forms of the kernels, and the constants that turn them off."""
WAYS: dict[str, Way] = {
    "eager": Way("eager", fused=False),
    "graph": Way("graph"),
    "graph of modules": Way("graph", fused=False),
    "graph of torch.compile": Way("compiled", fused=False),
    **{f"graph without {name}": Way("graph", constants=constants) for name, constants in FORMS.items()},
}
POINTS = (
    Point("Llama-2-7B", 1024, 1, tuple(HEADS), ("graph", "graph of modules"), (64, 16)),
    Point("Llama-3-8B", 1024, 1, tuple(HEADS), ("graph", "graph of modules"), (64, 16)),
    Point("Llama-2-7B", 8192, 1, ("shared",), ("graph",), (64, 16)),
    Point("Llama-3-8B", 8192, 1, ("shared, trimmed 8192",), ("graph",), (64, 16)),
    Point("Llama-2-7B", 1024, 4, ("shared",), ("graph",), (16,)),
    Point("Qwen3-8B", 1024, 1, ("shared", "shared, trimmed 8192"), ("graph",), (64, 16)),
    Point("Llama-2-13B", 1024, 1, ("shared",)),
    # Last, because compiling all layers takes minutes.
    Point("Llama-2-7B", 1024, 1, (), ("graph", "graph of torch.compile")),
)


def build(name: str, device: torch.device, dtype: torch.dtype) -> Any:
    """Make a model with random weights on the device."""
    torch.manual_seed(0)
    return pretrained.build_model(MODELS[name](), device, dtype=dtype).eval()


@torch.no_grad()
def in_form(base: Any, form: str) -> Any:
    """Return a model with its layers' weights in one of `STORED`; all other tensors are those of `base`."""
    made = copy.deepcopy(base, {id(parameter): parameter for parameter in base.parameters()})
    for module in made.model.layers.modules():
        for name, linear in module.named_children():
            if isinstance(linear, nn.Linear):
                weight, scale, codes = quantised(linear.weight, form)
                setattr(module, name, PackedLinear(Projection(weight, linear.bias, scale.float(), None, codes)))
    return made


def random_heads(base: Any, name: str, num_heads: int = NUM_HEADS) -> MedusaHeads:
    """Make heads with random weights; a trimmed vocabulary takes every n-th token."""
    trimmed, shared = HEADS[name]
    weight = base.lm_head.weight
    vocab = weight.shape[0]
    token_map = None
    if trimmed is not None:
        size = min(trimmed, vocab // 2)
        token_map = torch.arange(size) * (vocab // size)
    heads = MedusaHeads(
        weight.shape[1], vocab, num_heads, shared_projection=shared, bias=True, token_map=token_map,
        dtype=weight.dtype, device=weight.device,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_(0, 0.02)
    return heads


def step_bytes(base: Any, heads: MedusaHeads | None, prefix: int, nodes: int, batch: int) -> int:
    """Count what a step must read: weights but the embedding once, keys and values once, the heads' weights once."""
    config = base.config
    packed = (module.buffers() for module in base.modules() if isinstance(module, PackedLinear))
    stored = itertools.chain(base.parameters(), *packed)
    weights = sum(map(stored_bytes, stored)) - base.model.embed_tokens.weight.nbytes
    row = 2 * config.num_key_value_heads * config.head_dim * base.lm_head.weight.element_size()
    total = weights + batch * config.num_hidden_layers * (prefix + nodes) * row
    if heads is not None:
        total += sum(p.nbytes for p in heads.parameters())
        if heads.shared_projection:
            total += heads.num_candidates * stored_bytes(base.lm_head.weight) // base.config.vocab_size
    return total


def stored_bytes(tensor: torch.Tensor) -> int:
    """Count the bytes of a tensor, of a quantised one those that it is stored as."""
    if hasattr(tensor, "__tensor_flatten__"):
        return sum(stored_bytes(getattr(tensor, name)) for name in tensor.__tensor_flatten__()[0])
    return tensor.nbytes


def clocks(device: torch.device) -> dict[str, int]:
    """Return the clock in MHz and the power in watts of the moment, where the driver's Python binding is there."""
    if device.type != "cuda":
        return {}
    try:
        return {"sm_mhz": torch.cuda.clock_rate(device), "watts": torch.cuda.power_draw(device) // 1000}
    except (ImportError, RuntimeError):
        return {}


def timed_steps(run: Call, reset: Call, device: torch.device, seconds: float) -> Any:
    """Return microseconds of single steps, `REPLAYS` at a time between resets."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    for _ in range(3):
        run()
    while time.perf_counter() < end or len(times) < REPLAYS:
        reset()
        if device.type == "cuda":
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
            marks[0].record()
            for mark in marks[1:]:
                run()
                mark.record()
            if not times or time.perf_counter() > end:
                LAST_CLOCKS.update(clocks(device))  # the steps just launched are still running
            torch.cuda.synchronize(device)
            times += [a.elapsed_time(b) * 1e3 for a, b in itertools.pairwise(marks)]
        else:
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e6)
    return sorted(times)


def transformers_step(base: Any, prefix: int, batch: int = 1, compiled: bool = False) -> tuple[Call, Call]:
    """Return transformers' forward of one token, the next one read as `generate` does, and what shortens its cache."""
    ids = torch.randint(0, base.config.vocab_size, (batch, prefix), generator=torch.Generator().manual_seed(0))
    cache: Any = StaticCache(base.config, max_cache_len=prefix + 64) if compiled else DynamicCache(config=base.config)
    # The cache goes by position, since transformers 5.24 has renamed the argument.
    token = base(ids.to(base.device), None, None, cache, logits_to_keep=1).logits.argmax(-1)
    forward = torch.compile(base.forward, fullgraph=True, dynamic=False) if compiled else base

    def run() -> None:
        nonlocal token
        token = forward(token, None, None, cache).logits.argmax(-1)
        token.tolist()  # generate reads what decides whether to stop

    def reset() -> None:
        if compiled:
            for layer in cache.layers:
                layer.cumulative_length.fill_(prefix)
        elif cache.get_seq_length() > prefix:
            cache.crop(prefix - cache.get_seq_length())

    return run, reset


def host_times(run: Call, seconds: float, warm_up: int) -> list[float]:
    """Return microseconds of steps that end on the host, sorted."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    for _ in range(warm_up):
        run()
    while time.perf_counter() < end or len(times) < 20:
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e6)
    return sorted(times)


class Runner:
    """Measures points and writes records."""

    def __init__(self, device: torch.device, dtype: torch.dtype, budget: float, seconds: float) -> None:
        self.device, self.dtype, self.seconds = device, dtype, seconds
        self.end = time.perf_counter() + budget
        self.copy = gpu.copy_bandwidth(device)
        self.records: list[dict[str, Any]] = []
        print(f"copy bandwidth {self.copy / 1e12:.3f} TB/s", flush=True)

    def write(
        self, point: Point, way: str, times: list[float], moved: int, *, benchmark: str = "step", **more: Any
    ) -> float:
        """Write one record and return its median."""
        median = statistics.median(times)
        record = {
            "model": point.model, "way": way, "prefix": point.prefix, "batch": point.batch,
            "dtype": str(self.dtype).removeprefix("torch."), "median_us": median,
            "p10_us": times[len(times) // 10], "p90_us": times[len(times) * 9 // 10], "bytes": moved,
            "gb_s": moved / median / 1e3, "fraction": moved / median * 1e6 / self.copy, "copy_gb_s": self.copy / 1e9,
            "ratio_to_plain": None, **(LAST_CLOCKS if "graph" in way else {}), **more,
        }  # fmt: skip
        self.records.append(record)
        harness.write_record(benchmark, record)
        ratio = "" if record["ratio_to_plain"] is None else f"  {record['ratio_to_plain']:.3f} x plain"
        if "ratio_to_16_bits" in more:
            ratio += f"  {more['ratio_to_16_bits']:.3f} x 16 bits"
        of = f"{way} {more.get('nodes', 1)} nodes {more.get('heads') or ''} {more.get('weights', '')}"
        print(
            f"{point.label} {of}: {median:.0f} us {record['fraction'] * 100:.1f} % of copy{ratio} {LAST_CLOCKS or ''}",
            flush=True,
        )
        return median

    def point(self, base: Any, point: Point) -> None:
        """Measure all ways at one point; the others are held against the plain captured step, which comes first."""
        plain_bytes = step_bytes(base, None, point.prefix, 1, point.batch)
        with torch.no_grad():
            theirs, _ = transformers_step(base, point.prefix, point.batch)
            times = host_times(theirs, self.seconds, 10 if self.device.type == "cuda" else 1)
        plain: float | None = None
        for way in point.ways:
            steps = self.steps(base, None, Tree([]), way, point)
            name = "plain graph" if way == "graph" else f"plain, {way}"
            ratio = None if plain is None else statistics.median(steps) / plain
            median = self.write(point, name, steps, plain_bytes, nodes=1, heads=None, ratio_to_plain=ratio)
            plain = median if plain is None else plain
        assert plain is not None
        eager = statistics.median(times) / plain
        self.write(point, "transformers eager", times, plain_bytes, nodes=1, heads=None, ratio_to_plain=eager)
        for nodes in point.nodes:
            for way in point.ways:
                for kind in point.heads if nodes == point.nodes[0] and way == point.ways[0] else point.heads[:1]:
                    if time.perf_counter() > self.end:
                        print("budget spent", flush=True)
                        return
                    heads = random_heads(base, kind)
                    tree = tree_of(heads, nodes)
                    steps = self.steps(base, heads, tree, way, point)
                    moved = step_bytes(base, heads, point.prefix, tree.num_nodes, point.batch)
                    name = "medusa graph" if way == "graph" else f"medusa, {way}"
                    ratio = statistics.median(steps) / plain
                    self.write(point, name, steps, moved, nodes=tree.num_nodes, heads=kind, ratio_to_plain=ratio)
                    del heads
                    _collect()

    def stored(
        self, base: Any, point: Point, forms: Sequence[str], backend: Backend = "graph", rounds: int = 8
    ) -> None:
        """Measure steps with the layers' weights in 16 bits and in each of `forms`, in turn."""
        bases = {"16 bits": base} | {form: in_form(base, form) for form in forms}
        heads = random_heads(base, point.heads[0])
        trees = [Tree([]), *(tree_of(heads, nodes) for nodes in point.nodes)]
        steps: dict[tuple[str, int], Callable[[float], list[float]]] = {}
        with contextlib.ExitStack() as stack, torch.no_grad():
            for form, own in bases.items():
                model = stack.enter_context(MedusaModel(own, heads, trees[-1], backend=backend))
                for tree in trees:
                    run, reset = prepare_step(model, tree, backend, point.prefix, point.batch)
                    steps[form, tree.num_nodes] = functools.partial(timed_steps, run, reset, self.device)
            shuffler = random.Random(0)
            found = [harness.in_turn(steps, 0.0, shuffler) for _ in range(rounds)]
        medians = [{of: statistics.median(times) for of, times in one.items()} for one in found]
        for form, nodes in steps:
            drafting = heads if nodes > 1 else None
            name = "plain graph" if nodes == 1 else "medusa graph"
            times = sorted(itertools.chain.from_iterable(one[form, nodes] for one in found))
            moved = step_bytes(bases[form], drafting, point.prefix, nodes, point.batch)
            self.write(
                point, name, times, moved, benchmark="step_weights", nodes=nodes, heads=drafting and point.heads[0],
                weights=form, ratio_to_plain=statistics.median(one[form, nodes] / one[form, 1] for one in medians),
                ratio_to_16_bits=statistics.median(one[form, nodes] / one["16 bits", nodes] for one in medians),
            )  # fmt: skip

    def steps(self, base: Any, heads: MedusaHeads | None, tree: Tree, way: str, point: Point) -> list[float]:
        """Time one way's step."""
        chosen = WAYS[way]
        with chosen.settings(), torch.no_grad(), MedusaModel(base, heads, tree, backend=chosen.backend) as model:
            run, reset = prepare_step(model, tree, chosen.backend, point.prefix, point.batch)
            if not chosen.fused:
                model.backbone.fuse = False
            return timed_steps(run, reset, self.device, self.seconds)


def prepare_step(
    model: MedusaModel, tree: Tree, backend: Backend, prefix: int, batch: int, selector: TokenSelector | None = None
) -> tuple[Call, Call]:
    """Return a call that runs one step, and one that takes it back to a cache of `prefix` random rows."""
    device, selector = model.backbone.device, selector or Greedy()
    step = model._steps.get(tree, backend)
    rows = prefix + (REPLAYS + 4) * (tree.depth + 1) + tree.num_nodes
    state = model._steps.pool.acquire(Sizes([prefix] * batch, 1000), rows)
    state.cache.kv.normal_()
    state.hidden.normal_()
    limits = Limits([1000] * batch, [0] * batch, [-1], device=device)  # the EOS token never comes

    def reset() -> None:
        state.cache.lengths.fill_(prefix)
        for tensor in (state.count, state.step, state.finished):
            tensor.zero_()

    reset()
    return lambda: step(state, selector, limits), reset


def tree_of(heads: MedusaHeads, nodes: int) -> Tree:
    """Return the first nodes of the best tree of 64 nodes for published accuracies."""
    tree = Tree.optimal(default_accuracies(heads).by_rank, 64)
    return tree if tree.num_nodes <= nodes else Tree(tree.choices[: nodes - 1])


def _collect() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def measure(
    points: tuple[Point, ...], device: torch.device, dtype: torch.dtype, budget: float, seconds: float,
    forms: Sequence[str] = (), backend: Backend = "graph",
) -> Any:  # fmt: skip
    """Measure points in order within a budget of seconds; points of one model share its weights.

    With `forms`, that of the weights is what is measured, see `Runner.stored`.
    """
    runner = Runner(device, dtype, budget, seconds)
    base, built = None, ""
    for point in points:
        if time.perf_counter() > runner.end:
            print(f"not reached: {point}", flush=True)
            continue
        if point.model != built:
            base = None
            _collect()
            base, built = build(point.model, device, dtype), point.model
        try:
            if forms:
                runner.stored(base, point, forms, backend)
            else:
                runner.point(base, point)
        except (MemoryError, torch.OutOfMemoryError) as error:
            print(f"left out: {point}: {error}", flush=True)
        _collect()
    return runner.records


def _small() -> Iterator[Point]:
    yield Point("tiny", 20, 2, ("shared", "trimmed 8192", "shared, trimmed 8192", "full bf16"), ("eager",))


def test_step_of_a_small_model(way_through: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU only the way through the benchmark is shown: its figures are of no interest and not recorded."""
    monkeypatch.setattr(harness, "write_record", lambda *_: None)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    records = way_through.pedantic(lambda: measure(tuple(_small()), device, dtype, 60, 0.01), rounds=1)
    assert [record["heads"] for record in records] == [None, None, *HEADS]


def test_stored_weights_of_a_small_model(way_through: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way through `--weights`, on a CPU in eager steps; nothing is recorded."""
    monkeypatch.setattr(harness, "write_record", lambda *_: None)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    points = (Point("small", 20, 1, ("shared",), nodes=(8, 4)),)
    records = way_through.pedantic(lambda: measure(points, device, torch.bfloat16, 60, 0.01, STORED, "auto"), rounds=1)
    assert [record["weights"] for record in records[::3]] == ["16 bits", *STORED]
    assert {record["nodes"] for record in records} == {1, 4, 8}
    moved = {record["weights"]: record["bytes"] for record in records if record["nodes"] == 1}
    assert moved["int4 g128"] < moved["nf4 g64"] < moved["int8"] == moved["fp8"] < moved["16 bits"]


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", type=float, default=480, help="seconds; no way is begun after them")
    parser.add_argument("--seconds", type=float, default=0.4, help="how long each way is measured")
    words = "points whose model, prefix and batch contain this, written as in the output: Llama-2-7B 1024 b1"
    parser.add_argument("--only", action="append", help=words)
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), help="instead of each point's own")
    parser.add_argument("--weights", nargs="+", choices=STORED, default=(), help="forms of the layers' weights")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "bench_step: needs a CUDA device, and torch sees none\n")
    points = tuple(p for p in POINTS if not args.only or any(text in p.label for text in args.only))
    if args.ways:
        ways = ("graph", *(way for way in args.ways if way != "graph"))  # what ratios are taken against comes first
        points = tuple(dataclasses.replace(p, ways=ways) for p in points if p.heads)
    measure(points, torch.device("cuda"), torch.bfloat16, args.budget, args.seconds, args.weights)


if __name__ == "__main__":
    main()
