"""One decoding step on a CPU with random weights: ours with 1 to 32 nodes, and transformers'.

    python -m benchmarks.bench_cpu_step --models Llama-127M --dtypes bf16 --ways eager transformers-eager

All ways of one model and dtype run in turn within this process, some steps at a time in a random order. Weights are
random, so hardly any draft token is accepted: this is the cost of a step, not its acceptance length. A ratio is the
median over the rounds of a way's time over that of the same way's plain step in the same round. Bytes are counted as in
bench_step. "int8" has torchao's int8 weights in the layers and lm_head in bf16, as transformers quantises by default;
"int8-all" has an int8 lm_head as well; "int4" has both in torchao's int4 of groups of 32. Activations are in bf16; in
"int8-dynamic" the layers round theirs to int8, and lm_head is that of "int8-all"; in "int4-dynamic" all projections do.

"modules" runs our step with the model's own norms, projections and MLPs, called one by one, as for layers that the ops
cannot run (`--models OLMo-2-254M Gemma-2-254M Granite-254M --ways eager modules transformers-eager`).
"""

from __future__ import annotations

import argparse
import functools
import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import harness
from benchmarks.bench_step import Call, build, prepare_step, random_heads, step_bytes, transformers_step, tree_of
from benchmarks.gpu import first_line
from medusa_decoding.model import MedusaModel
from medusa_decoding.trees.tree import Tree

CPU = torch.device("cpu")
MODELS = ("Llama-127M", "Llama-254M")
FAMILIES = ("OLMo-2-254M", "Gemma-2-254M", "Granite-254M")
# Dtype of the activations, and what is quantised: nothing, the layers, all projections, or all of them in int4.
DTYPES = {
    "bf16": (torch.bfloat16, ""),
    "fp32": (torch.float32, ""),
    "int8": (torch.bfloat16, "layers"),
    "int8-all": (torch.bfloat16, "all"),
    "int8-dynamic": (torch.bfloat16, "dynamic"),
    "int4": (torch.bfloat16, "int4"),
    "int4-dynamic": (torch.bfloat16, "int4-dynamic"),
}
WAYS = ("eager", "compiled", "transformers-eager", "transformers-compiled")
MODULES = "modules"
STEPS = 3
"""Timed steps of a way in each round, after one that is not timed: it finds another way's weights in the cache."""
Turn = Callable[[int], list[float]]


def build_base(model: str, dtype: str) -> Any:
    """Make a model with random weights, the same in every call."""
    activations, quantised = DTYPES[dtype]
    base = build(model, CPU, activations)
    quantise(base, quantised)
    return base


def quantise(base: Any, quantised: str) -> None:
    """Quantise a model in place, as an entry of `DTYPES` says; in int4 with the group size of Q4_0."""
    if not quantised:
        return
    from torchao.quantization import (
        Int8DynamicActivationInt8WeightConfig,
        Int8DynamicActivationIntxWeightConfig,
        Int8WeightOnlyConfig,
        IntxWeightOnlyConfig,
        PerGroup,
        quantize_,
    )

    if quantised.startswith("int4"):
        rounds = quantised == "int4-dynamic"
        config = Int8DynamicActivationIntxWeightConfig if rounds else IntxWeightOnlyConfig
        quantize_(base, config(torch.int4, PerGroup(32)))
        return
    rounding = Int8DynamicActivationInt8WeightConfig() if quantised == "dynamic" else Int8WeightOnlyConfig()
    quantize_(base.model, rounding)
    if quantised != "layers":
        quantize_(base, Int8WeightOnlyConfig(), lambda _, name: name == "lm_head")


def turn(run: Call, reset: Call) -> Turn:
    """Make a function that returns the milliseconds of each of some steps, after one that is not timed."""

    def timed(steps: int) -> list[float]:
        reset()
        run()
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            run()
            times.append((time.perf_counter() - start) * 1e3)
        return times

    return timed


