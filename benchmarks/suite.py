"""How a benchmark of one operation goes through its cases: order, time budget, records, and what happens on errors.

A benchmark file gives its cases, the most telling first, and a function that measures one case through a `Run`. What
was not reached within the budget, did not fit or failed is a record too, with its reason. This file knows no operation.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import medusa_kernels
from benchmarks import gpu, harness

MEMORY_CAP = 48 * 2**30
"""Cases whose inputs exceed this are left out, with a record."""

QUICK = 8
NO_GPU = "needs a CUDA device, and torch sees none"


class Case:
    """One line of a benchmark's table: a dataclass whose fields tell it from the others."""

    def shapes(self) -> dict[str, Any]:
        """Return the fields as JSON has them."""
        fields = dataclasses.asdict(self)  # type: ignore[call-overload]
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}


Measure = Callable[[Any, "Run"], None]
Way = Callable[[], Any]
OURS = "medusa_kernels"


def largest_difference(ours: Way, theirs: Way) -> float:
    """Return the largest difference between the numbers of two results, which are tensors or tuples of them."""
    pairs = zip(*((found if isinstance(found, tuple) else (found,)) for found in (ours(), theirs())), strict=True)
    return float(torch.stack([(a.double() - b.double()).abs().max() for a, b in pairs]).max())


def norm_of_difference(ours: Way, theirs: Way) -> float:
    """Return the norm of the difference of two tensors over that of the first."""
    wanted = ours().float()
    return float((theirs().float() - wanted).norm() / wanted.norm())


@dataclass(frozen=True)
class Copy:
    """One copy of a case's inputs, held by the calls on it.

    Attributes:
        ways: calls by name, ours among them.
        difference: returns how far the second way's result is from the first one's.
        others: calls that are not compared.
    """

    ways: Mapping[str, Way]
    difference: Callable[[Way, Way], float] = largest_difference
    others: Mapping[str, Way] = field(default_factory=dict)


def served(op: str, device: torch.device) -> dict[str, str]:
    """Return, for a record, which implementation of an op serves a device; nothing for what is not an op."""
    return {"served_by": medusa_kernels.served_by(op, device.type).name} if op in medusa_kernels.OPS else {}


