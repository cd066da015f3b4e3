"""Explain a captured step by stage: microseconds predicted from its launches, and measured ones if there is a GPU.

    python -m benchmarks.explain --model Llama-2-7B --nodes 64 --device h200

Predicted is, for each stage, the longest of three times plus a fixed time per launch: its bytes from memory, its bytes
through the L2, its arithmetic. Bytes from memory and operations are the roofline's, the rest follows from the recorded
launches. Each multiprocessor has an equal share of the L2's bandwidth, so a launch takes through the L2 what the one
with the most programs takes. Measured is every kernel of some replays of the step under torch's profiler.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks import bench_step, harness
from benchmarks.grids import step_launches
from benchmarks.inspection import GPUS, aligned
from benchmarks.launches import NORMS, Launch, l2_bytes
from benchmarks.roofline import HEADS as HEAD_SHAPES
from benchmarks.simulator.__main__ import find_device
from benchmarks.simulator.devices import Device
from benchmarks.simulator.operators import Operator, step_operators
from benchmarks.simulator.shapes import shape_of
from medusa_decoding.model import MedusaModel
from medusa_decoding.trees.tree import Tree
from medusa_kernels._triton import launch

PROFILED = 8
"""Steps under the profiler."""
OPERATORS = {
    "qkv": "qkv",
    "attention": "attention",
    "output": "output",
    "up/gate": "gate, up",
    "down": "down",
    "lm_head": "verify",
    "head blocks": "heads",
    "head projections": "heads",
}
"""Stage of each of the roofline's operators."""
ARRANGE = "arrange"


@dataclass(frozen=True)
class Stage:
    """What one stage of a step does, and the least times of it in microseconds.

    Attributes:
        name: of the stage.
        launches: recorded ones.
        bytes: from memory.
        l2_bytes: between L2 and multiprocessors.
        flops: operations.
        times: by limit: memory, L2 and arithmetic.
        launch_us: fixed times of the launches together.
    """

    name: str
    launches: int
    bytes: float
    l2_bytes: int
    flops: int
    times: dict[str, float]
    launch_us: float

    @property
    def limit(self) -> str:
        """What takes longest."""
        times = {"launches": self.launch_us} | self.times
        return max(times, key=lambda name: times[name])

    @property
    def predicted_us(self) -> float:
        """The longest time, and those of the launches."""
        return max(self.times.values()) + self.launch_us