class Steps:
    """The steps of one model in one dtype, by way and number of nodes.

    Attributes:
        turns: what times some steps of a way.
        bytes: what a step of a way reads.
        parameters: of the model.
    """

    def __init__(self, model: str, dtype: str, ways: Sequence[str], nodes: Sequence[int], prefix: int) -> None:
        self.turns: dict[tuple[str, int], Turn] = {}
        self.bytes: dict[tuple[str, int], int] = {}
        self.prefix = prefix
        base, own = build_base(model, dtype), build_base(model, dtype)
        self.parameters = sum(p.numel() for p in base.parameters())
        heads = random_heads(base, "shared")
        for way in ways:
            if way.startswith("transformers"):
                make = functools.partial(transformers_step, own, prefix, compiled=way == "transformers-compiled")
                self._add(way, 1, step_bytes(own, None, prefix, 1, 1), make)
            else:
                # Swaps the attention modules: transformers' steps have a model of their own.
                modules = way == MODULES
                own_base = build_base(model, dtype) if modules else base
                wrapped = MedusaModel(own_base, heads, Tree([]), backend="eager" if modules else way)
                if modules:
                    wrapped.backbone.choose_layers = lambda *_, **__: False  # type: ignore[method-assign]
                for count in nodes:
                    tree = tree_of(heads, count) if count > 1 else Tree([])
                    moved = step_bytes(base, heads if count > 1 else None, prefix, count, 1)
                    self._add(
                        way, count, moved, functools.partial(prepare_step, wrapped, tree, wrapped.backend, prefix, 1)
                    )

    def _add(self, way: str, nodes: int, moved: int, make: Callable[[], tuple[Call, Call]]) -> None:
        """Make a step and run it, which compiles it; one that cannot be made is left out."""
        start = time.perf_counter()
        try:
            timed = turn(*make())
            # The compiler packs the weights, as our compiled steps have it.
            with torch._inductor.config.patch(freezing=True):
                timed(1)
        except Exception as error:
            print(f"left out: {way}, {nodes} nodes: {type(error).__name__}: {first_line(error)}", flush=True)
            return
        self.turns[way, nodes], self.bytes[way, nodes] = timed, moved
        print(f"{way}, {nodes} nodes: ready after {time.perf_counter() - start:.1f} s", flush=True)


def measure(
    model: str, dtype: str, ways: Sequence[str], nodes: Sequence[int], prefix: int, rounds: int
) -> list[dict[str, Any]]:
    """Measure the steps of one model in one dtype, write the records and return them."""
    torch._dynamo.reset()
    print(f"{model}, {dtype}", flush=True)
    with torch.no_grad():
        steps = Steps(model, dtype, ways, nodes, prefix)
        shuffler, found = random.Random(0), []
        for _ in range(rounds):
            found.append(harness.in_turn(steps.turns, STEPS, shuffler))
    records = []
    for way, count in steps.turns:
        times = sorted(t for times in found for t in times[way, count])
        median, moved = statistics.median(times), steps.bytes[way, count]
        record = {
            "model": model, "parameters": steps.parameters, "dtype": dtype, "way": way, "nodes": count,
            "prefix": prefix, "batch": 1, "threads": torch.get_num_threads(), "rounds": rounds,
            "steps": len(times), "median_us": median * 1e3, "p10_us": times[len(times) // 10] * 1e3,
            "p90_us": times[len(times) * 9 // 10] * 1e3, "bytes": moved, "gb_s": moved / median / 1e6,
            "ratio_to_plain": ratio(found, (way, count), (way, 1)),
            "ratio_to_transformers": ratio(found, (way, count), ("transformers-eager", 1)),
            "ratio_to_modules": ratio(found, (way, count), (MODULES, count)),
        }  # fmt: skip
        records.append(record)
        harness.write_record("cpu-step", record)
    return records


def ratio(rounds: Sequence[dict[tuple[str, int], list[float]]], way: tuple[str, int], to: tuple[str, int]) -> Any:
    """Return the median over the rounds of one way's time over another's, None if that one was not measured."""
    if to not in rounds[0]:
        return None
    return statistics.median(statistics.median(times[way]) / statistics.median(times[to]) for times in rounds)


def table(records: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table: a row for each model, dtype and way, a column for each number of nodes."""
    counts = sorted({record["nodes"] for record in records} - {1})
    rows = [["model", "dtype", "way", "plain ms", "p10 to p90", *(f"{n} nodes" for n in counts)]]
    rows[0] += ["over transformers-eager", "MB", "GB/s"]
    cells = {(r["model"], r["dtype"], r["way"], r["nodes"]): r for r in records}
    for (model, dtype, way, nodes), plain in cells.items():
        if nodes != 1:
            continue
        others = [cells.get((model, dtype, way, n)) for n in counts]
        rows.append([
            model, dtype, way, f"{plain['median_us'] / 1e3:.1f}",
            f"{plain['p10_us'] / 1e3:.1f} to {plain['p90_us'] / 1e3:.1f}",
            *("" if other is None else f"{other['ratio_to_plain']:.2f} x" for other in others),
            "" if plain["ratio_to_transformers"] is None else f"{plain['ratio_to_transformers']:.2f} x",
            f"{plain['bytes'] / 1e6:.0f}", f"{plain['gb_s']:.1f}",
        ])  # fmt: skip
    return harness.markdown(rows)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=(*MODELS, *FAMILIES), default=MODELS)
    parser.add_argument("--dtypes", nargs="+", choices=tuple(DTYPES), default=("bf16", "fp32", "int8"))
    parser.add_argument("--ways", nargs="+", choices=(*WAYS, MODULES), default=WAYS)
    parser.add_argument("--nodes", nargs="+", type=int, default=(4, 8, 16, 32), help="besides the plain step")
    parser.add_argument("--prefix", type=int, default=256, help="cached rows")
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    nodes, records = (1, *args.nodes), []
    for model in args.models:
        for dtype in args.dtypes:
            records += measure(model, dtype, args.ways, nodes, args.prefix, args.rounds)
            gc.collect()
            print(table(records), flush=True)


if __name__ == "__main__":
    main()