@dataclass
class Run:
    """One pass through a benchmark's cases on one device.

    Attributes:
        op: the operation's name, which records carry as `benchmark`.
        device: where the operation runs.
        budget: seconds; no case is begun after them.
        dtype: of the inputs.
        seconds: how long one implementation is measured.
        limits: counts that a benchmark spends, such as compilations of a peer.
        records: everything written so far.
        copy: the device's copy bandwidth in bytes per second; 0: it is measured now.
    """

    op: str
    device: torch.device
    budget: float = 300.0
    dtype: torch.dtype = torch.bfloat16
    seconds: float = 0.15
    limits: dict[str, int] = field(default_factory=dict)
    records: list[dict[str, Any]] = field(default_factory=list)
    copy: float = 0.0

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        if not self.copy:
            self.copy = gpu.copy_bandwidth(self.device)
            gpu.release(self.device)

    def left(self) -> float:
        """Return the seconds left of the budget."""
        return self.budget - (time.monotonic() - self.began)

    def time(
        self,
        case: Case,
        implementation: str,
        make_call: Callable[[int], gpu.Call],
        sets: int,
        *,
        bytes: int,
        flop: int | None = None,
        **extra: Any,
    ) -> gpu.Timing:
        """Measure one implementation of a case and write its record."""
        timing = gpu.cold_replay(make_call, sets, self.device, seconds=self.seconds)
        self.write_timing(case, implementation, timing, bytes=bytes, flop=flop, **extra)
        return timing

    def write_timing(
        self,
        case: Case,
        implementation: str,
        timing: gpu.Timing,
        *,
        bytes: int,
        flop: int | None = None,
        **extra: Any,
    ) -> None:
        """Write the record of a timing that was taken already."""
        rate = bytes / (timing.median_us * 1e-6)
        figures = {key: round(value, 3) if isinstance(value, float) else value for key, value in vars(timing).items()}
        figures |= {"bytes": bytes, "gb_per_s": round(rate / 1e9, 1), "fraction": round(rate / self.copy, 4)}
        if flop is not None:
            figures |= {"flop": flop, "tflop_per_s": round(flop / timing.median_us / 1e6, 1)}
        self._write(case, implementation, figures | extra)
        say = f"{timing.median_us:10.1f} us  {rate / 1e9:7.0f} GB/s  {rate / self.copy:6.1%}"
        print(f"  {implementation:34} {say}{'' if timing.captured else '  (' + timing.note + ')'}", flush=True)

    def copies(self, prepare: Callable[[Any, Run], Copy], case: Case, size: int, least: int = 1) -> list[Copy]:
        """Prepare as many copies of a case, of which each reads `size` bytes, as `gpu.sets_needed` says."""
        return [prepare(case, self) for _ in range(max(least, gpu.sets_needed(size, self.device)))]

    def compare(
        self,
        case: Case,
        copies: Sequence[Copy],
        tolerance: float,
        *,
        bytes: int,
        peer_bytes: int | None = None,
        **more: Any,
    ) -> gpu.Timing:
        """Measure our way on copies of a case's inputs, then every peer whose result agrees with ours.

        Args:
            case: the case.
            copies: what there is to run.
            tolerance: the largest difference of a peer that is timed.
            bytes: that our way must move.
            peer_bytes: those of the peers, if others.
            **more: further figures of all, such as flop.

        Returns:
            The timing of our way.
        """

        def timed(name: str, **figures: Any) -> gpu.Timing:
            return self.time(case, name, lambda i: copies[i].ways[name], len(copies), **figures)

        timing = timed(OURS, bytes=bytes, **(more | served(self.op, self.device)))
        more |= {"bytes": bytes if peer_bytes is None else peer_bytes, "ours_us": round(timing.median_us, 2)}

        def measure_peer(name: str) -> None:
            first = copies[0]
            error = first.difference(first.ways[OURS], first.ways[name])
            if self.agrees(case, name, error, tolerance):
                timed(name, error=error, **more)

        for name in copies[0].ways:
            if name != OURS:
                self.attempt(case, name, functools.partial(measure_peer, name))
        return timing

    def skip(self, case: Case, implementation: str, reason: str) -> None:
        """Record why an implementation was not measured."""
        self._write(case, implementation, {"skipped": reason})
        print(f"  {implementation:34} skipped: {reason}", flush=True)

    def agrees(self, case: Case, implementation: str, error: float, tolerance: float) -> bool:
        """Say how far a peer's result is from ours; a peer that disagrees is recorded as wrong, and is not to be timed.

        Not a number never agrees.
        """
        print(f"  {implementation:34} differs from ours by {error:.2e} (at most {tolerance:.0e})", flush=True)
        if error <= tolerance:
            return True
        self._write(case, implementation, {"wrong": True, "error": float(f"{error:.3e}"), "tolerance": tolerance})
        print(f"  {implementation:34} WRONG, not timed", flush=True)
        return False

    def attempt(self, case: Case, implementation: str, do: Callable[[], None]) -> None:
        """Let one implementation fail alone: what it raised is its record. A device that no longer works ends the run.

        Raises:
            DeviceLostError: the device does not answer any more.
        """
        try:
            do()
            return
        except torch.OutOfMemoryError as error:
            reason = f"out of memory: {gpu.first_line(error)}"
        except Exception as error:
            reason = f"{type(error).__name__}: {gpu.first_line(error)}"
        self.skip(case, implementation, reason)
        # The failed call's tensors hang on its traceback, which may be part of a cycle.
        gc.collect()
        self.check_device(reason)

    def check_device(self, reason: str) -> None:
        """Raise `DeviceLostError` if the device does not answer any more."""
        try:
            gpu.release(self.device)
            torch.zeros(1, device=self.device).add_(1).item()
        except Exception as error:
            raise DeviceLostError(f"the device is lost after: {reason}") from error

    def note(self, **figures: Any) -> None:
        """Write a record of the run itself."""
        record = {"op": self.op, **figures, "copy_gb_per_s": round(self.copy / 1e9, 1)}
        self.records.append(record)
        harness.write_record(self.op, record)

    def _write(self, case: Case, implementation: str, figures: dict[str, Any]) -> None:
        self.note(
            shapes=case.shapes(),
            dtype=str(self.dtype).removeprefix("torch."),
            implementation=implementation,
            **figures,
        )


class DeviceLostError(RuntimeError):
    """The device failed in a way that no later call survives."""