def predict(
    launches: Sequence[Launch], operators: Iterable[Operator], device: Device, multiprocessors: int, keys: int
) -> list[Stage]:
    """Predict the stages of a step in the order of their first launches.

    Args:
        launches: of the step.
        operators: the same step's, of the roofline.
        device: peaks and what is attained of them.
        multiprocessors: of the device.
        keys: rows of the cache that hold something.
    """
    counts = Counter(one.stage for one in launches)
    through: Counter[str] = Counter()
    slowest: dict[str, float] = defaultdict(float)
    for one in launches:
        size = l2_bytes(one, keys)
        through[one.stage] += size
        slowest[one.stage] += size / one.programs * -(-one.programs // multiprocessors) * multiprocessors
    of_stage: dict[str, list[Operator]] = {name: [] for name in counts}
    for operator in operators:
        of_stage[OPERATORS[operator.name]].append(operator)
    stages = []
    for name, count in counts.items():
        attained = device.attention if name == "attention" else device.linear
        moved = sum(one.times * one.bytes(device.element_bytes) for one in of_stage[name])
        flops = sum(one.times * one.flops for one in of_stage[name])
        padded = sum(
            one.times * one.flops / one.rows * math.ceil(one.rows / attained.tile) * attained.tile
            for one in of_stage[name]
        )
        times = {
            "memory": 1e6 * moved / (device.bandwidth * attained.bandwidth),
            "L2": 0.0 if device.l2_bandwidth is None else 1e6 * slowest[name] / device.l2_bandwidth,
            "arithmetic": 1e6 * padded / (device.flops * attained.compute),
        }
        stages.append(Stage(name, count, moved, through[name], flops, times, count * device.launch_us))
    return stages


@dataclass(frozen=True)
class Kernel:
    """A kernel that ran: its name, and its start and end in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Measured:
    """Microseconds of one step under the profiler, as medians of several.

    Kernels that overlap share no time: each has what it takes after the end of all before it.

    Attributes:
        stages: by stage.
        others: of kernels that no stage claims, by name.
        gaps: in which nothing runs between the first kernel's start and the last one's end.
        span: from that start to that end.
    """

    stages: dict[str, float]
    others: dict[str, float]
    gaps: float
    span: float


def stages_of(names: Sequence[str], launches: Sequence[Launch]) -> list[str | None]:
    """Return the stage of each kernel that ran in a step, None for one that no stage claims.

    Triton's kernels must be the recorded launches, in order. torch's kernels before the layers arrange and embed the
    tokens; those before the verification and after the acceptance belong to these.

    Raises:
        ValueError: other kernels than the recorded ones.
    """
    expected = [one for one in launches if one.kernel is not None]
    known, found, met = {one.name for one in expected}, [], 0
    for name in names:
        stage = None
        if name in known:
            wanted = expected[met].name if met < len(expected) else "the end"
            if name != wanted:
                raise ValueError(f"profile: expected {wanted} as launch {met} of the step, got {name}")
            stage = expected[met].stage
            met += 1
        elif "compact_kernel" in name:
            stage = "compact"
        found.append(stage)
    if met < len(expected):
        raise ValueError(f"profile: expected {len(expected)} launches of recorded kernels in a step, got {met}")
    claimed: list[str | None] = []
    for place, stage in enumerate(found):
        before = next((one for one in reversed(found[:place]) if one is not None), None)
        after = next((one for one in found[place:] if one is not None), None)
        claimed.append(stage if stage is not None else _neighbour(before, after))
    return claimed


def _neighbour(before: str | None, after: str | None) -> str | None:
    """Return the stage of a kernel of torch's between kernels of two stages."""
    if before in (None, "heads", ARRANGE) and after in ("heads", ARRANGE, NORMS):
        return ARRANGE
    if after == "verify" and before != after:
        return after
    return before if before in ("accept", "compact") else None


def measured(kernels: Iterable[Kernel], steps: int, launches: Sequence[Launch]) -> Measured:
    """Group the kernels of several equal steps by stage.

    Raises:
        ValueError: steps that differ, or that have other kernels than the recorded ones.
    """
    ordered = sorted(kernels, key=lambda kernel: kernel.start)
    size = len(ordered) // steps
    pieces = [ordered[first : first + size] for first in range(0, size * steps, max(size, 1))]
    names = [[kernel.name for kernel in piece] for piece in pieces]
    if size * steps != len(ordered) or any(one != names[0] for one in names) or not size:
        raise ValueError(f"profile: expected {steps} equal steps, got {len(ordered)} kernels that do not repeat")
    stages = stages_of(names[0], launches)
    found = [_timed(piece, stages) for piece in pieces]

    def median(which: str) -> dict[str, float]:
        keys = dict.fromkeys(itertools.chain.from_iterable(getattr(one, which) for one in found))
        return {key: statistics.median(getattr(one, which).get(key, 0.0) for one in found) for key in keys}

    return Measured(
        median("stages"),
        median("others"),
        statistics.median(one.gaps for one in found),
        statistics.median(one.span for one in found),
    )


def _timed(step: Sequence[Kernel], stages: Sequence[str | None]) -> Measured:
    claimed: dict[str, float] = defaultdict(float)
    others: dict[str, float] = defaultdict(float)
    gaps, busy_until = 0.0, step[0].start
    for kernel, stage in zip(step, stages, strict=True):
        gaps += max(0.0, kernel.start - busy_until)
        own = max(0.0, kernel.end - max(kernel.start, busy_until))
        if stage is None:
            others[kernel.name] += own
        else:
            claimed[stage] += own
        busy_until = max(busy_until, kernel.end)
    return Measured(dict(claimed), dict(others), gaps, busy_until - step[0].start)


def _start_profiler(device: torch.device) -> None:
    """Load CUPTI, for good: it may not see the kernels of graphs that were captured before it."""
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]):
        torch.zeros(1, device=device)


