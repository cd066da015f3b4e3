"""How the launches of a decoding step fill each GPU, compiled without one.

    python -m benchmarks.grids --device h200 a100 --model Llama-3-8B --nodes 1 64

One line per launch: its programs, how many the GPU runs at once (slots), and the bytes of weights or keys that a
multiprocessor has in flight. The rules of `benchmarks.inspection` are checked, and another one:
  idle  a launch that streams weights or keys (projections, heads, verification, attention) leaves more than a third of
        the multiprocessors idle. With P programs, S slots and C multiprocessors there are W = ceil(P / S) waves, the
        last of L = P - (W - 1) S programs; idle is max(0, C - L) / C / W.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import bench_step, inspection
from benchmarks.inspection import GPUS, Row
from benchmarks.launches import META, Launch, Specialisation, recorded, specialisation, storage
from medusa_decoding.backbone.fused_layers import obstacle
from medusa_decoding.decode.verify import TokenSelector
from medusa_decoding.model import MedusaModel
from medusa_decoding.trees.tree import Tree
from medusa_kernels._registry import interpreted
from medusa_kernels._triton.launch import Device

MODELS = ("Llama-2-7B", "Llama-3-8B", "Llama-2-13B", "Qwen3-8B")
HEADS = "shared, trimmed 8192"
DEVICES = tuple(gpu for gpu in GPUS if gpu != "h100")
"""An H100 SXM has the multiprocessors of an H200."""
MOST_IDLE = 1 / 3


@dataclass(frozen=True)
class Grid:
    """Launches of a step that are equal, on one GPU.

    Attributes:
        gpu: key of `inspection.GPUS`.
        model: key of `bench_step.MODELS`.
        nodes: of the tree.
        launch: one of them.
        times: how many there are in a step.
        row: what was compiled for it.
    """

    gpu: str
    model: str
    nodes: int
    launch: Launch
    times: int
    row: Row

    @property
    def multiprocessors(self) -> int:
        """Of the GPU."""
        return GPUS[self.gpu][1].multiprocessors

    @property
    def slots(self) -> int:
        """Programs that the GPU runs at once."""
        return self.multiprocessors * self.row.fitting

    @property
    def waves(self) -> int:
        """Rounds of as many programs as run at once."""
        return -(-self.launch.programs // self.slots)

    @property
    def idle(self) -> float:
        """The share of the multiprocessors' time that the last wave leaves idle."""
        return GPUS[self.gpu][1].idle(self.launch.programs, self.row.fitting)

    @property
    def in_flight(self) -> int | None:
        """Bytes of weights, or keys and values, that a multiprocessor has in flight; None if none are streamed."""
        stream = self.launch.stream
        if stream is None:
            return None
        together = min(self.row.fitting, -(-self.launch.programs // self.multiprocessors))
        return (self.row.stages - 1) * stream.tile_bytes * together

    def breaches(self) -> list[str]:
        """Return one sentence per rule that it breaks."""
        found = inspection.breaches(self.row)
        if self.row.failed:
            return found
        if self.row.fitting == 0:
            return [*found, "no program fits a multiprocessor"]
        if self.row.dots_16_bit and self.launch.stream is None:
            found.append("it multiplies matrices, but `launches` does not say how it streams them")
        if self.launch.stream is not None and self.idle > MOST_IDLE:
            found.append(
                f"{self.idle:.0%} of {self.multiprocessors} multiprocessors are idle with {self.launch.programs} "
                f"programs, {self.row.fitting} to a multiprocessor; at most {MOST_IDLE:.0%} may be"
            )
        return found

    def __str__(self) -> str:
        """Name it in one line."""
        return f"{self.gpu} {self.model} {self.nodes} nodes: {self.launch.stage}: {self.launch.name}"


def step_launches(
    model: str,
    nodes: int,
    prefix: int,
    heads: str,
    device: Device,
    dtype: torch.dtype = torch.bfloat16,
    *,
    batch: int = 1,
    selector: TokenSelector | None = None,
) -> list[Launch]:
    """Return the launches of one step of `bench_step` on a device, in order.

    Args:
        model: key of `bench_step.MODELS`.
        nodes: of the tree, 1 to 64; 1 for a plain step, without heads.
        prefix: cached rows.
        heads: key of `bench_step.HEADS`.
        device: the GPU to launch for.
        dtype: of weights and activations.
        batch: sequences.
        selector: how tokens are picked; None for greedy decoding.

    Raises:
        ValueError: an unknown model or kind of heads, nodes outside of 1 to 64, or layers that do not run fused.
    """
    for name, value, known in (("model", model, bench_step.MODELS), ("heads", heads, bench_step.HEADS)):
        if value not in known:
            raise ValueError(f"--{name}: expected one of {', '.join(known)}, got {value}")
    if not 1 <= nodes <= 64:
        raise ValueError(f"--nodes: expected 1 to 64, got {nodes}")
    base = bench_step.build(model, META, dtype)
    drafting = bench_step.random_heads(base, heads) if nodes > 1 else None
    tree = Tree([]) if drafting is None else bench_step.tree_of(drafting, nodes)
    parameters = {storage(parameter): name for name, parameter in base.named_parameters()}
    if drafting is not None:
        parameters |= {storage(parameter): f"heads.{name}" for name, parameter in drafting.named_parameters()}
    with torch.no_grad(), MedusaModel(base, drafting, tree, backend="eager") as medusa:
        run, _ = bench_step.prepare_step(medusa, tree, "eager", prefix, batch, selector)
        why_not = obstacle(medusa.backbone.decoder)
        if why_not is not None:
            raise ValueError(f"model: expected one whose layers run fused, got {model}: {why_not}")
        medusa.backbone.fuse = True
        with recorded(device, parameters) as launches:
            run()
    return launches


def inspect_grids(
    gpus: Sequence[str], models: Sequence[str], nodes: Sequence[int], prefix: int, heads: str, jobs: int
) -> list[Grid]:
    """Record a step for each GPU, model and number of nodes, compile its kernels, and return its launches in order.

    Each compiled form is compiled once, in `jobs` processes, with progress on stderr.
    """
    found: dict[tuple[Any, ...], tuple[Launch, int]] = {}
    numbers: dict[tuple[Any, ...], int] = {}
    work: list[tuple[str, Specialisation]] = []
    for gpu, model, count in ((g, m, n) for g in gpus for m in models for n in nodes):
        for launch in step_launches(model, count, prefix, heads, GPUS[gpu][1]):
            if launch.kernel is None:
                continue
            form = GPUS[gpu][0], specialisation(launch)
            number = numbers.setdefault(key(*form), len(numbers))
            if number == len(work):
                work.append(form)
            place = gpu, model, count, launch.stage, launch.grid, number
            first, times = found.get(place, (launch, 0))
            found[place] = first, times + 1
    rows = inspection.compile_all(work, jobs)
    return [
        Grid(gpu, model, count, launch, times, rows[number])
        for (gpu, model, count, _, _, number), (launch, times) in found.items()
    ]


def key(arch: str, spec: Specialisation) -> tuple[Any, ...]:
    """Return all that the compiler knows of a form for a target."""
    # Without constants at their defaults, so that one more argument of a kernel does not rename its other forms.
    usual = {parameter.name: parameter.default for parameter in spec.kernel.params if parameter.has_default}
    constants = {name: value for name, value in spec.constants.items() if (name, value) not in usual.items()}
    types, constants = (tuple(sorted(named.items())) for named in (spec.signature, constants))
    options = tuple(sorted(spec.options.items()))
    return arch, spec.name, types, constants, spec.aligned, spec.num_warps, spec.num_stages, options


def table(grids: Iterable[Grid]) -> str:
    """Format one line per group of equal launches."""
    head = (
        "gpu", "model", "nodes", "stage", "kernel", "tile", "times", "warps", "stages", "programs", "slots", "waves",
        "idle %", "regs", "shared", "in flight",
    )  # fmt: skip
    body = []
    for grid in grids:
        counts, launch = grid.row.counts, grid.launch
        fits = grid.row.fitting > 0
        filled = (grid.slots, grid.waves, f"{100 * grid.idle:.0f}") if fits else ("-", "-", "-")
        in_flight = grid.in_flight if fits and grid.in_flight is not None else "-"
        body.append(
            (
                grid.gpu, grid.model, grid.nodes, launch.stage, launch.name.strip("_").removesuffix("_kernel"),
                tile(launch), grid.times, grid.row.warps, grid.row.stages, launch.programs, *filled,
                counts.registers, counts.shared, in_flight,
            )
        )  # fmt: skip
    return inspection.aligned(head, body, 6)


def tile(launch: Launch) -> str:
    """Return the sizes of a launch's tile by axis, and into how many parts a product is divided: "M64 N128 K64 /4"."""
    sizes = {name: value for name, value in launch.arguments.items() if name.startswith("BLOCK_") or name == "ROWS"}
    parts = launch.arguments.get("PARTS", 1) if launch.op == "decode_linear" else 1
    return " ".join(
        [
            *(f"{name.removeprefix('BLOCK_')}{value}" for name, value in sizes.items()),
            *([f"/{parts}"] if parts > 1 else []),
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", nargs="+", choices=tuple(GPUS), default=DEVICES, metavar="NAME")
    parser.add_argument("--model", nargs="+", default=MODELS, metavar="NAME", help="shapes of bench_step")
    parser.add_argument("--nodes", nargs="+", type=int, default=(1, 16, 64), metavar="N", help="default: 1 16 64")
    parser.add_argument("--prefix", type=int, default=1024, metavar="ROWS", help="cached rows (default: 1024)")
    parser.add_argument("--heads", default=HEADS, metavar="KIND", help=f"heads of bench_step (default: {HEADS})")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (default: cores)")
    args = parser.parse_args(arguments)
    if interpreted():
        parser.error("TRITON_INTERPRET=1 is set: kernels cannot be compiled; unset it")
    try:
        rows = inspect_grids(args.device, args.model, args.nodes, args.prefix, args.heads, args.jobs)
    except ValueError as error:
        parser.error(str(error))
    breaches = [f"{row}: {breach}" for row in rows for breach in row.breaches()]
    return inspection.report(table(rows), breaches)


if __name__ == "__main__":
    sys.exit(main())