def label(case: Case) -> str:
    """Return the text that a case is chosen and shown by: "nodes=64 prefix=8192 ..."."""
    return " ".join(f"{name}={text(value)}" for name, value in case.shapes().items())


def text(value: Any) -> str:
    """Return a shape's value as one word."""
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)


def go(run: Run, cases: Sequence[Case], measure: Measure) -> Run:
    """Measure the cases in order until the budget is spent; record at last which were not reached."""
    gc.collect()
    gc.freeze()
    print(f"{run.op}: {len(cases)} cases, copy bandwidth {run.copy / 1e9:.0f} GB/s", flush=True)
    todo = list(cases)
    why = "the budget was spent"
    try:
        while todo and run.left() > 0:
            case = todo[0]
            print(f"{label(case)}  [{run.left():.0f} s left]", flush=True)
            run.attempt(case, "all", functools.partial(measure, case, run))
            todo.pop(0)
            gpu.release(run.device)
    except DeviceLostError as error:
        todo.pop(0)
        why = str(error)
        raise
    finally:
        gc.unfreeze()
        if todo:
            run.note(not_reached=[case.shapes() for case in todo], reason=why)
            print(f"not reached: {len(todo)} cases, because {why}", flush=True)
        print("\n".join(summary(run.records)), flush=True)
    return run


def summary(records: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line per case: our time, its fraction of the copy bandwidth, and how much slower the fastest peer is."""
    timed: dict[str, dict[str, dict[str, Any]]] = {}
    for record in records:
        if "median_us" in record:
            line = " ".join(text(value) for value in record["shapes"].values())
            timed.setdefault(line, {})[record["implementation"]] = record
    lines = []
    for line, by_name in timed.items():
        ours = by_name.pop(OURS, None)
        if ours is None:
            continue
        shown = f"{line}: {ours['median_us']:.1f} us {ours['fraction']:.0%}"
        for name, record in sorted(by_name.items(), key=lambda item: item[1]["median_us"]):
            shown += f", {name} {record['median_us'] / ours['median_us']:.2f} x"
        lines.append(shown)
    return lines


def by_rank(axes: Mapping[str, Sequence[Any]]) -> Iterator[dict[str, Any]]:
    """Go through all combinations, those near the front of every axis first."""
    combinations: list[tuple[int, dict[str, Any]]] = [(0, {})]
    for name, values in axes.items():
        combinations = [
            (rank + i, chosen | {name: value}) for rank, chosen in combinations for i, value in enumerate(values)
        ]
    yield from (chosen for _, chosen in sorted(combinations, key=lambda pair: pair[0]))


def parser(doc: str | None, budget: int) -> argparse.ArgumentParser:
    """Return the options that every benchmark of an operation takes."""
    options = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--quick", action="store_true", help=f"only the {QUICK} most telling cases")
    options.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="cases whose line holds TEXT; repeatable, all must"
    )
    options.add_argument("--budget", type=float, default=budget, metavar="SECONDS", help=f"default: {budget}")
    options.add_argument("--list", action="store_true", help="print the cases in order, measure nothing")
    return options


def chosen(cases: Iterable[Case], args: argparse.Namespace) -> list[Case]:
    """Return the cases that the command line asks for."""
    wanted = [case for case in cases if all(text in label(case) for text in args.only)]
    return wanted[:QUICK] if args.quick else wanted


def main(
    doc: str | None,
    op: str,
    cases: Iterable[Case],
    measure: Measure,
    *,
    budget: int = 300,
    options: argparse.ArgumentParser | None = None,
    limits: Sequence[str] = (),
) -> None:
    """Run a benchmark from the command line; the exit status says whether the device survived it.

    Args:
        doc: the benchmark's docstring, for its help.
        op: the operation.
        cases: all its cases, in order.
        measure: measures one.
        budget: default budget in seconds.
        options: a parser with more options than `parser` gives.
        limits: names of those options that become `Run.limits`.
    """
    args = (options or parser(doc, budget)).parse_args()
    wanted = chosen(cases, args)
    if args.list:
        print("\n".join(label(case) for case in wanted))
        return
    if not torch.cuda.is_available():
        raise SystemExit(f"{op}: {NO_GPU}; on a CPU, pytest benchmarks/ --benchmark-only runs a small part")
    run = Run(op, torch.device("cuda"), args.budget, limits={name: getattr(args, name) for name in limits})
    with torch.inference_mode():
        go(run, wanted, measure)