def profiled(run: bench_step.Call, reset: bench_step.Call, device: torch.device) -> list[Kernel]:
    """Return all kernels of `PROFILED` steps of a captured step that has run before."""
    reset()
    torch.cuda.synchronize(device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(PROFILED):
            run()
        torch.cuda.synchronize(device)
    return [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def launch_device(device: Device) -> launch.Device:
    """Return the properties of the GPU whose peaks these are: its name begins with the GPU's.

    Raises:
        ValueError: no GPU has this name.
    """
    names = [gpu for gpu in GPUS if device.name == gpu or device.name.startswith(f"{gpu}-")]
    if not names:
        raise ValueError(f"--device: expected a name that begins with one of {', '.join(GPUS)}, got {device.name}")
    return GPUS[max(names, key=len)][1]


def chosen_device(name: str | None) -> Device:
    """Return the device of this name or file, by default this machine's.

    Raises:
        ValueError: no name where there is no GPU, or one that is not known by name.
    """
    if name is None:
        name = harness.machine_slug().removeprefix("nvidia-") if torch.cuda.is_available() else "none, without a GPU"
        if name not in GPUS:
            raise ValueError(f"--device: expected the name of a GPU or a file with its peaks, got {name}")
    return find_device(name)


def explain(
    model: str, nodes: int, prefix: int, heads: str, device: str | None, ways: Sequence[str], seconds: float
) -> list[dict[str, Any]]:
    """Print one step by stage for each way, write a record of each that was measured, and return all.

    Args:
        model: key of `bench_step.MODELS`.
        nodes: of the tree; 1 for a plain step.
        prefix: cached rows.
        heads: key of `bench_step.HEADS`.
        device: name or file of the peaks to predict by; None for this machine's.
        ways: keys of `bench_step.WAYS`, of fused captured steps.
        seconds: how long a step is timed without the profiler.

    Raises:
        ValueError: an unknown device, a way that launches other kernels, or nodes outside of 1 to 64.
    """
    for way in ways:
        if bench_step.WAYS[way].backend != "graph" or not bench_step.WAYS[way].fused:
            raise ValueError(f"--ways: expected captured steps of fused layers, got {way}")
    peaks, on_gpu = chosen_device(device), torch.cuda.is_available()
    place = torch.device("cuda")
    properties = launch.describe(place) if on_gpu else launch_device(peaks)
    shape = shape_of(bench_step.MODELS[model](), model)
    operators = step_operators(shape, HEAD_SHAPES[heads] if nodes > 1 else None, 1, nodes, prefix)
    base = drafting = None
    if on_gpu:
        _start_profiler(place)
        base = bench_step.build(model, place, torch.bfloat16)
        drafting = bench_step.random_heads(base, heads) if nodes > 1 else None
    records = []
    for way in ways:
        with bench_step.WAYS[way].settings():
            launches = step_launches(model, nodes, prefix, heads, properties)
            stages = predict(launches, operators, peaks, properties.multiprocessors, prefix + nodes)
            found, step_us = _measure(base, drafting, nodes, prefix, launches, seconds) if on_gpu else (None, None)
        record = {
            "model": model, "way": way, "prefix": prefix, "batch": 1, "nodes": nodes,
            "heads": heads if nodes > 1 else None, "device": asdict(peaks),
            "stages": [asdict(one) | {"limit": one.limit, "predicted_us": one.predicted_us} for one in stages],
            "predicted_us": sum(one.predicted_us for one in stages), "step_us": step_us,
            "measured": None if found is None else asdict(found),
        }  # fmt: skip
        if on_gpu:
            harness.write_record("explain", record)
        print(text(record, stages, found))
        records.append(record)
    return records


def _measure(
    base: Any, heads: Any, nodes: int, prefix: int, launches: Sequence[Launch], seconds: float
) -> tuple[Measured, float]:
    tree, device = Tree([]) if heads is None else bench_step.tree_of(heads, nodes), torch.device("cuda")
    with torch.no_grad(), MedusaModel(base, heads, tree, backend="graph") as medusa:
        run, reset = bench_step.prepare_step(medusa, tree, "graph", prefix, 1)
        step_us = statistics.median(bench_step.timed_steps(run, reset, device, seconds))
        return measured(profiled(run, reset, device), PROFILED, launches), step_us


def text(record: dict[str, Any], stages: Sequence[Stage], found: Measured | None) -> str:
    """Format one step for a person."""
    head = ("stage", "limit", "launches", "MB", "L2 MB", "GFLOP", "predicted us", "measured us", "rest us")
    by_stage = {} if found is None else found.stages
    names = dict.fromkeys([*(one.name for one in stages), *by_stage])
    of = {one.name: one for one in stages}
    body = []
    for name in names:
        stage, took = of.get(name), by_stage.get(name)
        predicted = 0.0 if stage is None else stage.predicted_us
        counted = ("", 0, "", "", "", "") if stage is None else (
            stage.limit, stage.launches, f"{stage.bytes / 1e6:.1f}", f"{stage.l2_bytes / 1e6:.1f}",
            f"{stage.flops / 1e9:.1f}", f"{predicted:.1f}",
        )  # fmt: skip
        body.append((name, *counted, *(("-", "-") if took is None else (f"{took:.1f}", f"{took - predicted:.1f}"))))
    heads = f", heads {record['heads']}" if record["heads"] else ""
    lines = [
        f"{record['model']}, {record['nodes']} nodes, prefix {record['prefix']}{heads}, {record['device']['name']}: "
        f"{record['way']}",
        aligned(head, body, 2),
    ]
    if found is None:
        return "\n".join([*lines, f"step: {record['predicted_us']:.0f} us predicted; nothing was measured", ""])
    others = sum(found.others.values())
    lines += [
        f"step: {record['step_us']:.0f} us without the profiler, {record['predicted_us']:.0f} us predicted, "
        f"{record['step_us'] - record['predicted_us']:.0f} us not explained",
        f"under the profiler: {found.span:.0f} us, of which {found.gaps:.0f} us between kernels and {others:.0f} us in "
        "kernels of no stage",
        *(f"  {time:.1f} us {name}" for name, time in found.others.items()),
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known, ways = bench_step.MODELS, bench_step.WAYS
    parser.add_argument("--model", default="Llama-2-7B", choices=tuple(known), help="default: Llama-2-7B")
    parser.add_argument("--nodes", type=int, default=64, help="1 for a plain step, without heads (default: 64)")
    parser.add_argument("--prefix", type=int, default=1024, help="cached rows (default: 1024)")
    parser.add_argument("--heads", default="shared", choices=tuple(bench_step.HEADS), help="default: shared")
    parser.add_argument("--ways", nargs="+", choices=tuple(ways), default=("graph",))
    parser.add_argument("--seconds", type=float, default=0.4, help="how long each way is timed")
    words = "peaks to predict by, as in the simulator; needed without a GPU, or with one that is not known by name"
    parser.add_argument("--device", metavar="NAME or FILE", help=words)
    args = parser.parse_args()
    try:
        explain(args.model, args.nodes, args.prefix, args.heads, args.device, args.ways, args.seconds)
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
